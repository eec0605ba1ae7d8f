"""One page of HTML about runs: nothing in it is fetched from anywhere, and it reads on a phone."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

from lit_encoders.report.charts import MOST_POINTS, draw, legend
from lit_encoders.report.panels import Axis, Panel, has_tokens, make_panels
from lit_encoders.report.run_record import RunRecord
from lit_encoders.report.settings import compare
from lit_encoders.report.style import STYLE
from lit_encoders.report.tables import (
    MISSING,
    Table,
    evaluation_tables,
    newest_table,
    overview,
    phase_table,
    record_tables,
    title_of,
)

# Tells a page of ours, which may be written over, from any other file.
GENERATOR = '<meta name="generator" content="lit-encoders report">'
# The browser itself refuses whatever is not in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# The x axis of all charts; their labels stand at every group of charts.
AXIS_BUTTONS = (
    '<input type="radio" name="axis" id="tokens" aria-label="against tokens" checked>'
    '<input type="radio" name="axis" id="steps" aria-label="against steps">'
)
AXIS_LABELS = '<div class="axes"><label for="tokens">tokens</label><label for="steps">steps</label></div>'


def render(runs: Sequence[RunRecord]) -> str:
    """The whole page.

    Args:
        runs: in the order of their columns and colours.
    """
    names = ", ".join(run.name for run in runs)
    sections = [
        ("Overview", table_html(overview(runs))),
        ("What differs" if len(runs) > 1 else "Settings", settings_html(runs)),
        ("Phases", table_html(phase_table(runs)) if any(run.phases for run in runs) else ""),
        *charts_sections(runs),
        ("Newest values", table_html(newest_table(runs)) if any(run.curves for run in runs) else ""),
        ("Evaluation", tables_html(table for run in runs for table in evaluation_tables(run))),
        ("Records", tables_html(table for run in runs for table in record_tables(run))),
        ("Pictures", pictures_html(runs)),
    ]
    body = "\n".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections if html)
    # Before all sections: by their state the style shows the charts of one axis, without a script.
    switch = AXIS_BUTTONS if any(has_tokens(run) for run in runs) else ""
    title = f"{'Runs' if len(runs) > 1 else 'Run'}: {escape(names)}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{switch}
{body}
</body>
</html>
"""


def table_html(table: Table) -> str:
    """A table in a box of its own, which scrolls sideways where the page must not."""
    if not table.rows:
        return ""

    def cells(row: Sequence[str], tag: str) -> str:
        kinds = ["" if place < table.num_texts else ' class="number"' for place in range(len(row))]
        return "".join(f"<{tag}{kind}>{breakable(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    rows = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    return (
        f'{title}<div class="scroll" tabindex="0"><table><thead><tr>{cells(table.heads, "th")}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def breakable(text: str) -> str:
    """A text for HTML, whose long names may be broken where they are put together.

    >>> breakable("a.b_c/d < 0.5")
    'a.<wbr>b_<wbr>c/<wbr>d &lt; 0.5'
    """
    return re.sub(r"(?<=[a-z])([._/])(?=[a-z])", r"\1<wbr>", escape(text), flags=re.IGNORECASE)


def tables_html(tables: Iterable[Table]) -> str:
    """Several tables, one under the other."""
    return "".join(map(table_html, tables))


def settings_html(runs: Sequence[RunRecord]) -> str:
    """Configurations side by side: with several runs, what differs, and what is equal folded away."""
    settings = [run.settings for run in runs]
    apart, equal = compare(settings)

    def table(keys: Sequence[str]) -> str:
        columns = runs if keys is apart else runs[:1]
        rows = [[key, *(run.settings.get(key, MISSING) for run in columns)] for key in keys]
        heads = ["", *(run.name for run in columns)] if keys is apart else ["", "value"]
        return table_html(Table("", heads, rows, num_texts=1 + len(columns)))

    unknown = [run.name for run in runs if not run.settings]
    note = f"<p>No configuration is left of {escape(', '.join(unknown))}.</p>" if unknown else ""
    if len(runs) > 1 and not apart:
        note += "<p>Nothing: all settings are equal.</p>"
    what = f"{len(equal)} settings" + (" that are equal" if len(runs) > 1 else "")
    folded = f"<details><summary>{what}</summary>{table(equal)}</details>" if equal else ""
    return note + table(apart) + folded


def charts_sections(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Charts by group, each against tokens and against steps where the tokens are known."""
    axes: list[Axis] = ["tokens", "steps"] if any(has_tokens(run) for run in runs) else ["steps"]
    labels = {"tokens": "tokens", "steps": "optimizer steps"}
    sections: dict[str, str] = {}
    for axis in axes:
        kind = f"charts by-{axis}" if len(axes) > 1 else "charts"
        left_out = [run.name for run in runs if axis == "tokens" and run.curves and not has_tokens(run)]
        note = f"<p>Tokens are not known of {escape(', '.join(left_out))}.</p>" if left_out else ""
        for group, panels in make_panels(runs, axis).items():
            long = any(len(line.points) > MOST_POINTS for panel in panels for line in panel.lines)
            told = note + (
                "<p>Of long curves the line is the mean, and the shade behind it the range.</p>" if long else ""
            )
            figures = "".join(panel_html(panel, labels[axis]) for panel in panels)
            sections.setdefault(group, AXIS_LABELS if len(axes) > 1 else "")
            sections[group] += f'<div class="{kind}">{told}{figures}</div>'
    return list(sections.items())


def panel_html(panel: Panel, x_label: str) -> str:
    """A chart with its title and legend."""
    title = title_of(panel.title)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{draw(title, panel.lines, panel.lanes, x_label)}"
        f"{legend(panel.lines)}</figure>"
    )


def pictures_html(runs: Sequence[RunRecord]) -> str:
    """Pictures that runs have left, as data inside the page."""
    figures = []
    for run in runs:
        for picture in run.pictures:
            title = escape(f"{run.name}: {picture.title}" if len(runs) > 1 else picture.title)
            data = b64encode(picture.data).decode()
            image = f'<img alt="{title}" src="data:{picture.kind};base64,{data}">'
            figures.append(f"<figure><figcaption>{title}</figcaption>{image}</figure>")
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""

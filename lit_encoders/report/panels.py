"""Which curves stand in one chart: a metric of all runs, and of all sources, streams or ranges it is logged for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lit_encoders.report.charts import Lane, Line
from lit_encoders.report.event_log import Point
from lit_encoders.report.run_record import RunRecord
from lit_encoders.report.tables import NO_METRICS

Axis = Literal["tokens", "steps"]
# Title of a group of charts -> whether a tag belongs to it; the first that fits.
GROUPS: Mapping[str, Callable[[str], bool]] = {
    "Held-out losses": lambda tag: tag.startswith("val/") and tag.endswith("loss"),
    "Training losses": lambda tag: tag.endswith("loss"),
    "Other curves": lambda tag: True,
}


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        title: of the metric.
        lines: of all runs.
        lanes: their phases.
    """

    title: str
    lines: Sequence[Line] = field(default_factory=list)
    lanes: Sequence[Lane] = ()


def metric_of(tag: str) -> tuple[str, str]:
    """The metric of a tag, and what it is of.

    >>> metric_of("val/mlm_loss"), metric_of("val/general/mlm_loss"), metric_of("drift/0:9/cosine")
    (('val/mlm_loss', ''), ('val/mlm_loss', 'general'), ('drift/cosine', '0:9'))
    >>> metric_of("cka/3"), metric_of("loss")
    (('cka', '3'), ('loss', ''))
    """
    first, *middle = tag.split("/")
    if not middle:
        return first, ""
    *middle, last = middle
    return (first, last) if last.isdigit() else (f"{first}/{last}", "/".join(middle))


def is_drawn(tag: str) -> bool:
    """Whether a scalar has a chart: clocks have none, and a perplexity is its loss once more."""
    return tag not in NO_METRICS and not tag.endswith("perplexity")


def has_tokens(run: RunRecord) -> bool:
    """Whether the run's curves can be drawn against tokens."""
    return any(point.tokens is not None for points in run.curves.values() for point in points)


def make_panels(runs: Sequence[RunRecord], axis: Axis) -> dict[str, list[Panel]]:
    """All charts, by the title of their group.

    Args:
        runs: of the page, in the order of their colours.
        axis: what x is.
    """
    tags = sorted({tag for run in runs for tag in run.curves if is_drawn(tag)})
    lanes = make_lanes(runs, axis)
    found: dict[str, list[Panel]] = {}
    for group, belongs in GROUPS.items():
        mine = [tag for tag in tags if belongs(tag)]
        tags = [tag for tag in tags if tag not in mine]
        for metric in dict.fromkeys(metric_of(tag)[0] for tag in mine):
            of = [tag for tag in mine if metric_of(tag)[0] == metric]
            if lines := make_lines(runs, of, axis):
                found.setdefault(group, []).append(Panel(metric, lines, lanes))
    return found


def make_lines(runs: Sequence[RunRecord], tags: Sequence[str], axis: Axis) -> list[Line]:
    """The lines of one metric: colours tell runs apart where there are several, dashes what they are of.

    Args:
        runs: of the page.
        tags: of the metric.
        axis: what x is.
    """
    lines = []
    for number, run in enumerate(runs):
        for place, tag in enumerate(tags):
            points = [(x, point.value) for point in run.curves.get(tag, ()) if (x := _x(point, axis)) is not None]
            part = metric_of(tag)[1] or ("all" if len(tags) > 1 else "")
            several = len(runs) > 1
            label = ", ".join(filter(None, [run.name if several or not part else "", part]))
            if points:
                lines.append(Line(label, points, number if several else place, place if several else place // 8))
    return lines


def make_lanes(runs: Sequence[RunRecord], axis: Axis) -> list[Lane]:
    """Phases of the runs: one lane where all change at the same places, else one for each way to change.

    Args:
        runs: of the page, in the order of their colours.
        axis: what x is.
    """
    ways: dict[tuple[tuple[str, float, float], ...], list[int]] = {}
    for number, run in enumerate(runs):
        if spans := _spans(run, axis):
            ways.setdefault(spans, []).append(number)
    if len(ways) < 2:
        return [Lane(spans, () if len(at) == len(runs) else at) for spans, at in ways.items()]
    width = max(stop for spans in ways for *_, stop in spans)
    one, *others = ways
    if sum(map(len, ways.values())) == len(runs) and all(_alike(one, other, width) for other in others):
        names = [" / ".join(dict.fromkeys(span[0] for span in spans)) for spans in zip(*ways, strict=True)]
        return [Lane([(name, start, stop) for name, (_, start, stop) in zip(names, one, strict=True)])]
    return [Lane(spans, at) for spans, at in ways.items()]


def _alike(one: Sequence[tuple[str, float, float]], other: Sequence[tuple[str, float, float]], width: float) -> bool:
    """Whether phases change at places that cannot be told apart in a chart."""
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(abs(a[1] - b[1]) < 0.005 * width and abs(a[2] - b[2]) < 0.005 * width for a, b in pairs)


def _spans(run: RunRecord, axis: Axis) -> tuple[tuple[str, float, float], ...]:
    spans = []
    for phase in run.phases:
        ends: tuple[float | None, float | None] = (phase.start, phase.stop)
        if axis == "tokens":
            ends = (run.clock.tokens(phase.start), run.clock.tokens(phase.stop))
        if ends[0] is not None and ends[1] is not None:
            spans.append((phase.name, ends[0], ends[1]))
    return tuple(spans)


def _x(point: Point, axis: Axis) -> float | None:
    return point.tokens if axis == "tokens" else float(point.step)

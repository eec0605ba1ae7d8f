"""Curves as inline SVG: a few kilobytes each, drawn in the page's own colours, readable at the width of a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

# In units of the drawing; a phone shows 1 unit as about 0.8 pixels.
WIDTH, PLOT_HEIGHT = 420, 180
LEFT, RIGHT, TOP, BOTTOM, LANE = 54, 12, 6, 36, 16
# Points of a curve that are drawn, about: more than there are pixels for would only make the page large.
MOST_POINTS = 400
# Colours and dashes are classes of the page's style, so that dark pages have other ones.
NUM_COLOURS, NUM_DASHES = 8, 4
# At most as many points get a mark of their own.
MOST_MARKS = 40

Pair = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: in the legend; curves that share one stand in it once.
        points: (x, y), by growing x; what is not finite leaves a gap.
        colour: number of a colour.
        dash: number of a dash pattern, 0 is solid.
    """

    label: str
    points: Sequence[Pair]
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Lane:
    """The phases of one run, or of several that share them: a strip above the curves.

    Attributes:
        spans: (name, start, stop) on the x axis.
        colours: numbers of the runs' colours, none where the phases are those of all runs.
    """

    spans: Sequence[tuple[str, float, float]]
    colours: Sequence[int] = ()


def thin(points: Sequence[Pair], most: int = MOST_POINTS) -> list[Pair]:
    """Leave out points that would not be seen; the ends, and the lowest and highest of each stretch, stay.

    Args:
        points: (x, y).
        most: to keep, about.

    >>> thin([(x, x % 7) for x in range(1000)], 40)[-1], len(thin([(0, 1), (1, 2)]))
    ((999, 5), 2)
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / (most - 2))
    inner = points[1:-1]
    kept = [points[0]]
    for start in range(0, len(inner), size):
        stretch = inner[start : start + size]
        places = range(len(stretch))
        # Anything that is not finite stays, or its gap would be closed.
        lost = [place for place in places if not math.isfinite(stretch[place][1])][:1]
        ends = [choose(places, key=lambda place: stretch[place][1]) for choose in (min, max)]
        kept += [stretch[place] for place in sorted({*lost, *ends})]
    return [*kept, points[-1]]


def means(points: Sequence[Pair], count: int = 120) -> list[Pair]:
    """The means of stretches of equal length, where they lie on average; what is not finite is left out.

    >>> means([(0, 1), (1, 3), (2, 5), (3, 9)], 2)
    [(0.5, 2.0), (2.5, 7.0)]
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = max(1, math.ceil(len(finite) / count))
    stretches = [finite[start : start + size] for start in range(0, len(finite), size)]
    return [(fmean(x for x, _ in stretch), fmean(y for _, y in stretch)) for stretch in stretches]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``most``: steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 10), ticks(9.05, 10.35)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [9.2, 9.4, 9.6, 9.8, 10.0, 10.2])
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice >= 0.7 * raw / power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number of an axis.

    >>> [short(value) for value in (0, 0.0002, 1500, 40_000, 2.5e6, 1e9, 10.25)]
    ['0', '0.0002', '1.5k', '40k', '2.5M', '1B', '10.25']
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def draw(title: str, lines: Sequence[Line], lanes: Sequence[Lane], x_label: str) -> str:
    """One chart as an ``<svg>`` element.

    Args:
        title: for those who cannot see it.
        lines: with at least one point altogether.
        lanes: of phases; a single one also shades the plot.
        x_label: what the x axis is.
    """
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
    edges = [edge for lane in lanes for _, start, stop in lane.spans for edge in (start, stop)]
    x_range = _widened(
        min([x for x, _ in finite] + edges, default=0), max([x for x, _ in finite] + edges, default=1), 0
    )
    y_range = _widened(min((y for _, y in finite), default=0), max((y for _, y in finite), default=1), 0.06)
    top = TOP + LANE * len(lanes)
    height = top + PLOT_HEIGHT + BOTTOM

    def across(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return top + (y_range[1] - y) / (y_range[1] - y_range[0]) * PLOT_HEIGHT

    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img"><title>{escape(title)}</title>']
    for number, lane in enumerate(lanes):
        parts += _lane(lane, across, TOP + LANE * number, top + PLOT_HEIGHT, shade=len(lanes) == 1)
    for y in ticks(*y_range):
        at = f"{down(y):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in ticks(*x_range, 4):
        parts.append(f'<text x="{across(x):.1f}" y="{top + PLOT_HEIGHT + 15}" text-anchor="middle">{short(x)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {top}V{top + PLOT_HEIGHT}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 5}" text-anchor="middle">{escape(x_label)}</text>'
    )
    for place, line in enumerate(lines):
        # Curves that lie on each other all show: those beneath are wider.
        parts += _line(line, across, down, 1.7 if len(lines) == 1 else 3.2 - 1.8 * place / (len(lines) - 1))
    return "".join([*parts, "</svg>"])


def legend(lines: Sequence[Line]) -> str:
    """What the lines of a chart are, as HTML; nothing for one that speaks for itself."""
    named = {line.label: line for line in lines}
    if len(named) < 2:
        return ""
    items = [
        f'<li><svg viewBox="0 0 24 8"><path class="{_style(line)}" stroke-width="2.4" d="M0 4H24"/></svg>'
        f"{escape(label)}</li>"
        for label, line in named.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _widened(low: float, high: float, share: float) -> Pair:
    """A range with room around it; one of a single value gets some, too."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.05 or 1.0
        return (low - room, high + room)
    room = (high - low) * share
    return (low - room, high + room)


def _style(line: Line) -> str:
    return f"line c{line.colour % NUM_COLOURS} d{line.dash % NUM_DASHES}"


def _pieces(points: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Stretches of finite points."""
    piece: list[Pair] = []
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            piece.append((x, y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _line(line: Line, across: Callable[[float], float], down: Callable[[float], float], width: float) -> Iterator[str]:
    colour = line.colour % NUM_COLOURS
    long = len(line.points) > MOST_POINTS
    for piece in _pieces(thin(line.points)):
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in piece)
        if len(piece) > 1:
            style = f"line c{colour} faint" if long else _style(line)
            yield f'<path class="{style}" stroke-width="{1 if long else width:.1f}" d="M{path}"/>'
        if len(line.points) <= MOST_MARKS or len(piece) == 1:
            for x, y in piece:
                place = f'cx="{across(x):.1f}" cy="{down(y):.1f}"'
                what = f"{escape(line.label)}: {y:.5g} at {x:,.0f}"
                yield f'<circle class="c{colour}" {place} r="{width / 2 + 1.5:.1f}"><title>{what}</title></circle>'
    if long:
        # The range of a noisy curve hides where it goes.
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in means(line.points))
        yield f'<path class="{_style(line)}" stroke-width="{width:.1f}" d="M{path}"/>'


def _lane(lane: Lane, across: Callable[[float], float], y: float, bottom: float, shade: bool) -> Iterator[str]:
    for place, colour in enumerate(lane.colours):
        yield f'<circle class="c{colour % NUM_COLOURS}" cx="{LEFT - 8 - 9 * place}" cy="{y + 7}" r="3.5"/>'
    for place, (name, start, stop) in enumerate(lane.spans):
        left, right = across(start), across(stop)
        tone = f"phase p{place % 2}"
        strip = max(right - left - 1, 0.5)
        yield (
            f'<rect class="{tone}" x="{left:.1f}" y="{y}" width="{strip:.1f}" height="{LANE - 2}">'
            f"<title>{escape(name)}: {start:,.0f} to {stop:,.0f}</title></rect>"
        )
        if shade:
            width, height = f"{right - left:.1f}", f"{bottom - y - LANE:.1f}"
            yield f'<rect class="{tone}" x="{left:.1f}" y="{y + LANE}" width="{width}" height="{height}"/>'
        # About 6 units a letter; a name that does not fit is told by pointing at its strip.
        fits = int((right - left) / 5.8)
        text = name if len(name) <= fits else f"{name[: fits - 1]}…" if fits >= 4 else ""
        if text:
            middle = f"{(left + right) / 2:.1f}"
            yield f'<text class="small" x="{middle}" y="{y + 11}" text-anchor="middle">{escape(text)}</text>'

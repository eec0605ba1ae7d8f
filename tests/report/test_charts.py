"""Curves as SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from lit_encoders.report.charts import Lane, Line, draw, legend, means, thin, ticks

NAN = float("nan")


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def paths(svg: str) -> list[str]:
    return [str(path.get("d")) for path in parse(svg).iter("path") if "line" in str(path.get("class"))]


def test_points_stand_where_they_belong() -> None:
    (path,) = paths(draw("t", [Line("a", [(0, 1), (50, 3), (100, 2)])], [], "steps"))
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y1 < y2 < y0
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.11)


def test_what_is_not_finite_leaves_a_gap() -> None:
    svg = draw("t", [Line("a", [(0, 1), (1, 2), (2, NAN), (3, math.inf), (4, 2), (5, 1)])], [], "steps")
    assert len(paths(svg)) == 2
    assert "nan" not in svg
    assert "inf" not in svg


def test_phases_are_shaded_and_named() -> None:
    spans = [("detour", 0.0, 90.0), ("decay", 90.0, 100.0)]
    svg = parse(draw("t", [Line("a", [(0, 1), (100, 2)])], [Lane(spans)], "steps"))
    rectangles = [rectangle for rectangle in svg.iter("rect") if "phase" in str(rectangle.get("class"))]
    assert len(rectangles) == 4  # Of each phase its strip, and its part of the plot.
    assert max(float(str(rectangle.get("height"))) for rectangle in rectangles) == 180
    assert {"detour", "decay"} <= {text.text for text in svg.iter("text")}
    two = parse(draw("t", [Line("a", [(0, 1), (100, 2)])], [Lane(spans, [0]), Lane(spans[:1], [1])], "steps"))
    assert max(float(str(rectangle.get("height"))) for rectangle in two.iter("rect")) < 20


@pytest.mark.parametrize(
    "points", [[(0.0, 1.0)], [(3.0, 0.0), (3.0, 0.0)], [(0.0, 1e-30), (1e12, 1e-30)], [(0.0, NAN)]]
)
def test_flat_and_single_points_are_drawn(points: list[tuple[float, float]]) -> None:
    assert len(parse(draw("t", [Line("a", points)], [], "steps"))) > 3


def test_names_are_escaped() -> None:
    lines = [Line("<script>a</script>", [(0, 1)]), Line("b", [(0, 1)])]
    svg = draw("<b>", lines, [Lane([("<i>&", 0.0, 1.0)])], "<x>") + legend(lines)
    assert not any(tag in svg for tag in ("<script", "<b>", "<i>", "<x>"))


def test_many_points_are_thinned_and_spikes_stay() -> None:
    points = [(float(x), 100.0 if x == 7777 else math.sin(x / 500)) for x in range(20_000)]
    thinned = thin(points)
    assert len(thinned) <= 401
    assert points[7777] in thinned
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]
    assert thinned == sorted(thinned)
    with_gap = [(x, NAN if x == 5000 else y) for x, y in points]
    assert any(math.isnan(y) for _, y in thin(with_gap))


def test_a_long_curve_is_its_mean_before_its_range() -> None:
    points = [(float(x), float(x % 2) if x else NAN) for x in range(10_000)]
    assert all(y == pytest.approx(0.5, abs=0.01) for _, y in means(points)[:-1])
    svg = draw("t", [Line("a", points, dash=1)], [], "steps")
    assert [path.get("class") for path in parse(svg).iter("path")][-2:] == ["line c0 faint", "line c0 d1"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e-7, 2e-7), (9.05, 10.35), (0, 44775), (1e9, 1.1e9)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert low - 1e-9 * abs(low) <= found[0] < found[-1] <= high * (1 + 1e-9)


def test_a_legend_only_where_there_is_a_choice() -> None:
    assert legend([Line("a", [(0, 1)])]) == ""
    assert legend([Line("a", [(0, 1)]), Line("b", [(0, 1)])]).count("<li>") == 2

"""Pictures show the numbers they were given, without a display."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lit_encoders.plots import curves, heat_map


def test_heat_map_shows_each_value(tmp_path: Path) -> None:
    values = [[0.0, 0.5, 1.0], [2.0, 3.0, float("nan")]]
    figure = heat_map(values, ["first", "second"], ["0:1", "1:2", "head"], "distance")
    axes, bar = figure.axes
    np.testing.assert_array_equal(np.ma.filled(np.ma.asarray(axes.images[0].get_array()), np.nan), values)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0:1", "1:2", "head"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    assert axes.get_title() == "distance"
    assert bar.get_ylim() == (0.0, 3.0)
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_many_rows_do_not_print_over_each_other() -> None:
    figure = heat_map([[1.0]] * 200, [str(number) for number in range(200)], ["a"], "t")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [str(number) for number in range(0, 200, 5)]


def test_curves_hold_their_points(tmp_path: Path) -> None:
    panels = {"left": {"a": [(0.0, 1.0), (1.0, 2.0)], "b": [(0.5, 3.0)]}, "right": {"a": [(0.0, 4.0)]}}
    figure = curves(panels, "alpha", "loss")
    assert [axes.get_title() for axes in figure.axes] == ["left", "right"]
    lines = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines}
    assert lines == {"a": [[0.0, 1.0], [1.0, 2.0]], "b": [[0.5, 3.0]]}
    assert [axes.get_xlabel() for axes in figure.axes] == ["alpha", "alpha"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", ""]
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

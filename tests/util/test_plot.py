"""Charts that are XML, with ticks at round numbers and points where they belong."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from sparkdraft.util.plot import Line, Panel, round_step, svg


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    found = [element.get("points", "") for element in root.iter() if element.tag.endswith("polyline")]
    return [[tuple(map(float, point.split(","))) for point in points.split()] for points in found]  # type: ignore[misc]


def draw(*panels: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(svg(panels))


@pytest.mark.parametrize(("span", "most", "step"), [(14, 15, 1), (1, 5, 0.2), (20, 5, 5), (9000, 9, 1000), (3, 5, 1)])
def test_round_steps(span: float, most: int, step: float) -> None:
    assert round_step(span, most) == pytest.approx(step)


def test_shares_are_drawn_from_0_to_100_percent() -> None:
    panel = Panel("a < b & c", [Line("all", [(1, 0.0), (8, 0.5), (15, 1.0)], thick=True)], "position", y_percent=True)
    root = draw(panel)
    words = texts(root)
    assert [w for w in words if w.endswith(" %")] == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert [w for w in words if w.isdecimal()] == [str(k) for k in range(1, 16)]
    assert {"a < b & c", "position", "all"} <= set(words)
    first, *points = lines(root)[0]
    assert first == points[0] and points == [(60, 290), (335, 170), (610, 50)]


def test_the_axes_follow_the_data() -> None:
    root = draw(Panel("loss", [Line("loss", [(0, 10.8), (5000, 3.4), (11775, 2.13)])], "step", "nats"))
    words = texts(root)
    assert [w for w in words if w.isdecimal()][:6] == ["2", "4", "6", "8", "10", "12"]
    assert words.count("10000") == 1 and "nats" in words
    low, high = lines(root)[0][-1][1], lines(root)[0][0][1]
    assert 50 < high < low < 290


def test_whole_numbers_are_counted_in_ones() -> None:
    root = draw(Panel("by position", [Line("all", [(k, 0.5) for k in range(1, 8)])], y_percent=True))
    assert [w for w in texts(root) if w.isdecimal()] == list("1234567")


def test_gaps_single_points_and_nothing_at_all() -> None:
    gap = Line("gap", [(1, 2.0), (2, math.nan), (3, math.inf), (4, 2.5)])
    root = draw(Panel("a", [gap, Line("dot", [(2, 2.0)]), Line("empty", [])]), Panel("flat", [Line("f", [(0, 3.0)])]))
    assert [len(points) for points in lines(root)] == [3, 2, 0, 2]
    assert all(math.isfinite(value) for points in lines(root) for point in points for value in point)
    assert draw(Panel("nothing", [])).get("viewBox") == "0 0 760 340"


def test_streams_double_and_the_plain_run_is_dashed_in_the_same_colour() -> None:
    drafted = [Line("code", [(1, 100), (4, 300), (16, 500)]), Line("code", [(1, 50), (16, 200)], dashed=True)]
    panel = Panel("speed", [*drafted, Line("qa", [(4, 80)])], "streams", y_from_zero=True, x_doubling=True)
    root = draw(panel)
    assert [w for w in texts(root) if w.isdecimal()] == ["0", "100", "200", "300", "400", "500", "1", "4", "16"]
    assert [w for w in texts(root) if w.isalpha()] == ["speed", "streams", "code", "qa"], "a dashed line has no name"
    assert lines(root) == [
        [(60, 242), (60, 242), (335, 146), (610, 50)],
        [(60, 266), (60, 266), (610, 194)],
        [(335, 251.6), (335, 251.6)],
    ]
    found = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert ["stroke-dasharray" in element.attrib for element in found] == [False, True, False]
    colours = [element.get("stroke") for element in found]
    assert colours[0] == colours[1] != colours[2]


def test_a_single_number_of_streams_is_drawn() -> None:
    root = draw(Panel("speed", [Line("qa", [(8, 3.0)])], x_doubling=True), Panel("empty", [], x_doubling=True))
    assert [len(points) for points in lines(root)] == [2] and "8" in texts(root)

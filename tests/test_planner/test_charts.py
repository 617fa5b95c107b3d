"""The page's charts: their marks, their colours, and what the page's script needs of them."""

import dataclasses
import re

import pytest
from helpers.made import ROOT
from helpers.page_data import EMPTY, GRID, make_soak, past_run, spilling

from planner.report import charts, ticks
from planner.report.curve import hours_at, usable
from planner.report.drawing import COLOURS, NARROW, WIDE
from planner.report.page import html_page

STYLE = ROOT / "planner" / "report" / "template" / "style.css"


def test_hours_between_and_beyond_the_points_of_a_curve():
    points = usable([(1e8, 100, 200, 400), (1e6, 1, 2, 4), (1e4, 0, 1, 1)])
    assert [p[0] for p in points] == [1e6, 1e8]
    for tokens in (1e5, 1e6, 1e7, 1e9):
        hours = hours_at(points, tokens)
        assert (hours.low, hours.mid, hours.high) == pytest.approx([tokens / 1e6 * v for v in (1, 2, 4)])


@pytest.mark.parametrize(("low", "high"), [(1e-3, 2e-3), (0.2, 900), (40, 4e7), (3600, 7300), (5, 9), (1e-6, 1e12)])
def test_marks_are_few_ordered_and_inside(low, high):
    for marks in (ticks.sizes(low, high, 6), ticks.counts(low, high, 7), ticks.durations(low, high, 7),
                  ticks.clock(low, high, 6)):
        values = [value for value, _ in marks]
        assert values == sorted(set(values))
        assert len(values) <= 7
        assert all(low - (high - low) * 1e-6 <= v <= high * 1.001 for v in values)
    assert [ticks.duration_label(v) for v in (0.1, 30, 600, 36000, 3.6e6)] == ["0.1 s", "30 s", "10 min", "10 h", "1,000 h"]


def test_charts_have_the_colours_of_the_page():
    light = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert COLOURS.items() <= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light)).items()
    drawn = "".join(re.findall(r"<svg.*?</svg>", html_page(spilling()), re.DOTALL))
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == COLOURS.keys()
    assert "#0" not in re.sub('href="[^"]*"', "", drawn)


def test_marks_say_what_they_are_and_the_script_finds_the_one_that_it_moves():
    page = spilling()
    for size in (WIDE, NARROW):
        peaks, hours = charts.peaks(page, size), charts.hours(page, size)
        assert peaks
        assert hours
        titles = re.findall("<title>(.*?)</title>", peaks.svg("peaks", size.name, "peaks"))
        assert len(titles) == len(GRID) + 1  # the pick has a ring too
        assert sum("150M B=2 L=512: estimated, ~" in title for title in titles) == 1
        svg = hours.svg("hours", size.name, "hours")
        (x,), (y,) = (re.findall(f'data-{name}="(.*?)"', svg) for name in "xy")
        x, y = ([float(v) for v in ends.split()] for ends in (x, y))
        assert x[:2] == [1e6, 1e11]
        assert 0 < x[2] < x[3] < size.width
        assert size.height > y[2] > y[3] > 0
        ((at_x, _),) = re.findall(r'class="marker" transform="translate\((\S+) (\S+)\)"', svg)
        assert (float(at_x) - x[2]) / (x[3] - x[2]) == pytest.approx(0.4, abs=0.001)  # 100M between 1M and 100B


def test_charts_that_have_nothing_to_show_are_left_out():
    page = dataclasses.replace(EMPTY, past=[past_run("r")], soak=make_soak(1))
    for draw in (charts.peaks, charts.hours, charts.receipts, charts.soak, charts.models):
        assert draw(page, WIDE) is None

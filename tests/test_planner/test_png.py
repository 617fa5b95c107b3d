"""The page's charts as PNG files: those that there is something for, readable, and whole."""

import dataclasses

import pytest
from helpers.made import make_plan, make_record
from helpers.page_data import EMPTY, gathered, model_row, past_run
from matplotlib.image import imread

from planner.report.page_data import Corpus
from planner.report.png import draw
from spillcliff.errors import UserError
from trainer.plan import Span

DATA = gathered([make_record(b, 512, b * 400, b * 1e9) for b in (1, 2, 4)], 5_000_000_000,
                models=[model_row("60M $x^2$", 62_000_000, 4900, 2.1e9), model_row("1B", 10**9, None, None)],
                past=[past_run("runs/" + "long " * 40, tok_s=0.97, peak_bytes=1.01, hours=None), past_run("runs/none"),
                      past_run("runs/\ud800$_^{\0", hours=40.0)])


def test_each_picture_is_drawn_and_can_be_read(tmp_path):
    paths = draw(DATA, tmp_path / "new")
    assert [p.name for p in paths] == ["hours.png", "sizes.png", "receipts.png"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["hours.png", "receipts.png", "sizes.png"]
    for path in paths:
        picture = imread(path)[:, :, :3]
        high, wide, _ = picture.shape
        assert wide == 1552
        assert 180 < high < 700
        assert 0.5 < picture.mean() < 0.999
        assert picture.min() < 0.3


@pytest.mark.parametrize(("other", "names"), [
    ({}, []), ({"models": DATA.models[:1]}, []), ({"past": [past_run("r")]}, []),
    ({"plan": DATA.plan, "curve": [(1e6, 1, 2, 3)]}, []), ({"models": DATA.models}, ["sizes.png"]),
    ({"plan": DATA.plan, "curve": [(1e6, 1, 1, 1), (1e7, 9, 10, 11)]}, ["hours.png"]),
    ({"past": [past_run(f"r{i}", hours=1.0 + i / 100) for i in range(100)]}, ["receipts.png"])])
def test_only_what_there_is_something_for(tmp_path, other, names):
    assert [p.name for p in draw(dataclasses.replace(EMPTY, **other), tmp_path)] == names
    assert [p.name for p in tmp_path.iterdir()] == names


@pytest.mark.parametrize("value", [None, 0, 1e-9, 1e17])
def test_figures_of_any_size_are_drawn(tmp_path, value):
    row = dataclasses.replace(model_row("m", 10**6, None, None), tok_s=value, peak_bytes=value)
    hours = value or 0.0
    data = dataclasses.replace(
        EMPTY, plan=make_plan(), models=[row, row], past=[past_run("r", tok_s=1.0, hours=value)],
        curve=[(1e6, 1, 2, 3 + hours), (1e6 + 1, 1, 2, 3 + hours)], corpora=[Corpus("c", 10**6, Span(hours, hours, hours))])
    assert len(draw(data, tmp_path)) == 3


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="can't write"):
        draw(DATA, tmp_path / "file")

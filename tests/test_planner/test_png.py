"""The page's charts as PNG files: those that there is something for, readable, and whole."""

import pytest
from helpers.made import make_record
from helpers.page_data import EMPTY, gathered, receipt, size_row
from matplotlib.image import imread

from planner.report.png import draw
from spillcliff.errors import UserError

DATA = gathered([make_record(b, 512, b * 400, b * 1e9) for b in (1, 2, 4)], 5_000_000_000,
                sizes=[size_row("60M $x^2$", 62e6, 4900, 2.1e9), size_row("1B", 1e9, None, None)],
                receipts=[receipt("runs/" + "long " * 40, tok_s=0.97, peak_bytes=1.01, hours=None), receipt("runs/none"),
                          receipt("runs/\ud800$_^{", hours=40.0)])


def test_each_picture_is_drawn_and_can_be_read(tmp_path):
    paths = draw(DATA, tmp_path / "new")
    assert [p.name for p in paths] == ["hours.png", "sizes.png", "receipts.png"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["hours.png", "receipts.png", "sizes.png"]
    for path in paths:
        picture = imread(path)[:, :, :3]
        high, wide, _ = picture.shape
        assert wide == 910 and 180 < high < 700 and 0.5 < picture.mean() < 0.999 and picture.min() < 0.3


@pytest.mark.parametrize(("other", "names"), [
    ({}, []), ({"sizes": DATA["sizes"][:1]}, []), ({"receipts": [receipt("r")]}, []), ({"curve": [[1e6, 1, 2, 3]]}, []),
    ({"sizes": DATA["sizes"]}, ["sizes.png"]), ({"curve": [[1e6, 1, 1, 1], [1e7, 9, 10, 11]]}, ["hours.png"]),
    ({"receipts": [receipt(f"r{i}", hours=1.0 + i / 100) for i in range(100)]}, ["receipts.png"])])
def test_only_what_there_is_something_for(tmp_path, other, names):
    assert [p.name for p in draw(EMPTY | other, tmp_path)] == names
    assert [p.name for p in tmp_path.iterdir()] == names


@pytest.mark.parametrize("value", [None, 0, 1e-300, 1e299, 10**400, float("inf"), float("nan")])
def test_figures_of_any_size_are_drawn(tmp_path, value):
    row = {"model": "m", "parameters": value, "pick": None, "tok_s": value, "peak_bytes": value, "hours": None}
    data = EMPTY | {"sizes": [row, row], "receipts": [receipt("r") | {"ratio": {"tok_s": 1.0, "hours": value}}],
                    "curve": [[value] * 4, [1e6, 1, 2, 3], [1e6 + 1, 1, 2, 3]], "corpora": [["c", *[value] * 4]]}
    assert len(draw(data, tmp_path)) == 3


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="can't write"):
        draw(DATA, tmp_path / "file")

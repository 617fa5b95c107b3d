"""Maps as pictures: readable for any grid, with the cliff where there is one, and whole or not there."""

import os

import pytest
from helpers.made import make_record
from helpers.map_grids import GRIDS, LIMIT
from matplotlib.image import imread

from probe.show import heatmap_png
from probe.show.heatmap import CellMap
from probe.show.heatmap_png import heat_map
from spillcliff.errors import UserError


def reds(path):
    """How many pixels have the cliff's very red."""
    picture = (imread(path)[:, :, :3] * 255).round().astype(int)
    return int((picture == (0xd6, 0x27, 0x28)).all(axis=2).sum())


@pytest.mark.parametrize("name", [n for n in GRIDS if n not in {f"scattered {i}" for i in range(2, 9)}])
def test_a_picture_of_any_grid_can_be_read_and_has_the_line_where_there_is_one(name, tmp_path):
    records = GRIDS[name]
    path = tmp_path / "new" / "map.png"
    heat_map(records, "NVIDIA GeForce GTX 1060 6GB: $150M$, eager " * 3, LIMIT, path)
    assert [p.name for p in path.parent.iterdir()] == ["map.png"]
    high, wide, _ = imread(path).shape
    assert 600 < wide < 3000
    assert 300 < high < 2000
    cells = CellMap.of(records, LIMIT, None)
    assert (reds(path) > 500) == bool(cells.upright or cells.level)


def test_the_cliff_moves_with_its_bytes(tmp_path):
    records = [make_record(b, 512, peak=b * 1e9) for b in (1, 2, 3)]
    for cliff, drawn in ((None, False), (2_500_000_000, True), (9_000_000_000, False)):
        heat_map(records, "t", LIMIT, tmp_path / "map.png", cliff)
        assert (reds(tmp_path / "map.png") > 500) == drawn


def test_a_huge_grid_is_drawn_coarser_instead_of_refused(tmp_path, monkeypatch):
    for most in (("MOST_PIXELS", 50_000), ("MOST_PIXELS_ALONG", 300)):
        with monkeypatch.context() as patched:
            patched.setattr(heatmap_png, *most)
            heat_map(GRIDS["2x2"], "t", LIMIT, tmp_path / "map.png")
        assert 250 < imread(tmp_path / "map.png").shape[1] < 400


def test_a_picture_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "file" / "map.png", tmp_path / "folder.png", tmp_path / ("n" * 300 + ".png")):
        with pytest.raises(UserError, match="can't write"):
            heat_map([make_record()], "t", LIMIT, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize(("failure", "raised"), [(OSError(28, "No space left on device"), UserError),
                                                 (KeyboardInterrupt(), KeyboardInterrupt)])
def test_the_old_picture_stays_until_the_new_one_is_whole(failure, raised, tmp_path, monkeypatch):
    path = tmp_path / "map.png"
    path.write_bytes(b"old")

    def stop(*arguments):
        assert path.read_bytes() == b"old"
        raise failure

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(raised):
        heat_map([make_record()], "t", LIMIT, path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]

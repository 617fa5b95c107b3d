"""Records as a terminal table and as a picture: what fits, what failed and what was never run are told apart, the cliff
is drawn between what fits and what doesn't, and nothing is too wide or half written."""

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
from helpers.made import ROOT, make_record
from helpers.map_grids import FAILURES, GRIDS, LIMIT, failed, rising

from probe.cell import Cell
from probe.records import BEYOND
from probe.show.heatmap import STATUS_WORDS, CellMap, series_of, series_title
from probe.show.text import NARROWEST, SUMMARY_HEAD, map_lines, summary
from spillcliff.errors import UserError

WIDTHS = (NARROWEST, 40, 60, 80, 132)
each_grid = pytest.mark.parametrize("records", GRIDS.values(), ids=GRIDS)


@each_grid
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bounds", [(None, None), (LIMIT, None), (LIMIT, 3_000_000_000)])
def test_no_line_is_wider_than_the_terminal_nor_anything_but_ascii(records, width, bounds):
    limit_bytes, cliff_bytes = bounds
    shown = map_lines(records, limit_bytes, cliff_bytes, width)
    assert max(map(len, shown)) <= width
    text = "\n".join(shown)
    assert text.isascii()
    assert text.replace("\n", "").isprintable()


def read(shown):
    """What a reader sees in the tables, as ([first map's cells by (batch, length), second's], (upright, level) edges): a
    column ends where its length does, its mark and the cliff's upright edge follow."""
    maps: list[dict[tuple[int, int], str]] = [{}, {}]
    upright, level = set(), set()
    ends: list[int] = []
    below: set[int] | None = None
    for number, line in enumerate(shown):
        if line.split()[:1] == ["batch"]:
            lengths, ends, below = [int(word) for word in line.split()[1:]], [], None
            for n in lengths:
                ends.append(line.index(f" {n}", ends[-1] if ends else 0) + 1 + len(str(n)))
            parts = shown[number - 1]
            split = parts.index("peak GB") if "peak GB" in parts else len(line) + 1
            starts = [line.index("batch") + 6, *(e + 1 for e in ends[:-1])]
            if 0 < split < ends[-1] and "tok/s" in parts:  # side by side: the second map starts two columns later
                first = next(i for i, e in enumerate(ends) if e > split)
                starts[first] += 2
            else:
                first = 0 if "peak GB" in parts else len(ends)
        elif ends and (line[:6].strip().isdigit() or "_" in line) and not line.startswith("|"):
            line = line.ljust(ends[-1] + 1)
            if not line[:6].strip().isdigit():
                below = {i for i, e in enumerate(ends) if line[e - 1] == "_"}
                continue
            batch = int(line[:6])
            for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
                maps[i >= first][batch, lengths[i]] = line[start + 1:end + 1].strip()
                if line[start] == "|":
                    upright.add((i >= first, batch, lengths[i]))
            level |= {(i >= first, batch, lengths[i]) for i in below or ()}
            below = None
        elif not line:
            ends = []
    return maps, upright, level


def expected_edges(records, limit):
    """The edges between neighbours of which one fits under the limit and the other fails, by the rule's own words."""
    cells = {(r.cell.batch, r.cell.length): r for r in records}
    batches, lengths = sorted({b for b, _ in cells}), sorted({n for _, n in cells})
    over = {at for at, r in cells.items() if r.status == "fits" and (r.peak_bytes or 0) > limit}
    good = {at for at, r in cells.items() if r.status == "fits"} - over
    worse = over | {at for at, r in cells.items() if r.status in ("spills", "oom", "thrashes", "timeout")}

    def side(at):
        if at in good:
            return "good"
        return "bad" if any(at[0] >= b and at[1] >= n for b, n in worse) else None

    def parted(a, b):
        return {side(a), side(b)} == {"good", "bad"}

    return ({(b, n) for b in batches for m, n in itertools.pairwise(lengths) if parted((b, m), (b, n))},
            {(b, n) for n in lengths for a, b in itertools.pairwise(batches) if parted((a, n), (b, n))})


@each_grid
@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_is_exactly_between_what_fits_and_what_does_not(records, width):
    if any(len(str(r.cell.length)) > 6 for r in records):
        records = [make_record()]
    _, upright, level = read(map_lines(records, LIMIT, None, width))
    uprights, levels = expected_edges(records, LIMIT)
    assert upright == {(half, *at) for at in uprights for half in (False, True)}
    assert level == {(half, *at) for at in levels for half in (False, True)}


def test_the_line_as_it_is_drawn():
    records = rising((1, 2, 4, 8), (256, 512, 1024, 2048))
    assert map_lines(records, LIMIT, None) == """\
150M, eager, recompute none, accumulation 1

        tok/s at length                       peak GB at length
batch      256      512     1024     2048      256    512     1024   2048
    1    5,831   10,179   16,228   23,089     2.60   2.81     3.22   4.04
                                 _________                         _______
    2   10,179   16,228   23,089 | 29,278!    2.81   3.22     4.04 | 5.68!
                        _________|                        _________|
    4   16,228   23,089 | 29,278!     oom     3.22   4.04 |   5.68!   oom
               _________|                          _______|
    8   23,089*| 29,278!  spills        -     4.04*| 5.68!  spills      -

* fastest that fits under the 5.0 GB limit   ! over the 5.0 GB limit
|__ the cliff   - never run   spills: into system memory   oom: out of memory""".splitlines()


def test_a_cell_never_run_is_on_the_bad_side_only_beyond_a_failed_one():
    records = [make_record(1, 256), make_record(1, 512), failed(2, 512, "oom"), make_record(4, 256)]
    cells = CellMap.of(records, LIMIT, None)
    assert cells.bad == {(1, 1), (2, 1)}, "4 x 512 is beyond 2 x 512, and 2 x 256 is not"
    assert cells.upright == {(2, 1)}
    assert cells.level == {(1, 1)}


@pytest.mark.parametrize("status", ["crashed", "contended"])
def test_a_failure_that_is_not_for_memory_claims_no_side(status):
    cells = CellMap.of([make_record(1), failed(2, 512, status)], LIMIT, None)
    assert not cells.bad
    assert not cells.level
    beyond = CellMap.of([failed(1, 512, "oom"), failed(2, 512, status)], LIMIT, None)
    assert beyond.bad == {(0, 0), (1, 0)}


@pytest.mark.parametrize(("limit", "cliff", "over", "words"), [
    (None, None, (), "* fastest that fits"), (4_500_000_000, None, (2,), "! over the 4.5 GB limit"),
    (None, 4_500_000_000, (2,), "! over the 4.5 GB cliff"), (LIMIT, 3_500_000_000, (1, 2), "! over the 3.5 GB cliff"),
    (3_500_000_000, LIMIT, (1, 2), "! over the 3.5 GB limit"), (4_000_000_000, None, (2,), "! over the 4.0 GB limit")])
def test_peaks_over_the_lower_bound_are_marked_and_the_pick_is_under_it(limit, cliff, over, words):
    shown = map_lines([make_record(3, 512, tok_s=1, peak=1e9), make_record(1, 512, tok_s=1000, peak=4e9),
                   make_record(2, 512, tok_s=2000, peak=5e9)], limit, cliff)
    pick = next(b for b in (2, 1, 3) if b not in over)
    for cells in read(shown)[0]:
        assert {b for (b, _), word in cells.items() if word.endswith("!")} == set(over)
        assert [b for (b, _), word in cells.items() if word.endswith("*")] == [pick]
    text = "\n".join(shown)
    assert words in text
    assert ("!" in text) == bool(over)


@pytest.mark.parametrize("width", [40, 80])
def test_each_status_has_its_word_and_never_run_another(width):
    assert set(STATUS_WORDS) == set(FAILURES)
    assert set(BEYOND) < set(STATUS_WORDS)
    statuses = FAILURES
    shown = map_lines([make_record(1, 256)] + [failed(b, 512, s) for b, s in enumerate(statuses, 1)], LIMIT, None, width)
    for cells in read(shown)[0]:
        assert [cells[b, 512] for b in range(1, 7)] == list(statuses)
        assert {cells[b, 256] for b in range(2, 7)} == {"-"}
        assert cells[1, 256] not in ("-", *statuses)
    text = "\n".join(shown)
    assert "- never run" in text
    assert all(f"{s}: " in text for s in statuses)


def test_a_device_without_a_peak_says_so_and_nothing_is_over():
    records = GRIDS["no peaks"]
    maps, _, _ = read(map_lines(records, LIMIT, None))
    assert [maps[1][b, 512] for b in (1, 2, 4)] == ["n/a", "n/a", "n/a*"]
    assert any("n/a: " in line for line in map_lines(records, LIMIT, None))


def test_throughput_is_shortened_before_anything_is_split():
    records = [make_record(b, n, tok_s=12_345) for b in (1, 2) for n in (256, 512, 1024, 2048, 4096)]
    assert "12,345" in "\n".join(map_lines(records, LIMIT, None, 80))
    narrow = map_lines(records, LIMIT, None, 50)
    assert "12.3k" in "\n".join(narrow)
    assert "12,345" not in "\n".join(narrow)
    assert sum(line.startswith("batch") for line in narrow) == 2
    assert sum(line.startswith("batch") for line in map_lines(records, LIMIT, None, 30)) == 4


def test_nothing_to_show_is_told():
    with pytest.raises(UserError, match="probe grid"):
        map_lines([], LIMIT, None)


def test_series_hold_the_newest_record_of_each_cell_in_order_of_appearance():
    old, graph, new = make_record(1, tok_s=1), make_record(1, engine="graph"), make_record(1, tok_s=2)
    backward = dataclasses.replace(old, cell=Cell.of("150M", 1, 512, vocab=50_257, update="backward"))
    other = make_record(2, 256)
    found = series_of([old, graph, backward, other, new])
    assert list(found.values()) == [[new, other], [graph], [backward]]
    assert [series_title(series) for series in found] == [
        "150M, eager, recompute none, accumulation 1", "150M, graph, recompute none, accumulation 1",
        "150M, eager, recompute none, accumulation 1, vocabulary 50,257, update backward"]
    assert next(iter(found)) == new.cell.series


def test_a_summary_has_a_row_for_each_series_the_one_measured_last_at_the_end():
    backward = Cell.of("150M", 1, 512, vocab=50_257, update="backward", recompute="block")
    records = [make_record(1, tok_s=900), dataclasses.replace(make_record(), cell=backward),
               make_record(2, accum=2, engine="graph", status="oom", step_s=()), failed(8, 512, "spills"),
               make_record(4, tok_s=2269, peak=4.04e9)]
    rows = summary(records)
    assert rows == [("150M v50257", "eager/block backward", "1/1", "250", "1 x 512", "4.0 GB"),
                    ("150M", "graph/none x2", "0/1", "-", "-", "-"),
                    ("150M", "eager/none", "2/3", "2,269", "4 x 512", "4.04 GB")]
    assert {len(row) for row in rows} == {len(SUMMARY_HEAD)}
    assert summary([]) == []


def test_a_hundred_thousand_records_are_grouped_to_the_newest():
    one = make_record()
    records = [dataclasses.replace(one, cell=Cell.of("150M", b, 64 * n, engine=e))
               for b in range(1, 51) for n in range(1, 21) for e in ("eager", "graph")] * 50
    found = series_of(records)
    assert [len(of) for of in found.values()] == [1000, 1000]
    assert len(summary(records)) == 2
    map_lines(next(iter(found.values())), LIMIT, None)


def test_the_table_needs_nothing_but_python():
    code = "import sys, probe.show.text\nassert not {'torch', 'numpy', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr

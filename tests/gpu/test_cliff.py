"""On a card made small: `probe cliff` finds the cap, and a grid past it is told cell by cell, without an error to go by."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.small_card import SmallCard

from probe.cell import grid as cells_of
from probe.grid.bench import Bench, find_cliff, look

pytestmark = pytest.mark.gpu


@pytest.fixture
def imitate(monkeypatch, tmp_path):
    """Workers on a card of so many bytes, and the card's facts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent) + os.pathsep + os.environ.get("PYTHONPATH", ""))

    def make(kind, cap_bytes):
        workers = SmallCard(kind, cap_bytes)
        return workers, look(workers, "cuda:0", tmp_path)[0]
    return make


@pytest.mark.parametrize("gb", [4, 6, 8])
@pytest.mark.parametrize(("kind", "expected"), [("spill", "collapse"), ("fail", "failure")])
def test_the_cliff_is_found_within_two_percent(imitate, kind, expected, gb):
    workers, facts = imitate(kind, gb * 10**9)
    with workers:
        found = find_cliff(workers, "cuda:0", facts)
    print(f"{kind} {gb} GB: {found.kind} fast {found.fast_bytes / 1e9:.3f} bad {found.bad_bytes / 1e9:.3f} GB, "
          f"{found.fast_bytes_s / 1e9:.0f} -> {(found.slow_bytes_s or 0) / 1e9:.1f} GB/s, {found.seconds:.2f} s")
    assert found.kind == expected
    assert 0.98 * gb * 1e9 <= found.fast_bytes <= gb * 1e9 < found.bad_bytes + (21 << 20)
    assert found.seconds < 10


def test_every_spilled_cell_is_called_so_and_no_other(imitate, tmp_path):
    """The cliff is measured first, as `probe grid` does: throughput alone can't tell 67 MB spilled of 6 GB, a fifth of the
    speed on an H200."""
    workers, facts = imitate("spill", 6 * 10**9)
    with workers:
        cliff = find_cliff(workers, "cuda:0", facts)
        bench = Bench(workers, "cuda:0", facts, tmp_path / "records.jsonl", cliff, 3.0, None, print)
        cells = cells_of(("150M",), (1, 2, 3, 4, 5, 6, 7, 8, 12), (256, 512, 1024), (1,), ("eager",), ("none",), 32_000)
        wrong = []

        def show(cell, record, note) -> None:
            spilled = (record.readings.get("truly_spilled_bytes") or 0) > 0
            print(f"B={cell.batch:2} L={cell.length:4} reserved {(record.reserved_peak_bytes or 0) / 1e9:.3f} GB, spilled "
                  f"{(record.readings.get('truly_spilled_bytes') or 0) / 1e9:.3f} GB, {record.tok_s or 0:8,.0f} tok/s, "
                  f"{len(record.step_s)} steps, {record.cell_s:4.1f} s: {record.status} {record.why}")
            if spilled != (record.status == "spills"):
                wrong.append((cell, record.status, record.why))

        bench.run(cells, every_cell=True, again=False, show=show)
    assert not wrong

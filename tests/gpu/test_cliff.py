"""On a card made small: `probe cliff` finds the cap, and a grid past it is told cell by cell, without an error to go by."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.made import ROOT
from helpers.small_card import Kind, SmallCard

from probe.cell import Cell
from probe.cell import grid as cells_of
from probe.grid.bench import Bench
from probe.grid.session import ask, find_cliff
from probe.records import Record, Status
from probe.tasks.table import DescribeDevice
from spillcliff.hardware.device import DeviceFacts

pytestmark = pytest.mark.gpu

Imitate = Callable[[Kind, int], tuple[SmallCard, DeviceFacts]]


@pytest.fixture
def imitate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Imitate:
    """Workers on a card of so many bytes, and the card's facts."""
    path = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))  # where a worker finds helpers.small_card

    def make(kind: Kind, cap_bytes: int) -> tuple[SmallCard, DeviceFacts]:
        workers = SmallCard(kind, cap_bytes)
        return workers, ask(workers, DescribeDevice("cuda:0", tmp_path)).facts
    return make


@pytest.mark.parametrize("gb", [4, 6, 8])
@pytest.mark.parametrize(("kind", "expected"), [("spill", "collapse"), ("fail", "failure")])
def test_the_cliff_is_found_within_two_percent(imitate: Imitate, kind: Kind, expected: str, gb: int) -> None:
    workers, facts = imitate(kind, gb * 10**9)
    with workers:
        cliff = find_cliff(workers, "cuda:0", facts)
    assert cliff.kind == expected
    assert cliff.bad_bytes is not None
    print(f"{kind} {gb} GB: {cliff.kind} fast {cliff.fast_bytes / 1e9:.3f} bad {cliff.bad_bytes / 1e9:.3f} GB, "
          f"{cliff.fast_bytes_s / 1e9:.0f} -> {(cliff.slow_bytes_s or 0) / 1e9:.1f} GB/s, {cliff.seconds:.2f} s")
    assert 0.98 * gb * 1e9 <= cliff.fast_bytes <= gb * 1e9 < cliff.bad_bytes + (21 << 20)
    assert cliff.seconds < 10


def test_every_spilled_cell_is_called_so_and_no_other(imitate: Imitate, tmp_path: Path) -> None:
    """The cliff is measured first, as `probe grid` does: throughput alone can't tell 67 MB spilled of 6 GB, a fifth of the
    speed on an H200."""
    workers, facts = imitate("spill", 6 * 10**9)
    with workers:
        cliff = find_cliff(workers, "cuda:0", facts)
        bench = Bench(workers, "cuda:0", facts, tmp_path / "records.jsonl", seconds=3.0, cliff=cliff, say=print)
        cells = cells_of(("150M",), {"batch": (1, 2, 3, 4, 5, 6, 7, 8, 12), "length": (256, 512, 1024)})
        wrong = []

        def show(cell: Cell, record: Record | None, note: str) -> None:
            assert record is not None, note
            spilled_bytes = record.readings.get("truly_spilled_bytes") or 0
            print(f"B={cell.batch:2} L={cell.length:4} reserved {(record.reserved_peak_bytes or 0) / 1e9:.3f} GB, spilled "
                  f"{spilled_bytes / 1e9:.3f} GB, {record.tok_s:8,.0f} tok/s, {len(record.step_s)} steps, "
                  f"{record.cell_s or 0:4.1f} s: {record.status} {record.why}")
            if (spilled_bytes > 0) != (record.status is Status.SPILLS):
                wrong.append((cell, record.status, record.why))

        bench.run(cells, every_cell=True, again=False, show=show)
    assert not wrong

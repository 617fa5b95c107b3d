"""On a card: a cell that can't be allocated is a record and the next one runs; the process's claim covers its context."""

import json
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.gpu

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_out_of_memory_is_a_record_and_the_grid_goes_on(command: Command) -> None:
    done = command("probe", "grid", "--model", "10M", "--batch", "100000,1", "--accum", "1",
                   "--length", "256", "--seconds", "2", "--every-cell", "--json")
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)["cells"]
    assert (small["status"], large["status"]) == ("fits", "oom")
    assert "out of memory" in large["why"]
    assert small["allocated_peak_bytes"] <= small["reserved_peak_bytes"]
    context = small["device_peak_bytes"] - small["reserved_peak_bytes"]
    assert 50e6 < context < 2e9
    assert small["readings"]["clock_mhz"] > 0


def test_a_limit_stops_larger_cells(command: Command) -> None:
    done = command("probe", "grid", "--model", "10M", "--batch", "8,64,128", "--length", "256", "--seconds", "1", "--limit",
                   "1500MB", "--json")
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) < 3
    assert "not run" in done.stderr

"""A grid that is killed at any moment loses no finished cell, leaves no process, no file and no broken line, and goes on."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.made import ROOT

from probe.records import Record, load

GRID = ("grid", "--model", "1M", "--vocab", "300", "--batch", "1", "--length", "16,24", "--seconds", "1", "--accum", "1",
        "--every-cell", "--device", "cpu")
WAYS = [signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
LONGEST_S = 240
"""Nothing here takes a tenth of it on a machine that does nothing else."""


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short name: in it lies a socket, whose path may have 107 bytes."""
    return tmp_path_factory.mktemp("t")


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "temp").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temp"), "SPILLCLIFF_TEST": str(folder)}
    return subprocess.Popen([sys.executable, "-m", "probe.cli", *GRID], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def of_this_grid(folder: Path) -> list[psutil.Process]:
    """Every process that was started by it, whoever its parent is now."""
    ours = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SPILLCLIFF_TEST") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                ours.append(process)
        except psutil.Error:
            pass
    return ours


def reached(folder: Path, stage: int) -> bool:
    """Whether a grid has: 0, been started; 1, been told what the device is; 2, begun with its cells; 3, a cell on disk."""
    device = next(folder.glob("results/*/device.json"), None)
    records = next(folder.glob("results/*/records.jsonl"), None)
    if stage == 3:
        return records is not None and records.read_bytes().endswith(b"\n")
    if stage == 2:
        return device is not None and "memory" in json.loads(device.read_text())
    return stage == 0 or device is not None


def kill_at(process: subprocess.Popen[str], folder: Path, stage: int, later_s: float, how: signal.Signals) -> bool:
    """Kills it `later_s` after it reached a stage; False if it was through before."""
    deadline = time.monotonic() + LONGEST_S
    while not reached(folder, stage):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.02)
    try:
        process.wait(later_s)
    except subprocess.TimeoutExpired:
        process.send_signal(how)
        return True
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_grid_loses_nothing_and_leaves_nothing(tmp_path: Path, kills: int) -> None:
    """Each way at a stage of its own, and then at random."""
    random.seed(0)
    done, records = 0, list[Record]()
    cells_seen: set[tuple[int, int]] = set()
    while done < kills:
        how = WAYS[done] if done < 3 else random.choice(WAYS)
        stage = (0, 2, 3)[done] if done < 3 else random.randint(0, 3)
        process = start(tmp_path)
        is_killed = kill_at(process, tmp_path, stage, random.uniform(0, 2), how)
        output, errors = process.communicate(timeout=LONGEST_S)
        if not is_killed:
            assert process.returncode == 0, errors
            next(tmp_path.glob("results/*/records.jsonl")).unlink()  # it was through: begin again
            records, cells_seen = [], set()
            continue
        done += 1
        if how != signal.SIGKILL and process.returncode != -how:  # a signal before Python could take it ends it as well
            assert process.returncode == 130, errors
        deadline = time.monotonic() + LONGEST_S
        while of_this_grid(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not of_this_grid(tmp_path)
        left = {p.name.partition("-")[0] for p in (tmp_path / "temp").iterdir()}
        assert "probe" not in left
        if how == signal.SIGKILL:  # multiprocessing's own folder goes with its process, unless that is killed
            for folder in (tmp_path / "temp").glob("pymp-*"):
                shutil.rmtree(folder)
        elif process.returncode == 130:
            assert "pymp" not in left
        path = next(tmp_path.glob("results/*/records.jsonl"), None)
        now = load(path) if path else []
        assert now[:len(records)] == records
        records = now
        cells_seen |= {(int(b), int(n)) for b, n in re.findall(r"^ *1M +(\d+) +(\d+) .* fits", output, re.MULTILINE)}
        assert cells_seen <= {(r.cell.batch, r.cell.length) for r in records if r.fits}
    process = start(tmp_path)
    output, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, errors
    path = next(tmp_path.glob("results/*/records.jsonl"))
    assert len({r.cell for r in load(path) if r.fits}) == 2
    assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())

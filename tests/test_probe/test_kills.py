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

import psutil
import pytest
from helpers.made import ROOT

from probe.records import load

GRID = ("grid", "--model", "1M", "--vocab", "300", "--batch", "1,2", "--length", "16,24", "--seconds", "1",
        "--every-cell", "--device", "cpu")
WAYS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def tmp_path(tmp_path_factory):
    """Of a short name: in it lies a socket, whose path may have 107 bytes."""
    return tmp_path_factory.mktemp("t")


def start(folder):
    (folder / "temp").mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temp"), "SPILLCLIFF_TEST": str(folder)}
    return subprocess.Popen([sys.executable, "-m", "probe.cli", *GRID], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def of_this_grid(folder) -> list[psutil.Process]:
    """Every process that was started by it, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SPILLCLIFF_TEST") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_grid_loses_nothing_and_leaves_nothing(tmp_path, pytestconfig):
    random.seed(0)
    kills, records, cells_seen, done = pytestconfig.getoption("--kills"), [], set(), 0
    while done < kills:
        process, how = start(tmp_path), random.choice(WAYS)
        try:
            output, errors = process.communicate(timeout=random.uniform(0.0, 10.0))
            assert process.returncode == 0, errors
            next(tmp_path.glob("results/*/records.jsonl")).unlink()  # it was through: begin again
            records, cells_seen = [], set()
            continue
        except subprocess.TimeoutExpired:
            process.send_signal(how)
            output, errors = process.communicate(timeout=60)
        done += 1
        if how != signal.SIGKILL and process.returncode != -how:  # a signal before Python could take it ends it as well
            assert process.returncode == 130, errors
        deadline = time.monotonic() + 30
        while of_this_grid(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
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
        assert cells_seen <= {(r.cell.batch, r.cell.length) for r in records if r.status == "fits"}
    process = start(tmp_path)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    path = next(tmp_path.glob("results/*/records.jsonl"))
    assert len({r.cell for r in load(path) if r.status == "fits" and r.cell.accum == 1}) == 4
    assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())

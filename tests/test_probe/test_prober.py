"""The prober's commands in real processes on this processor: somebody's own step, two grids at once, bad input, tables."""

import json
import os
import subprocess
import sys

import pytest
from helpers.made import MODULES, ROOT, make_cliff, make_record, write_records

from probe.cliff import Cliff
from probe.records import load
from spillcliff.errors import UserError

OWN = '''
import torch

def make_step(batch, length, device):
    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(100, (batch, length), device=device)

    def step():
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def breaks(batch, length, device):
    if batch > 2:
        raise RuntimeError("CUDA error: out of memory")
    return make_step(batch, length, device)

number = 5
'''
STEP_GRID = ("grid", "--batch", "1,2,3", "--length", "8", "--seconds", "1", "--every-cell", "--device", "cpu")


def test_somebodys_own_step_is_measured_and_judged_alike(command, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    done = command("probe", *STEP_GRID, "--step", "mine:breaks", "--json")
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)["cells"]
    assert [c["status"] for c in (first, second, third)] == ["fits", "fits", "oom"] and first["model"] is None
    assert first["cell"]["model"] == "mine:breaks" and second["tok_s"] > 0 and second["micro_s"] is None
    refused = command("plan", "--corpus", "1M")
    assert refused.returncode == 3 and "--step" in refused.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (("--step", "absent:make_step"), "absent"), (("--step", "mine:absent"), "no function 'absent'"),
    (("--step", "mine:number"), "no function 'number'"),
    (("--step", "mine:make_step", "--engine", "graph"), "--step has its own"),
    (("--step", "mine:make_step", "--model", "1M"), "either"), ((), "either"),
    (("--model", "mine:make_step"), "--model takes")])
def test_a_step_that_cannot_be_is_told_before_anything_runs(refused, tmp_path, arguments, words):
    (tmp_path / "mine.py").write_text(OWN)
    assert words in refused(2, "probe", *STEP_GRID, *arguments)
    assert not list(tmp_path.glob("results/*/records.jsonl"))


def test_a_second_grid_on_one_device_is_told(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    grid = [sys.executable, "-m", MODULES["probe"], "grid", "--model", "1M", "--vocab", "300", "--batch", "1", "--length",
            "16", "--seconds", "20", "--device", "cpu"]
    first = subprocess.Popen(grid, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        while "limit" not in (line := first.stdout.readline()) and "verdict" not in line:
            assert line, "the first grid ended before it measured"
        second = subprocess.run([*grid, "--results", "elsewhere"], cwd=tmp_path, env=environment, capture_output=True,
                                text=True, timeout=120)
    finally:
        first.kill()
        first.communicate()
    assert second.returncode == 2 and "another probe is measuring" in second.stderr


def test_a_processor_has_no_cliff(refused):
    assert "CUDA card" in refused(2, "probe", "cliff", "--device", "cpu")


def test_a_cliff_comes_back_as_it_was_saved_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "cliff.json"
    assert Cliff.load(path) is None
    cliff = make_cliff("collapse", 4.9e9, 5.0e9)
    cliff.save(path)
    assert Cliff.load(path) == cliff
    good = json.loads(path.read_text())
    for change in ({"schema": 2}, {"kind": "steep"}, {"bad_bytes": None}, {"fast_bytes": "much"}, {"fast_bytes": -1}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match="cliff.json"):
            Cliff.load(path)
    path.write_text(json.dumps({k: v for k, v in good.items() if k != "fast_bytes"}))
    with pytest.raises(UserError, match="lacks fast_bytes"):
        Cliff.load(path)


@pytest.fixture
def measured(tmp_path):
    """results/ of a GTX 1060 whose third batch has spilled and whose fifth was never run, and its cliff."""
    folder = tmp_path / "results/nvidia-geforce-gtx-1060"
    write_records(folder / "records.jsonl", [
        make_record(2, tok_s=2100, peak=3.2e9), make_record(4, tok_s=2269, peak=4.04e9),
        make_record(6, tok_s=1067, peak=5.67e9, status="spills", why="slower than the smaller batch: spilled"),
        make_record(4, 1024, tok_s=1900, peak=5.9e9, status="oom", step_s=())])
    make_cliff("collapse", 4.9e9, 5.0e9).save(folder / "cliff.json")
    return folder


def test_the_plan_takes_its_limit_from_the_cliff(command, measured):
    done = command("plan", "--corpus", "1M", "--device", measured.name, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["limit_bytes"] == int(0.97 * 5.2e9) and plan["step"]["batch"] == 4
    assert any("collapse" in line for line in plan["why"])


def test_show_is_a_table_of_eighty_columns_and_plot_a_picture(command, measured):
    done = command("probe", "show", "--device", measured.name)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines()) and done.stdout.isascii()
    for word in ("2,269", "spills", "oom", "4.04"):
        assert word in done.stdout
    out = json.loads(command("probe", "show", "--json").stdout)
    assert len(out["records"]) == 4 and out["cliff"]["kind"] == "collapse"
    done = command("probe", "plot", "--json")
    assert done.returncode == 0, done.stderr
    (picture,) = json.loads(done.stdout)["pictures"]
    assert (measured.parents[1] / picture).read_bytes().startswith(b"\x89PNG")
    assert len(load(measured / "records.jsonl")) == 4


def test_show_of_nothing_says_what_to_do(refused, tmp_path):
    assert "probe grid" in refused(2, "probe", "show")

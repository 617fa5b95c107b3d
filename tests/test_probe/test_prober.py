"""The prober's commands in real processes on this processor: somebody's own step, two grids at once, bad input, tables."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.made import make_cliff, make_record, write_records

from probe.cell import Cell
from probe.cliff import Cliff
from probe.grid.session import find_cliff
from probe.records import load
from probe.store import only_probe_on
from probe.tasks.custom_step import CustomStep
from probe.tasks.table import CheckCustomStep
from probe.tasks.worker import Workers
from spillcliff.errors import UserError
from spillcliff.hardware.device import device_facts

Command = Callable[..., subprocess.CompletedProcess[str]]
OWN = '''
import torch
import probe

def make_step(batch, length, device):
    model = torch.nn.Sequential(torch.nn.Embedding(100, probe.WIDTH), torch.nn.Linear(probe.WIDTH, 100)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(100, (batch, length), device=device)

    def step():
        import probe
        assert probe.WIDTH == 16
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def breaks(batch, length, device):
    if batch > 2:
        raise RuntimeError("CUDA error: out of memory")
    return make_step(batch, length, device)

def returns_nothing(batch, length, device):
    pass

number = 5
'''
STEP_GRID = ("grid", "--batch", "1,3", "--length", "8", "--seconds", "1", "--every-cell", "--device", "cpu")


def test_somebodys_own_step_is_measured_and_judged_alike(command: Command, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files may be called like our packages, and import each other."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as an installed command has it
    (tmp_path / "trainer.py").write_text(OWN)
    (tmp_path / "probe.py").write_text("WIDTH = 16\n")
    done = command("probe", *STEP_GRID, "--step", "trainer:breaks", "--json")
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)["cells"]
    assert [c["status"] for c in (small, large)] == ["fits", "oom"]
    assert small["model"] is None
    assert small["cell"]["model"] == "trainer:breaks"
    assert small["tok_s"] > 0
    assert small["micro_s"] is None
    refused = command("plan", "--corpus", "1M")
    assert refused.returncode == 3
    assert "--step" in refused.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (("--step", "trainer:make_step", "--engine", "graph"), "--step has its own"),
    (("--step", "trainer:make_step", "--model", "1M"), "either"), ((), "either"),
    (("--model", "trainer:make_step"), "--model takes"), (("--step", "trainer:number"), "no function 'number'")])
def test_a_step_that_cannot_be_is_told_before_anything_runs(refused: Callable[..., str], tmp_path: Path, words: str,
                                                            arguments: tuple[str, ...],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "trainer.py").write_text(OWN)
    (tmp_path / "probe.py").write_text("WIDTH = 16\n")
    assert words in refused(2, "probe", *STEP_GRID, *arguments)
    assert not list(tmp_path.glob("results/*/records.jsonl"))


@pytest.fixture
def in_folder_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a folder with steps.py, and is afterwards as before."""
    (tmp_path / "steps.py").write_text(OWN.replace("import probe", "from types import SimpleNamespace\n"
                                                   "probe = SimpleNamespace(WIDTH=16)", 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "steps", raising=False)


@pytest.mark.usefixtures("in_folder_of_steps")
@pytest.mark.parametrize(("name", "words"), [
    ("absent:make_step", "absent"), ("steps:absent", "no function 'absent'"), ("steps:number", "no function 'number'")])
def test_a_step_that_is_not_there_is_told(name: str, words: str) -> None:
    assert CheckCustomStep("steps:make_step").run(lambda progress: None)
    with pytest.raises(UserError, match=words):
        CheckCustomStep(name).run(lambda progress: None)


@pytest.mark.usefixtures("in_folder_of_steps")
def test_a_make_step_that_returns_no_step_is_told() -> None:
    cell = Cell.of("steps:returns_nothing", 1, 8)
    with pytest.raises(UserError, match="returned NoneType"):
        CustomStep(cell, torch.device("cpu"))


def test_a_second_probe_on_one_device_is_told(refused: Callable[..., str]) -> None:
    """Whatever folder it keeps its results in."""
    with only_probe_on(device_facts(torch.device("cpu"))):
        line = refused(2, "probe", "grid", "--model", "1M", "--batch", "1", "--length", "16", "--device", "cpu", "--results",
                       "elsewhere")
    assert "another probe is measuring" in line
    with only_probe_on(device_facts(torch.device("cpu"))):
        pass


def test_a_processor_has_no_cliff() -> None:
    with Workers() as workers, pytest.raises(UserError, match="CUDA card"):
        find_cliff(workers, "cpu", device_facts(torch.device("cpu")))


def test_a_cliff_comes_back_as_it_was_saved_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "cliff.json"
    assert Cliff.load(path) is None
    cliff = make_cliff("collapse", 4.9e9, 5.0e9)
    cliff.save(path)
    assert Cliff.load(path) == cliff
    good = json.loads(path.read_text())
    for change in ({"schema": 2}, {"kind": "steep"}, {"bad_bytes": None}, {"fast_bytes": "much"}, {"fast_bytes": -1}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=r"cliff\.json"):
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
    assert plan["limit_bytes"] == int(0.97 * 5.2e9)
    assert plan["step"]["batch"] == 4
    assert any("collapse" in line for line in plan["why"])


def test_show_is_a_table_of_eighty_columns_and_plot_a_picture(command, measured):
    done = command("probe", "show", "--device", measured.name)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert done.stdout.isascii()
    for word in ("2,269", "spills", "oom", "4.04"):
        assert word in done.stdout
    out = json.loads(command("probe", "show", "--json").stdout)
    assert len(out["records"]) == 4
    assert out["cliff"]["kind"] == "collapse"
    done = command("probe", "plot", "--json")
    assert done.returncode == 0, done.stderr
    (picture,) = json.loads(done.stdout)["pictures"]
    assert (measured.parents[1] / picture).read_bytes().startswith(b"\x89PNG")
    assert len(load(measured / "records.jsonl")) == 4


def test_show_of_nothing_says_what_to_do(refused, tmp_path):
    assert "probe grid" in refused(2, "probe", "show")

"""Shared by the tests: real commands in real processes, a token file, records as a grid would write them."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from probe.cell import Cell
from probe.cliff import Cliff
from probe.records import Record
from spillcliff.hardware import nvml
from spillcliff.console import STOP_SIGNALS
from trainer.config import ModelConfig, OptimizerConfig, StepConfig
from trainer.data.tokens import dtype_for, write_sidecar
from trainer.plan import Plan, Predicted, Span

ROOT = Path(__file__).parents[1]
SAMPLES = Path(__file__).parent / "samples"
MODULES = {"probe": "probe.cli", "plan": "planner.cli", "train": "trainer.cli"}


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=3, help="How often a grid and a run are killed.")
    parser.addoption("--examples", type=int, default=100, help="Damaged inputs of each kind of file.")


def pytest_configure(config):
    """The same examples every time; how long one takes decides nothing."""
    hypothesis.settings.register_profile(
        "ours", max_examples=config.getoption("--examples"), derandomize=True, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.load_profile("ours")


@pytest.hookimpl(optionalhook=True)  # a machine with a card may lack pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """All files together run in two processes, each file in one; not where there is a card, on which they would disturb
    each other's measurements, nor where some files were asked for."""
    is_all = config.args_source == config.ArgsSource.TESTPATHS
    return 2 if is_all and (os.cpu_count() or 1) > 1 and not nvml.names() else 0


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, with the reason, where torch sees no card."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """In which a device's lock lies too: tests of another process don't hold the device."""
    tmp_path_factory.getbasetemp()  # which stays where it is found after the tests
    with tempfile.TemporaryDirectory(prefix="spillcliff-") as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "TEMP", "TMP"):
            patch.setenv(name, folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def command(tmp_path):
    """Runs `probe`, `plan` or `train` in a process of its own, in an empty folder; returns the finished process."""
    def run(name, *arguments, **options):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-m", MODULES[name], *map(str, arguments)], cwd=tmp_path, text=True,
                              capture_output=True, env=environment, timeout=240, **options)
    return run


@pytest.fixture
def refused(command):
    """Runs a command that must fail: checks that it was told in one line without a traceback, and returns that line."""
    def run(code, name, *arguments):
        done = command(name, *arguments)
        assert done.returncode == code, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
        return lines[0]
    return run


@pytest.fixture
def called(monkeypatch, capsys):
    """Runs a command in this process, where starting one of its own would show nothing more: (exit code, stdout, stderr)."""
    def run(folder, name, *arguments):
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as left:
                importlib.import_module(MODULES[name]).main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return left.value.code, *capsys.readouterr()
    return run


@pytest.fixture
def token_file(tmp_path):
    """Writes a token file of the given ids and returns its path."""
    def write(ids, vocab=500, name="tokens.bin"):
        path = tmp_path / name
        np.asarray(ids, dtype_for(vocab)).tofile(path)
        write_sidecar(path, len(ids), vocab, None)
        return path
    return write


def make_record(batch=4, length=512, tok_s=1000.0, peak=4e9, status="fits", accum=1, **other) -> Record:
    """A record of 150M as a grid would write it, with the given throughput and peak."""
    cell = Cell("150M", batch, length, accum, other.pop("engine", "eager"), other.pop("recompute", "none"))
    step_s = batch * length * accum / tok_s
    values = dict(schema=1, at="2026-01-01T00:00:00+00:00", cell=cell, model=ModelConfig.named("150M"), status=status,
                  device="nvidia-geforce-gtx-1060", step_s=(step_s,) * 5, device_peak_bytes=int(peak),
                  micro_s=step_s * 0.9 / accum, optimizer_s=step_s * 0.1)
    return Record(**(values | other))


def make_cliff(kind, fast, bad, context=0.3e9, free=5.6e9) -> Cliff:
    """What the ballast probe would have found on a GTX 1060."""
    return Cliff(schema=1, at="2026-01-01T00:00:00+00:00", device="nvidia-geforce-gtx-1060", kind=kind, fast_bytes=int(fast),
                 bad_bytes=int(bad), context_bytes=int(context), free_at_start_bytes=int(free), fast_bytes_s=170e9,
                 slow_bytes_s=10e9, seconds=4.0)


def make_plan(device: str, model=ModelConfig.named("1M", 500), step=StepConfig(2, 32)) -> Plan:  # noqa: B008
    """A plan of `device` as `plan` would write it; its forecasts mean nothing."""
    span = Span(1.0, 2.0, 3.0)
    return Plan(1, "2026-01-01T00:00:00+00:00", device, model, step, 1000, 1, 32, OptimizerConfig(1e-3), 10, 10, 10**9,
                Predicted(span, span, span), [], [], [], "", {})


def write_records(path: Path, records) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in records))
    return path


def tiny(**changes) -> ModelConfig:
    """A model of two layers that steps in milliseconds, with grouped attention."""
    return dataclasses.replace(ModelConfig("tiny", 2, 32, 4, 2, 64, vocab=300), **changes)

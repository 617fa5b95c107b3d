"""Shared by the tests: real commands in real processes, a token file, records as a grid would write them."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import hypothesis
import numpy as np
import pytest
from helpers.made import MODULES, ROOT
from helpers.waiting import PATIENCE_S

from spillcliff.console import STOP_SIGNALS
from spillcliff.hardware import nvml
from trainer.data.tokens import dtype_for, write_sidecar

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Threads that wait for each other on cores that are busy cost more than they give: of two, 30 steps of a tiny model took
6.7 s beside other tests, of one 0.7. Set before torch is imported, and for the processes that tests start."""


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true",
                     help="Long forms of tests: more damages, kills and steps, and the docs' longest page.")


def pytest_configure(config):
    """The same examples every time; how long one takes decides nothing."""
    hypothesis.settings.register_profile(
        "ours", max_examples=5000 if config.getoption("--long") else 50, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.load_profile("ours")
    for number in STOP_SIGNALS:  # a test run under nohup inherits them as ignored, and so would what it starts
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)  # a machine with a card may lack pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """All files together run in three processes, each file in one: on two cores 235 s, where two took 242, since tests wait
    for processes of their own. Not where there is a card, on which they would disturb each other's measurements, nor where
    some files were asked for."""
    is_all = config.args_source == config.ArgsSource.TESTPATHS
    return 3 if is_all and (os.cpu_count() or 1) > 1 and not nvml.cards() else 0


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
def long(request):
    """Whether the long forms of tests were asked for."""
    return request.config.getoption("--long")


@pytest.fixture
def kills(long):
    """How often a grid or a run is to be killed."""
    return 100 if long else 2


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """A folder as helpers.runs.make_home makes it, made once: steps of three micro-steps, which two processes can't share
    out whole. Tests take `home`, a copy."""
    from helpers.runs import STEPS, make_home

    from trainer.config import StepConfig

    return make_home(tmp_path_factory.mktemp("whole"), shape=StepConfig(4, 16, 3), steps=STEPS)


@pytest.fixture(scope="module")
def home(whole_run, tmp_path_factory):
    """A plan, its data, other data and a run "whole" of it that nothing disturbed, for a module's own runs beside."""
    return shutil.copytree(whole_run, tmp_path_factory.mktemp("runs") / "home")


@pytest.fixture
def command(tmp_path):
    """Runs `probe`, `plan` or `train` in a process of its own, in an empty folder; returns the finished process."""
    def run(name, *arguments, **options):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, "-m", MODULES[name], *map(str, arguments)], cwd=tmp_path, text=True,
                              capture_output=True, env=environment, timeout=PATIENCE_S, **options)
    return run


@pytest.fixture
def refused(command):
    """Runs a command that must fail: checks that it was told in one line without a traceback, and returns that line."""
    def run(code, name, *arguments):
        done = command(name, *arguments)
        assert done.returncode == code, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("error: "), done.stderr
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

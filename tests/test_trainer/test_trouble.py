"""What goes wrong in mid-run: told with its cause and what to do, and it costs as little of the run as can be."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.made import MODULES, tiny
from helpers.runs import STEPS, Clock, end_state, log, make_home, open_run, options, receipt, run_command, train, train_with
from safetensors.torch import load_file

from spillcliff.errors import is_card_lost
from spillcliff.hardware.device import THROTTLED
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.tokens import Tokens
from trainer.plan import Span
from trainer.run import ledger, loop, slowdown
from trainer.run.log import RunLog
from trainer.run.slowdown import Sight
from trainer.run.step import TrainStep

SEEN = Sight("cuda", 700.0, 2000.0, 0.0, spilled_bytes=0, throttle=0, temperature_c=80, other_percent=0)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("trouble"), shape=StepConfig(4, 16))


@pytest.mark.parametrize(("what", "words", "changes"), [
    ("spill", "1.2 GB", {"spilled_bytes": 1_200_000_000, "tok_s": 2000.0}),
    ("spill", "no throttle", {}),
    ("spill", "5.7 GB", {"reserved_bytes": 5_700_000_000, "spilled_bytes": None}),
    ("battery", "plug it in", {"on_battery": True}),
    ("data", "40% of it waits for tokens", {"data_share": 0.4}),
    ("throttle", "80 degrees", {"throttle": 0x40}),
    ("contended", "pid 77", {"other_percent": 50.0, "other_pid": 77}),
    ("slow", "busy with", {"kind": "cpu", "spilled_bytes": None}),
    (None, "", {"tok_s": 1400.0}),
    (None, "", {"throttle": 0x40, "tok_s": 1900.0}),
    (None, "", {"spilled_bytes": 20 << 20, "tok_s": 1900.0}),
])
def test_the_cause_is_named_with_its_evidence(what, words, changes):
    found = slowdown.trouble(dataclasses.replace(SEEN, **changes), THROTTLED)
    assert (found and found.what) == what and (found is None or words in found.line)


@pytest.mark.parametrize(("step_s", "usual", "is_away"), [
    (7200.0, [0.9] * 20, True), (7200.0, [], False), (59.0, [0.9] * 20, False), (70.0, [30.0] * 20, False),
    (70.0, [0.9] * 20, True), (19 * 75 * 0.9, [75 * 0.9] * 20, False),
])
def test_a_step_of_hours_among_short_ones_is_a_suspended_machine(step_s, usual, is_away):
    assert slowdown.is_away(step_s, usual) is is_away


@pytest.mark.parametrize(("kind", "text", "lost"), [
    ("RuntimeError", "CUDA error: unspecified launch failure", True), ("AcceleratorError", "anything", True),
    ("RuntimeError", "CUDA error: the launch timed out and was terminated", True),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", True),
    ("RuntimeError", "CUDA error: out of memory", False), ("OutOfMemoryError", "CUDA out of memory.", False),
    ("RuntimeError", "The size of tensor a (3) must match", False),
])
def test_which_failures_are_the_card_s(kind, text, lost):
    assert is_card_lost(kind, text) is lost


def fails(at: int, error: str, where="_forward_backward", while_="True") -> str:
    """Code that makes a method of TrainStep raise at its call `at` (from 1), while a condition on `self` and `tokens`
    holds."""
    return f"""
import itertools, torch
from trainer import step
calls, real = itertools.count(1), step.TrainStep.{where}
def failing(self, tokens, *more, **others):
    out = real(self, tokens, *more, **others)
    if next(calls) >= {at} and {while_}:
        raise {error}
    return out
step.TrainStep.{where} = failing
"""


OOM = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"


def weights(run) -> dict:
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / checkpoint.STATE)


def test_out_of_memory_in_mid_run_goes_on_in_smaller_pieces_with_the_same_tokens(home):
    """From the 51st step on no micro-step of more than two sequences fits: the end is that of an undisturbed run, but for
    rounding, and the steps before are its own bit for bit."""
    done = train_with(home, fails(51, OOM, while_="len(tokens) > 2"), "oom")
    assert done.returncode == 0, done.stderr
    assert "step 51: out of memory" in done.stdout and "batch 2 and accum 2" in done.stdout
    assert receipt(home / "oom")["out_of_memory"] == [{"step": 51, "batch": 2, "accum": 2}]
    ours, whole = ([line for line in log(home / run) if line["kind"] == "step"] for run in ("oom", "whole"))
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in ours[:50]] == [line["loss"] for line in whole[:50]]
    assert ours[50]["loss"] == pytest.approx(whole[50]["loss"], rel=1e-6)
    theirs = weights(home / "whole")
    assert all(torch.allclose(value, theirs[name], atol=2e-3) for name, value in weights(home / "oom").items())


def test_it_goes_on_halving_and_stops_where_one_sequence_is_too_much(home):
    done = train_with(home, fails(6, OOM), "hopeless")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "smaller --limit" in done.stderr
    assert "batch 2 and accum 2" in done.stdout and "batch 1 and accum 4" in done.stdout
    assert checkpoint.newest(home / "hopeless")[0]["step"] == 3


def test_out_of_memory_in_an_evaluation_goes_on_too(home):
    """The first evaluation is the first call; its batches are of four windows."""
    done = train_with(home, fails(1, OOM, "evaluate", "len(tokens) > 1"), "oom-eval")
    assert done.returncode == 0, done.stderr
    assert receipt(home / "oom-eval")["val_loss"] == pytest.approx(receipt(home / "whole")["val_loss"], rel=1e-3)


def test_memory_that_fails_in_the_optimizer_s_first_step_leaves_nothing_half_made():
    """Of a parameter's moments one was made when the memory ran out: both are made again, and the steps are the same."""
    shape, cpu = StepConfig(4, 16), torch.device("cpu")
    tokens = torch.randint(300, (1, 4, 17), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    plain, hurt = (TrainStep(tiny(), shape, OptimizerConfig(1e-2), cpu) for _ in range(2))
    parameter = next(hurt.model.parameters())
    hurt._optimizers[parameter].state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
    hurt.lighten()
    for _ in range(3):
        losses = [float(step(tokens.view(step.step.accum, step.step.batch, 17), 1e-2)[0]) for step in (plain, hurt)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("batch", "smaller"), [(8, 4), (6, 3), (5, 1), (9, 3), (1, None)])
def test_the_smaller_batch_divides_the_one_before(batch, smaller):
    assert TrainStep(tiny(), StepConfig(batch, 16), OptimizerConfig(1e-2), torch.device("cpu")).lighter() == smaller


def test_what_is_updated_in_the_backward_pass_can_not_be_done_again(home):
    step = TrainStep(tiny(), StepConfig(4, 16, update="backward"), OptimizerConfig(1e-2, clip=None), torch.device("cpu"))
    assert step.lighter() is None


def test_a_lost_card_names_the_last_good_checkpoint(home):
    done = train_with(home, fails(20, "RuntimeError('CUDA error: unspecified launch failure')"), "lost")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for words in ("step 20", "unspecified launch failure", "step-00000018"):
        assert words in done.stderr
    assert train(home, "lost", "--resume").returncode == 0
    assert end_state(home / "lost") == end_state(home / "whole")


@pytest.mark.parametrize(("name", "owner", "function", "least"), [
    ("data_s", Tokens, "batch", 40), ("eval_s", TrainStep, "evaluate", 3), ("checkpoint_s", checkpoint, "save", 2),
    ("log_s", RunLog, "write", 38)])
def test_every_slow_part_is_named_by_the_ledger_and_the_parts_make_the_whole(tmp_path, monkeypatch, name, owner, function,
                                                                             least):
    """The tokens of each of 40 steps, each evaluation, checkpoint or line of the log takes 20 s by a clock that is put
    forward, all else is as it was: the ledger grows by that where it was, but for lines that are written in a pause."""
    Clock(monkeypatch).slows(monkeypatch, owner, function, 20.0)
    run = open_run(tmp_path, 40, 20)
    paper = run.go()
    spent = paper["ledger"]
    assert sum(spent.values()) == pytest.approx(paper["actual"]["hours"] * 3600, rel=1e-6)
    assert spent[name] >= least * 20.0
    assert all(spent[other] < 20.0 for other in spent.keys() - {name, "start_up_s", "other_s"})
    assert spent["other_s"] < (7 * 20.0 + 20.0 if name == "log_s" else 20.0)
    assert ledger.NAMES[name] in ledger.words(spent | {"start_up_s": 0.0}).partition(",")[0]
    steps = [line for line in log(run.folder.path) if line["kind"] == "step"]
    assert len(steps) == 40
    for line in steps:
        parts = line["data_s"] + line["log_s"] + 2 * line["micro_s"] + line["optimizer_s"]
        assert line["step_s"] == pytest.approx(parts, rel=1e-6)


def test_a_stopped_run_goes_on_by_the_line_that_it_left_and_its_ledger_is_of_all_its_processes(home):
    process = stopped_after(home, "run twice", 40, signal.SIGTERM, "--data", "other.bin")
    assert process.returncode == 130
    run = home / "run twice"
    before = checkpoint.newest(run)[0]["ledger"]
    name, *words = shlex.split(process.printed.partition("go on with: ")[2].splitlines()[0])
    done = subprocess.run([sys.executable, "-m", MODULES[name], *words], timeout=120, **options(home))
    assert done.returncode == 0, done.stderr
    paper = receipt(run)
    spent = paper["ledger"]
    steps = [line for line in log(run) if line["kind"] == "step"]
    for name, key in (("compute_s", "micro_s"), ("optimizer_s", "optimizer_s"), ("data_s", "data_s")):
        assert spent[name] == pytest.approx(sum(line[key] for line in steps), rel=1e-6)
    assert spent["start_up_s"] >= before["start_up_s"] + paper["start_up_s"]


def stopped_after(home, run, lines, how, *more, **other):
    """A run to which something is done once its log has so many lines; the process, finished, and what it `printed`."""
    process = subprocess.Popen(run_command(home, run, *more), **options(home) | other)
    path = home / run / "log.jsonl"
    begin = time.monotonic()
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") > lines):
        assert time.monotonic() - begin < 60
        time.sleep(0.005)
    process.send_signal(how) if isinstance(how, int) else how()
    process.printed, _ = process.communicate()
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of its own")
def test_a_closed_terminal_saves_and_the_run_goes_on_from_there(home):
    """The terminal is closed: the system sends SIGHUP, and what is printed from then on can't be written."""
    import fcntl
    import termios

    ours, theirs = os.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = stopped_after(home, "closed", 30, lambda: (os.close(theirs), os.close(ours)), preexec_fn=own_terminal,
                            **terminal)
    assert process.returncode == 130
    assert not (home / "closed/receipt.json").exists()
    assert train(home, "closed", "--resume").returncode == 0
    assert end_state(home / "closed") == end_state(home / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP")
def test_nohup_is_left_alone(home):
    process = stopped_after(home, "nohup", 30, signal.SIGHUP,
                            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.returncode == 0 and end_state(home / "nohup") == end_state(home / "whole")


def test_a_clock_that_is_set_back_changes_nothing_but_the_log_s_times(home):
    """By an hour at every look, while it runs: the receipt's hours are the monotonic clock's."""
    code = """
import time
from trainer import log
log.process_seconds()
start = time.time()
calls = iter(range(10**9))
time.time = lambda: start - 3600 * next(calls)
"""
    done = train_with(home, code, "clock")
    assert done.returncode == 0, done.stderr
    paper = receipt(home / "clock")
    assert 0 < paper["actual"]["hours"] < 0.05 and all(value >= -1e-6 for value in paper["ledger"].values())
    assert end_state(home / "clock") == end_state(home / "whole")


def test_a_suspended_machine_is_told_and_not_counted(tmp_path, monkeypatch):
    """One step of an hour among those of milliseconds."""
    clock = Clock(monkeypatch)
    clock.slows(monkeypatch, TrainStep, "_forward_backward", 3600.0, lambda call: call == 41)
    run = open_run(tmp_path, 30, 10)
    paper = run.go()
    assert any(line.startswith("step 21 took 3,600 s: the machine slept") for line in run.said)
    away_s, whole_s = paper["ledger"]["away_s"], sum(paper["ledger"].values())
    assert away_s >= 3600 and paper["actual"]["hours"] * 3600 == pytest.approx(whole_s - away_s, rel=1e-6)


def test_trouble_is_told_when_it_begins_and_when_it_ends(tmp_path, monkeypatch):
    """The card, or here the processor, is looked at all the time; the tokens of steps 31 to 55 take 20 s each."""
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    clock = Clock(monkeypatch)
    clock.slows(monkeypatch, Tokens, "batch", 20.0, lambda call: 30 < call <= 55)
    run = open_run(tmp_path, 90, 30, Span(6.4, 64.0, 640.0))  # a step of 64 tokens in 10 s at the band's low end
    paper = run.go()
    told = [line for line in log(run.folder.path) if line["kind"] == "trouble"]
    assert any(line["what"] == "data" and "waits for tokens" in line["line"] for line in told)
    assert told[-1]["step"] > 55 and told[-1]["what"] is None and "is over" in told[-1]["line"]
    assert any(one["what"] == "data" for one in paper["troubles"])

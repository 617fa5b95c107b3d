"""What goes wrong in mid-run: told with its cause and what to do, and it costs as little of the run as can be."""

import dataclasses
import itertools
import os
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.made import there, tiny
from helpers.runs import Clock, before_step, end_state, log, open_run, receipt, run_options, train_with
from helpers.waiting import wait_for
from safetensors.torch import load_file

from spillcliff.errors import UserError
from spillcliff.failures import is_card_lost
from spillcliff.hardware.usage import process_seconds
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.tokens import Tokens
from trainer.plan import Span
from trainer.run import slowdown, speed_watch
from trainer.run.log import RunLog
from trainer.run.receipt import CAUSES, ledger_line
from trainer.run.slowdown import SpeedReadings
from trainer.run.step import TrainStep
from trainer.run_folder import RunFolder

SLOW = SpeedReadings(kind="cuda", tok_s=700.0, planned_tok_s=2000.0, data_share=0.0, spilled_bytes=0, throttle=0,
                     temperature_c=80, other_percent=0)
CPU = torch.device("cpu")
FOUR = StepConfig(4, 16)


@pytest.mark.parametrize(("cause", "words", "changes"), [
    ("spill", "1.2 GB", {"spilled_bytes": 1_200_000_000, "tok_s": 2000.0}),
    ("spill", "no throttle", {}),
    ("spill", "5.7 GB", {"reserved_bytes": 5_700_000_000, "spilled_bytes": None}),
    ("battery", "plug it in", {"on_battery": True}),
    ("data", "40% of it waits for tokens", {"data_share": 0.4}),
    ("throttle", "80 degrees", {"throttle": 0x40, "tok_s": 1050.0}),
    ("throttle", "80 degrees", {"throttle": 0x40, "clock_share": 0.4}),
    ("throttle", "80 degrees", {"throttle": 0x4, "clock_share": 0.4}),
    ("spill", "more than its throttle explains", {"throttle": 0x40}),
    ("spill", "more than its throttle explains", {"throttle": 0x40, "clock_share": 0.5}),
    ("spill", "no throttle", {"throttle": 0x4}),
    ("spill", "no throttle", {"throttle": 0x4, "tok_s": 1050.0}),
    ("contended", "pid 77", {"other_percent": 50.0, "other_pid": 77}),
    ("contended", "pid 77", {"other_percent": 50.0, "other_pid": 77, "throttle": 0x40}),
    ("contended", "pid 77", {"other_percent": 50.0, "other_pid": 77, "spilled_bytes": 1_200_000_000}),
    ("slow", "busy with", {"kind": "cpu", "spilled_bytes": None}),
    (None, "", {"tok_s": 1400.0}),
    (None, "", {"throttle": 0x40, "tok_s": 1900.0}),
    (None, "", {"spilled_bytes": 20 << 20, "tok_s": 1900.0}),
])
def test_the_cause_is_named_with_its_evidence(cause, words, changes):
    slow = slowdown.find_slowdown(dataclasses.replace(SLOW, **changes))
    assert (slow and slow.cause) == cause
    assert slow is None or words in slow.line


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


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def fails(monkeypatch):
    """Makes a method of TrainStep raise from its call `at` on (from 1) where it is given more than `most` sequences."""
    def make(at, error, method="_forward_backward", most=0):
        calls, real = itertools.count(1), getattr(TrainStep, method)

        def failing(self, tokens, *more, **others):
            out = real(self, tokens, *more, **others)
            if next(calls) >= at and len(tokens) > most:
                raise error
            return out

        monkeypatch.setattr(TrainStep, method, failing)
    return make


def end_tensors(run) -> dict:
    """Those of a run's newest checkpoint."""
    return load_file(checkpoint.newest(RunFolder(run))[1] / checkpoint.STATE)


def test_out_of_memory_in_mid_run_goes_on_in_smaller_pieces_with_the_same_tokens(tmp_path, fails):
    """From the 21st step on no micro-step of more than two sequences fits: the end is that of an undisturbed run, but for
    rounding, and the steps before are its own bit for bit."""
    whole = open_run(tmp_path, 30, 10, shape=FOUR, name="whole")
    whole.train()
    fails(21, OOM, most=2)
    said: list[str] = []
    hurt = open_run(tmp_path, 30, 10, shape=FOUR, name="hurt", say=said.append)
    assert hurt.train()["out_of_memory"] == [{"step": 21, "batch": 2, "accum": 2}]
    assert any("step 21: out of memory" in line and "batch 2 and accum 2" in line for line in said)
    ours, theirs = (log(run.folder.path, "step") for run in (hurt, whole))
    assert [line["step"] for line in ours] == list(range(1, 31))
    assert [line["loss"] for line in ours[:20]] == [line["loss"] for line in theirs[:20]]
    assert ours[20]["loss"] == pytest.approx(theirs[20]["loss"], rel=1e-6)
    expected = end_tensors(whole.folder.path)
    assert all(torch.allclose(value, expected[name], atol=2e-3) for name, value in end_tensors(hurt.folder.path).items())


def test_it_goes_on_halving_and_stops_where_one_sequence_is_too_much(home, called, fails):
    """Of steps of 3 micro-steps the second fails first."""
    fails(3 * 5 + 2, OOM)
    code, out, err = called(home, "train", *run_options("hopeless"))
    assert code == 2
    assert err.count("\n") == 1
    assert "smaller --limit" in err
    assert "batch 2 and accum 6" in out
    assert "batch 1 and accum 12" in out
    assert checkpoint.newest(RunFolder(home / "hopeless"))[0]["step"] == 3


def test_out_of_memory_in_an_evaluation_goes_on_too(tmp_path, fails):
    """The first evaluation is the first call; its batches are of four windows."""
    whole = open_run(tmp_path, shape=FOUR, name="whole").train()
    fails(1, OOM, "evaluate", most=1)
    hurt = open_run(tmp_path, shape=FOUR, name="hurt").train()
    assert hurt["out_of_memory"]
    assert hurt["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-3)


def test_memory_that_fails_in_the_optimizer_s_first_step_leaves_nothing_half_made():
    """Of a parameter's moments one was made when the memory ran out: both are made again, and the steps are the same."""
    tokens = torch.randint(300, (1, 4, 17), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    plain, hurt = (TrainStep(tiny(), FOUR, OptimizerConfig(1e-2), CPU) for _ in range(2))
    parameter = next(hurt.model.parameters())
    hurt._optimizers[parameter].state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
    hurt.use_batch(there(hurt.smaller_batch()))
    for _ in range(3):
        losses = [float(step(tokens.view(step.step.accum, step.step.batch, 17), 1e-2)[0]) for step in (plain, hurt)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("batch", "smaller"), [(8, 4), (6, 3), (5, 1), (9, 3), (1, None)])
def test_the_smaller_batch_divides_the_one_before(batch, smaller):
    step = TrainStep(tiny(), StepConfig(batch, 16), OptimizerConfig(1e-2), CPU)
    assert step.smaller_batch() == smaller
    if smaller is not None:
        step.use_batch(smaller)
        assert step.step.tokens == batch * 16
        step.use_batch(batch)
        assert (step.step.batch, step.step.accum) == (batch, 1)
    with pytest.raises(ValueError, match="no whole number of batches of"):
        step.use_batch(batch + 1)


def test_what_is_updated_in_the_backward_pass_can_not_be_done_again():
    step = TrainStep(tiny(), StepConfig(4, 16, update="backward"), OptimizerConfig(1e-2, clip=None), CPU)
    assert step.smaller_batch() is None


def test_a_lost_card_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    """In step 20 of 30, with a checkpoint every third step."""
    whole = open_run(tmp_path, 30, 3, name="whole")
    whole.train()
    with monkeypatch.context() as patch:
        calls, real = itertools.count(1), TrainStep.__call__

        def failing(self, *arguments):
            if next(calls) == 20:
                raise RuntimeError("CUDA error: unspecified launch failure")
            return real(self, *arguments)

        patch.setattr(TrainStep, "__call__", failing)
        with pytest.raises(UserError, match="when it answers again") as stopped:
            open_run(tmp_path, 30, 3, name="lost").train()
    for words in ("step 20", "unspecified launch failure", "step-00000018"):
        assert words in str(stopped.value)
    again = open_run(tmp_path, 30, 3, name="lost")
    again.resume()
    again.train()
    assert end_state(again.folder.path) == end_state(whole.folder.path)


@pytest.mark.parametrize(("name", "owner", "function", "least"), [
    ("data_s", Tokens, "batch", 40), ("eval_s", TrainStep, "evaluate", 3), ("checkpoint_s", checkpoint, "save", 2),
    ("log_s", RunLog, "write", 38)])
def test_every_slow_part_is_named_by_the_ledger_and_the_parts_make_the_whole(tmp_path, monkeypatch, name, owner, function,
                                                                             least):
    """The tokens of each of 40 steps, each evaluation, checkpoint or line of the log takes 20 s by a clock that is put
    forward, all else is as it was: the ledger grows by that where it was, but for lines that are written in a pause."""
    Clock(monkeypatch).slows(monkeypatch, owner, function, 20.0)
    run = open_run(tmp_path, 40, 20)
    receipt = run.train()
    spent = receipt["ledger"]
    assert sum(spent.values()) == pytest.approx(receipt["actual"]["hours"] * 3600, rel=1e-6)
    assert spent[name] >= least * 20.0
    assert all(spent[other] < 20.0 for other in spent.keys() - {name, "start_up_s", "other_s"})
    assert spent["other_s"] < (7 * 20.0 + 20.0 if name == "log_s" else 20.0)
    assert CAUSES[name] in ledger_line(spent | {"start_up_s": 0.0}).partition(",")[0]
    steps = log(run.folder.path, "step")
    assert len(steps) == 40
    for line in steps:
        parts = line["data_s"] + line["log_s"] + 2 * line["micro_s"] + line["optimizer_s"]
        assert line["step_s"] == pytest.approx(parts, rel=1e-6)


def test_a_stopped_run_goes_on_by_the_line_that_it_left_and_its_ledger_is_of_all_its_processes(home, called):
    stops = before_step(20, "os.kill(os.getpid(), signal.SIGTERM)")
    stopped = train_with(home, stops, "run twice", "--data", "other.bin")
    assert stopped.returncode == 130, stopped.stderr
    assert "stopped after step 20;" in stopped.stdout
    run = RunFolder(home / "run twice")
    before = checkpoint.newest(run)[0]
    assert before["step"] == 20
    name, *words = shlex.split(stopped.stdout.partition("go on with: ")[2].splitlines()[0])
    code, _, err = called(home, name, *words)
    assert code == 0, err
    both = receipt(run.path)
    spent, steps = both["ledger"], log(run.path, "step")
    for name, key, count in (("compute_s", "micro_s", 3), ("optimizer_s", "optimizer_s", 1), ("data_s", "data_s", 1)):
        assert spent[name] == pytest.approx(count * sum(line[key] for line in steps), rel=1e-6)
    assert spent["start_up_s"] >= before["ledger"]["start_up_s"] + both["start_up_s"]


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of its own")
def test_a_closed_terminal_saves_and_the_run_goes_on_from_there(home, called):
    """The terminal is closed: the system sends SIGHUP, and what is printed from then on can't be written."""
    import fcntl
    import termios

    ours, theirs = os.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def closes():
        wait_for(lambda: (home / "reached").exists())
        os.close(theirs)
        os.close(ours)

    reached = before_step(20, """
        open("reached", "w").close()
        while not told:
            time.sleep(0.01)""")
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(closes)
        process = train_with(home, reached, "closed", preexec_fn=own_terminal,
                             **dict.fromkeys(("stdin", "stdout", "stderr"), theirs))
        closing.result()
    assert process.returncode == 130
    assert checkpoint.newest(RunFolder(home / "closed"))[0]["step"] == 20
    assert not (home / "closed/receipt.json").exists()
    code, _, err = called(home, "train", *run_options("closed", "--resume"))
    assert code == 0, err
    assert end_state(home / "closed") == end_state(home / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGHUP")
def test_nohup_is_left_alone(home):
    done = train_with(home, before_step(20, "os.kill(os.getpid(), signal.SIGHUP)"), "nohup",
                      preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert done.returncode == 0, done.stderr
    assert end_state(home / "nohup") == end_state(home / "whole")


def test_a_clock_that_is_set_back_changes_nothing_but_the_log_s_times(tmp_path, monkeypatch):
    """By an hour at every look, while it runs: the receipt's hours are the monotonic clock's."""
    whole = open_run(tmp_path, name="whole")
    whole.train()
    before_s, start, calls = process_seconds(), time.time(), itertools.count()
    monkeypatch.setattr(time, "time", lambda: start - 3600 * next(calls))
    run = open_run(tmp_path)
    receipt = run.train()
    assert before_s < receipt["actual"]["hours"] * 3600 < process_seconds()
    assert all(value >= -1e-6 for value in receipt["ledger"].values())
    assert log(run.folder.path)[-1]["at"] < start - 3600
    assert end_state(run.folder.path) == end_state(whole.folder.path)


def test_a_suspended_machine_is_told_and_not_counted(tmp_path, monkeypatch):
    """One step of an hour among those of milliseconds."""
    clock = Clock(monkeypatch)
    clock.slows(monkeypatch, TrainStep, "_forward_backward", 3600.0, lambda call: call == 41)
    said: list[str] = []
    receipt = open_run(tmp_path, 30, 10, say=said.append).train()
    assert any(line.startswith("step 21 took 3,600 s: the machine slept") for line in said)
    away_s, whole_s = receipt["ledger"]["away_s"], sum(receipt["ledger"].values())
    assert away_s >= 3600
    assert receipt["actual"]["hours"] * 3600 == pytest.approx(whole_s - away_s, rel=1e-6)


def test_trouble_is_told_when_it_begins_and_when_it_ends(tmp_path, monkeypatch):
    """The card, or here the processor, is looked at all the time; the tokens of steps 31 to 55 take 20 s each."""
    monkeypatch.setattr(speed_watch, "LOOK_EVERY_S", 0.0)
    clock = Clock(monkeypatch)
    clock.slows(monkeypatch, Tokens, "batch", 20.0, lambda call: 30 < call <= 55)
    run = open_run(tmp_path, 90, 30, Span(6.4, 64.0, 640.0))  # a step of 64 tokens in 10 s at the band's low end
    receipt = run.train()
    told = log(run.folder.path, "trouble")
    assert any(line["what"] == "data" and "waits for tokens" in line["line"] for line in told)
    assert told[-1]["step"] > 55
    assert told[-1]["what"] is None
    assert "is over" in told[-1]["line"]
    assert any(one["what"] == "data" for one in receipt["troubles"])

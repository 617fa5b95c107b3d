"""Whatever stops a run, the command that its last line ends with works as it is printed, and the run trains to its end."""

import dataclasses
import itertools
import json
import math
import shlex
import shutil
import sys

import pytest
import torch
from helpers.runs import STEPS, log, receipt, run_options

from trainer import checkpoint
from trainer.config import LARGEST_LR
from trainer.plan import Plan
from trainer.run.commands import RunCommands
from trainer.run.divergence import is_sound, lower_lr
from trainer.run.loop import Run
from trainer.run.step import TrainStep
from trainer.run_folder import RunFolder

OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
WILD = 1.5 * math.log(300)


def printed(text: str) -> list[str]:
    """The words of the command that a message ends with."""
    return shlex.split(text[text.rindex(": train ") + 2:])


def goes_on(home, called, text: str) -> RunFolder:
    """Runs the printed command, which must train to the end; returns its run."""
    words = printed(text)
    code, _, err = called(home, *words)
    assert code == 0, err
    run = RunFolder(home / words[words.index("--run") + 1])
    losses = [line["loss"] for line in log(run.path, "step")]
    assert log(run.path, "step")[-1]["step"] == STEPS
    assert math.isfinite(losses[-1])
    assert run.receipt.exists()
    return run


@pytest.fixture
def nan_at(monkeypatch):
    """Makes the loss NaN in a given optimizer step, once."""
    def make(step):
        calls, real = itertools.count(1), TrainStep.__call__

        def changed(self, *arguments):
            loss, norm = real(self, *arguments)
            return loss * (float("nan") if next(calls) == step else 1), norm

        monkeypatch.setattr(TrainStep, "__call__", changed)
    return make


def test_after_a_loss_that_is_no_number_the_printed_command_goes_on_at_half_the_rate(home, called, nan_at):
    """From the newest checkpoint but one: from the newest, of the step just before, the same loss would come again."""
    nan_at(25)
    code, _, err = called(home, "train", *run_options("nan run"))
    assert code == 2
    assert err.count("\n") == 1
    assert "at step 25" in err
    assert "lower lr" in err
    assert "step-00000021 (set aside, since it would come again from there: step-00000024)" in err
    assert (home / "nan run/checkpoints/step-00000024.aside" / checkpoint.STATE).is_file()
    run = goes_on(home, called, err)
    assert run.path == home / "nan run"
    assert Plan.load(run.plan).optimizer.lr == 5e-3
    rates = {line["step"]: line["lr"] for line in log(run.path, "step")}
    whole = {line["step"]: line["lr"] for line in log(home / "whole", "step")}
    assert rates[20] == whole[20]
    assert rates[30] == pytest.approx(whole[30] / 2)
    assert (run.checkpoints / "step-00000024.aside").is_dir()


def test_a_run_whose_weights_ran_away_starts_anew_from_before(home, called):
    """Really: with lr 9.9 and a decay of 9.9 every step makes each weight 97 times as large. What was saved on the way is
    passed over for its losses; nothing of it is removed."""
    plan = Plan.load(home / "plan.json")
    wild = dataclasses.replace(plan, optimizer=dataclasses.replace(plan.optimizer, lr=9.9, weight_decay=9.9, clip=None))
    wild.save(home / "wild.json")
    code, _, err = called(home, "train", *run_options("wild", "--plan", "wild.json"))
    assert code == 2, err
    assert err.count("\n") == 1
    left = RunFolder(home / "wild").checkpoint_steps()
    run = goes_on(home, called, err)
    assert Plan.load(run.plan).optimizer.lr == LARGEST_LR
    assert not left or run.path != home / "wild"
    if left:
        assert RunFolder(home / "wild").checkpoint_steps() == left


def test_before_the_first_checkpoint_the_same_folder_is_started_anew(home, called, nan_at):
    nan_at(2)
    code, _, err = called(home, "train", *run_options("early"))
    assert code == 2
    assert "there is no checkpoint yet" in err
    assert goes_on(home, called, err).path == home / "early"


def test_a_validation_loss_that_is_no_number_leads_to_the_checkpoint_before(home, called, monkeypatch):
    """At the third evaluation, after step 20, with checkpoints at 15 and 18."""
    calls, real = itertools.count(1), Run._eval_losses
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_eval_losses",
                      lambda self, number: [x * (float("nan") if next(calls) == 3 else 1) for x in real(self, number)[:1]])
        code, _, err = called(home, "train", *run_options("validation"))
    assert code == 2
    assert "validation loss nan after step 20" in err
    assert "go on from validation/checkpoints/step-00000018 with a lower lr" in err
    goes_on(home, called, err)


@pytest.mark.parametrize("number", [1, 20])
def test_after_out_of_memory_the_printed_command_goes_on(home, called, monkeypatch, number):
    """At step 1 there is no checkpoint to resume from. Steps have three micro-steps."""
    calls, real = itertools.count(1), TrainStep._forward_backward

    def failing(self, *arguments):
        if next(calls) > 3 * (number - 1):
            raise OOM
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "_forward_backward", failing)
        code, _, err = called(home, "train", *run_options(f"oom-{number}"))
    assert code == 2
    assert err.count("\n") == 1
    assert "smaller --limit" in err
    run = goes_on(home, called, err)
    assert run.path == home / f"oom-{number}"
    assert receipt(run.path)["resumed_from"] == (0 if number == 1 else 18)


def test_where_every_checkpoint_is_broken_there_is_one_way_forward(home, called, refused_in):
    run = stopped(home, "broken")
    for step in run.checkpoint_steps():
        (run.checkpoint(step) / checkpoint.STATE).write_bytes(b"")
    before = sorted(run.checkpoints.rglob("*"))
    err = refused_in(home, "broken", "--resume")
    assert "no usable checkpoint among its" in err
    again = goes_on(home, called, err)
    assert again.path == home / "broken-2"
    assert sorted(run.checkpoints.rglob("*")) == before
    assert json.loads(again.plan.read_text()) == json.loads(run.plan.read_text())


def test_a_run_without_a_checkpoint_is_not_resumed_but_started(home, called, refused_in):
    Plan.load(home / "plan.json").save(home / "young/plan.json")
    err = refused_in(home, "young", "--resume")
    assert "no usable checkpoint; start anew with: " in err
    assert goes_on(home, called, err).path == home / "young"


@pytest.fixture
def refused_in(called):
    def run(home, name, *more):
        code, _, err = called(home, "train", *run_options(name, *more))
        assert code == 2, err
        assert err.count("\n") == 1
        return err
    return run


def stopped(home, name) -> RunFolder:
    """A run as one leaves it that is killed after its last checkpoint but one."""
    run = RunFolder(shutil.copytree(home / "whole", home / name))
    run.receipt.unlink()
    shutil.rmtree(run.checkpoint(STEPS))
    return run


def test_another_rate_goes_on_only_where_it_is_asked_for(home, called, refused_in):
    """Another plan's is refused, as before; --lr is the run's from there on, and a later resume need not name it."""
    newest = stopped(home, "rate").checkpoint_steps()[-1]
    plan = Plan.load(home / "plan.json")
    dataclasses.replace(plan, optimizer=dataclasses.replace(plan.optimizer, lr=1e-3)).save(home / "slower.json")
    assert "'lr': 0.01" in refused_in(home, "rate", "--resume", "--plan", "slower.json")
    assert "lr is nan" in refused_in(home, "rate", "--resume", "--lr", "nan")
    assert "lr is 0.0" in refused_in(home, "rate", "--resume", "--lr", "0")
    code, _, err = called(home, "train", *run_options("rate", "--resume", "--lr", "0.002", "--dry-run"))
    assert code == 0, err
    assert Plan.load(home / "rate/plan.json").optimizer.lr == 1e-2
    code, _, err = called(home, "train", *run_options("rate", "--resume", "--lr", "0.002"))
    assert code == 0, err
    assert Plan.load(home / "rate/plan.json").optimizer.lr == 2e-3
    rates = [line["lr"] for line in log(home / "rate", "step")]
    whole = [line["lr"] for line in log(home / "whole", "step")]
    assert rates == pytest.approx([*whole, *(rate / 5 for rate in whole[newest:])])


@pytest.mark.parametrize(("lr", "lower"), [(1e-2, 5e-3), (1e-3, 5e-4), (9.9, LARGEST_LR), (3e-4, 1.5e-4), (1e-9, 5e-10)])
def test_the_rate_to_try_next_is_half_and_none_that_plans_do_not_take(lr, lower):
    assert lower_lr(lr) == pytest.approx(lower)


@pytest.mark.parametrize(("facts", "bad_after", "sound"), [
    ({"step": 20}, 21, True), ({"step": 20}, 20, False), ({"step": 20, "loss": WILD - 0.1, "val_loss": 3.0}, 25, True),
    ({"step": 20, "loss": WILD + 0.1, "val_loss": 3.0}, 25, False),
    ({"step": 20, "loss": 3.0, "val_loss": WILD + 0.1}, 25, False),
    ({"step": 20, "loss": float("inf")}, 25, False), ({"step": 20, "val_loss": None}, 25, False)])
def test_a_checkpoint_is_sound_before_the_weights_are_bad_and_with_no_wild_loss(facts, bad_after, sound):
    assert is_sound(facts, bad_after, 300) is sound


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's quotes")
def test_a_command_bears_every_option_as_it_was_given(tmp_path):
    options = (("--data", "a b.bin"), ("--sample", 'say "x"'), ("--tensorboard", None))
    commands = RunCommands(RunFolder(tmp_path / "my  run"), options, tmp_path / "source")
    words = shlex.split(commands.start(1e-4))
    assert words[:3] == ["train", "--plan", str(tmp_path / "my  run/plan.json")]
    assert words[3:] == ["--data", "a b.bin", "--sample", 'say "x"', "--tensorboard", "--lr", "0.0001", "--run",
                         str(tmp_path / "my  run"), "--from", str(tmp_path / "source")]
    assert "--from" not in commands.resume()
    of_two = dataclasses.replace(commands, processes=2).resume()
    assert of_two.startswith("torchrun --nproc-per-node 2 -- $(which train) --plan")
    (tmp_path / "my  run").mkdir()
    (tmp_path / "my  run/receipt.json").touch()
    assert shlex.split(commands.start())[-3] == str(tmp_path / "my  run-2")

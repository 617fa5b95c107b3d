"""Several processes that train one model, here on the processor: the same batches in the same order, the same weights to
rounding however many they are, one log, one receipt, one voice."""

import itertools
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from runs import STEPS, end_state, log, make_home, options, receipt, run_command
from safetensors.numpy import load

from trainer import checkpoint
from trainer.config import StepConfig
from trainer.errors import UserError
from trainer.team import Seat
from trainer.tokens import Tokens

ROUNDING = 1e-4
"""Of a loss, where sums are taken in another order: 1e-6 after 90 steps here, where another batch makes it 1e-1."""


def torchrun(home, count: int, run: str, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--", "-m"]
    return [*command, *run_command(home, run, *more)[2:]]


def together(home, count: int, run: str, *more):
    return subprocess.run(torchrun(home, count, run, *more), timeout=120, **options(home))


def losses(run) -> list[float]:
    return [line["loss"] for line in log(run) if line["kind"] == "step"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Steps of 3 micro-steps of 4 sequences: two processes can't take whole micro-steps."""
    return make_home(tmp_path_factory.mktemp("team"), shape=StepConfig(4, 16, 3))


def test_two_processes_train_as_one_does(home):
    done = together(home, 2, "two")
    assert done.returncode == 0, done.stderr
    assert losses(home / "two") == pytest.approx(losses(home / "whole"), abs=ROUNDING)
    assert [line["val_loss"] for line in log(home / "two") if line["kind"] == "eval"] == pytest.approx(
        [line["val_loss"] for line in log(home / "whole") if line["kind"] == "eval"], abs=ROUNDING)
    assert [line["step"] for line in log(home / "two") if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert done.stdout.count("receipt in two") == 1 and "planned for 1 and started as 2" in done.stdout
    assert receipt(home / "two")["processes"] == 2
    assert receipt(home / "two")["tokens"] == receipt(home / "whole")["tokens"]


def test_what_two_began_one_ends_and_three_could(home):
    """Asked to stop, they agree on the step after which they do."""
    process = subprocess.Popen(torchrun(home, 2, "begun"), **options(home))
    path = home / "begun" / "log.jsonl"
    while not path.exists() or path.read_text().count('"step"') < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "stopped after step" in out, err
    stopped = checkpoint.newest(home / "begun")[0]["step"]
    assert 0 < stopped < STEPS
    done = subprocess.run(run_command(home, "begun", "--resume"), timeout=120, **options(home))
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {stopped}" in done.stdout
    assert losses(home / "begun") == pytest.approx(losses(home / "whole"), abs=ROUNDING)
    ended, whole = (load(end_state(home / name)) for name in ("begun", "whole"))
    assert all(np.allclose(ended[name], whole[name], atol=1e-3) for name in whole if name.startswith("model."))


def test_what_cannot_be_dealt_out_is_told_before_anybody_waits(home):
    more = options(home)
    more["env"] |= {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    done = subprocess.run(run_command(home, "five"), timeout=120, **more)
    assert done.returncode == 2
    assert "can't be dealt out evenly to 5" in done.stderr
    assert not (home / "five").exists()


@pytest.mark.parametrize(("shape", "size", "batch", "accum"), [
    (StepConfig(4, 8, 6), 2, 4, 3), (StepConfig(4, 8, 1), 4, 1, 1), (StepConfig(4, 8, 3), 2, 2, 3), (StepConfig(6, 8, 2), 4, 3, 1),
    (StepConfig(5, 8, 7), 1, 5, 7)])
def test_shares_make_the_whole_step(token_file, shape, size, batch, accum):
    """Each window of a step goes to one process, in the order in which one alone would take them, epochs crossed."""
    tokens = Tokens.open(token_file(np.arange(1000) % 500, vocab=500))
    share = Seat(0, size).share(shape)
    assert (share.batch, share.accum) == (batch, accum)
    for step in (0, 3, 40):
        parts = [tokens.batch(1, step, share, Seat(rank, size)).reshape(-1, 9) for rank in range(size)]
        assert np.array_equal(np.concatenate(parts), tokens.batch(1, step, shape).reshape(-1, 9))


def test_a_share_is_refused_where_there_is_none():
    for batch, accum, size in itertools.product((1, 2, 3, 4), (1, 2, 3), (2, 3, 4, 5)):
        if batch * accum % size:
            with pytest.raises(UserError, match=f"start as many as divide {batch * accum}"):
                Seat(0, size).share(StepConfig(batch, 8, accum))
        else:
            share = Seat(0, size).share(StepConfig(batch, 8, accum))
            assert share.batch * share.accum * size == batch * accum
    with pytest.raises(UserError, match="update after"):
        Seat(0, 2).share(StepConfig(4, 8, update="backward"))


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"},
                                       {"RANK": "-1", "WORLD_SIZE": "1"}])
def test_variables_that_torchrun_would_not_set_are_refused(variables):
    with pytest.raises(UserError, match="unset them"):
        Seat.of(variables)
    assert Seat.of({}) == Seat.of({"RANK": "0"}) == Seat()

"""Several processes that train one model, here on the processor: the same batches in the same order, the same weights to
rounding however many they are, one log, one receipt, one voice."""

import itertools
import json
import shutil
import signal
import subprocess
import time
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.made import make_record, write_records
from helpers.runs import STEPS, end_state, log, make_home, options, receipt, run_command, together, torchrun, train
from safetensors.numpy import load

from spillcliff.errors import UserError
from trainer import checkpoint
from trainer.config import StepConfig
from trainer.data.tokens import Tokens
from trainer.plan import Plan
from trainer.ranks import Seat

ROUNDING = 1e-4
"""Of a loss, where sums are taken in another order: 1e-6 after 90 steps here, where another batch makes it 1e-1."""


def planned(step, device="card"):
    """As much of a plan as a share needs."""
    return SimpleNamespace(step=step, device=device)


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
    assert done.stdout.count("receipt in two") == 1
    assert receipt(home / "two")["ran_on"].endswith("-x2")
    assert receipt(home / "two")["tokens"] == receipt(home / "whole")["tokens"]


def test_weights_shared_out_train_as_whole_ones_whoever_goes_on(home):
    """FSDP2, asked for by the device that was planned for: stopped by SIGTERM after a step that the processes agree on,
    gone on with by two, and at the end again by one alone."""
    plan = json.loads((home / "plan.json").read_text())
    (home / "sharded.json").write_text(json.dumps(plan | {"device": "cpu-x-x2-sharded"}))
    command = torchrun(home, 2, "sharded", "--plan", "sharded.json")
    process = subprocess.Popen(command, **options(home))
    path = home / "sharded" / "log.jsonl"
    while not path.exists() or path.read_text().count('"step"') < 20:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "stopped after step" in out, err
    stopped = checkpoint.newest(home / "sharded")[0]["step"]
    assert 0 < stopped < STEPS
    done = subprocess.run([*command, "--resume"], timeout=200, **options(home))
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {stopped}" in done.stdout
    assert receipt(home / "sharded")["ran_on"].endswith("-x2-sharded")
    assert losses(home / "sharded") == pytest.approx(losses(home / "whole"), abs=ROUNDING)
    shutil.rmtree(sorted((home / "sharded" / "checkpoints").iterdir())[-1])
    (home / "sharded" / "receipt.json").unlink()
    done = train(home, "sharded", "--plan", "sharded.json", "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(home / "sharded")[-3:] == pytest.approx(losses(home / "whole")[-3:], abs=ROUNDING)
    ended, whole = (load(end_state(home / name)) for name in ("sharded", "whole"))
    assert all(np.allclose(ended[name], whole[name], atol=1e-3) for name in whole if name.startswith("model."))


def test_what_cannot_be_dealt_out_is_told_before_anybody_waits(home):
    more = options(home)
    more["env"] |= {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
    done = subprocess.run(run_command(home, "five"), timeout=120, **more)
    assert done.returncode == 2
    assert "can't be dealt out evenly to 5" in done.stderr
    assert not (home / "five").exists()


@pytest.mark.parametrize(("shape", "size", "batch", "accum"), [
    (StepConfig(4, 8, 6), 2, 4, 3), (StepConfig(4, 8, 1), 4, 1, 1), (StepConfig(4, 8, 3), 2, 2, 3),
    (StepConfig(6, 8, 2), 4, 3, 1), (StepConfig(5, 8, 7), 1, 5, 7)])
def test_shares_make_the_whole_step(token_file, shape, size, batch, accum):
    """Each window of a step goes to one process, in the order in which one alone would take them, epochs crossed."""
    tokens = Tokens.open(token_file(np.arange(1000) % 500, vocab=500))
    share = Seat(0, size).share(planned(shape))
    assert (share.batch, share.accum) == (batch, accum)
    for step in (0, 3, 40):
        parts = [tokens.batch(1, step, share, Seat(rank, size)).reshape(-1, 9) for rank in range(size)]
        assert np.array_equal(np.concatenate(parts), tokens.batch(1, step, shape).reshape(-1, 9))


def test_a_share_is_refused_where_there_is_none():
    for batch, accum, size in itertools.product((1, 2, 3, 4), (1, 2, 3), (2, 3, 4, 5)):
        if batch * accum % size:
            with pytest.raises(UserError, match=f"start as many as divide {batch * accum}"):
                Seat(0, size).share(planned(StepConfig(batch, 8, accum)))
        else:
            share = Seat(0, size).share(planned(StepConfig(batch, 8, accum)))
            assert share.batch * share.accum * size == batch * accum
    with pytest.raises(UserError, match="update after"):
        Seat(0, 2).share(planned(StepConfig(4, 8, update="backward")))


def test_a_step_planned_for_two_is_shared_as_it_was_measured():
    """Half of each micro-step, also where whole ones could be dealt out."""
    share = Seat(1, 2).share(planned(StepConfig(8, 16, 4), device="card-x2"))
    assert (share.batch, share.accum) == (4, 4)


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"},
                                       {"RANK": "-1", "WORLD_SIZE": "1"}])
def test_variables_that_torchrun_would_not_set_are_refused(variables):
    with pytest.raises(UserError, match="unset them"):
        Seat.of(variables)
    assert Seat.of({}) == Seat.of({"RANK": "0"}) == Seat()


def of_two(directory, **other):
    """A folder of records of one card, and of two of it together where `other` is given."""
    path = directory / "results" / "card" / "records.jsonl"
    write_records(path, [make_record(4, 512, 1000.0, 4e9, device="card")])
    if other:
        write_records(path.parent.with_name("card-x2") / "records.jsonl", [make_record(device="card-x2", **other)])


def test_cards_that_were_not_measured_together_are_assumed_and_said_to_be(command, tmp_path):
    of_two(tmp_path)
    asked = ("plan", "--corpus", "100M", "--limit", "5GB", "--device", "card", "--json")
    one, two = (json.loads(command(*asked, *more).stdout) for more in ((), ("--gpus", "2")))
    assert (one["device"], two["device"]) == ("card", "card-x2")
    assert two["step"]["batch"] == 2 * one["step"]["batch"]
    assert 1000 < two["predicted"]["tok_s"]["mid"] < 2000
    more_s = two["step"]["batch"] * 512 / two["predicted"]["tok_s"]["mid"] - 4 * 512 / 1000.0
    assert more_s == pytest.approx(4 * one["model"]["parameters"] / 6e9, rel=0.01)
    assert "not measured together: assumed from one" in two["why"][0] and "--nproc 2" in two["why"][0]


def test_cards_that_were_measured_together_are_planned_from_that(command, tmp_path):
    of_two(tmp_path, batch=8, tok_s=1500.0, peak=4.5e9)
    done = command("plan", "--corpus", "100M", "--limit", "5GB", "--device", "card", "--gpus", "2", "--json")
    plan = json.loads(done.stdout)
    assert plan["predicted"]["tok_s"]["mid"] == pytest.approx(1500) and plan["step"]["batch"] == 8
    assert not any("assumed" in line for line in plan["why"])


def test_a_team_that_nobody_measured_is_refused(refused, tmp_path):
    write_records(tmp_path / "results" / "card-x2" / "records.jsonl", [make_record(device="card-x2")])
    line = refused(2, "plan", "--corpus", "1M", "--device", "card-x2", "--gpus", "4")
    assert "no records of card-x4, nor of card; there are card-x2" in line


def test_a_cell_is_measured_by_two_as_two_train_it(command, tmp_path):
    """Each does its part of every micro-step; the plan made from it starts without a word about another device."""
    done = command("probe", "grid", "--model", "1M", "--batch", "1", "--length", "32", "--vocab", "500", "--accum", "1",
                   "--seconds", "1", "--nproc", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (cell,) = found["cells"]
    assert found["device"].endswith("-x2") and cell["cell"]["batch"] == 2 and cell["status"] == "fits"
    assert cell["tok_s"] == pytest.approx(64 / median(cell["step_s"]))
    assert cell["device_peak_bytes"] > 1e8
    done = command("plan", "--corpus", "10k", "--device", found["device"], "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.device == found["device"]
    assert Seat(1, 2).share(plan).batch == plan.step.batch / 2

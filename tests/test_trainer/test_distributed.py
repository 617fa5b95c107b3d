"""Several processes that train one model, here on the processor: the same batches in the same order, the same weights to
rounding however many they are, one log, one receipt, one voice."""

import itertools
import json
import shutil
from statistics import median

import numpy as np
import pytest
from helpers.made import make_plan, make_record, write_records
from helpers.runs import STEPS, before_step, end_state, log, receipt, run_options, train_distributed
from safetensors.numpy import load

from spillcliff.errors import UserError
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig, clip_for
from trainer.data.tokens import Tokens
from trainer.plan import Plan
from trainer.ranks import ALONE, World
from trainer.run_folder import RunFolder

ROUNDING = 1e-4
"""Of a loss, where sums are taken in another order: 1e-6 after 90 steps here, where another batch makes it 1e-1."""


def planned(step: StepConfig, device="card") -> Plan:
    return make_plan(device, step=step, optimizer=OptimizerConfig(1e-3, clip=clip_for(step)))


def column(run, kind: str, name: str) -> list:
    """What a run's log has of each step, or of each evaluation."""
    return [line[name] for line in log(run, kind)]


def test_two_processes_train_as_one_does(home):
    done = train_distributed(home, 2, "two")
    assert done.returncode == 0, done.stderr
    two, whole = home / "two", home / "whole"
    assert column(two, "step", "loss") == pytest.approx(column(whole, "step", "loss"), abs=ROUNDING)
    assert column(two, "eval", "val_loss") == pytest.approx(column(whole, "eval", "val_loss"), abs=ROUNDING)
    assert column(two, "step", "step") == list(range(1, STEPS + 1))
    assert done.stdout.count("receipt in two") == 1
    assert receipt(two)["ran_on"].endswith("-x2")
    assert receipt(two)["tokens"] == receipt(whole)["tokens"]


def test_weights_shared_out_train_as_whole_ones_whoever_goes_on(home, called):
    """FSDP2, asked for by the device that was planned for: stopped by SIGTERM after a step that the processes agree on,
    gone on with by two, and at the end again by one alone."""
    plan = json.loads((home / "plan.json").read_text())
    (home / "sharded.json").write_text(json.dumps(plan | {"device": "cpu-x-x2-sharded"}))
    run, whole = RunFolder(home / "sharded"), home / "whole"
    planned = ("--plan", "sharded.json")
    stops = before_step(20, """
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
        while not told:
            time.sleep(0.01)""")
    stopped = train_distributed(home, 2, "sharded", *planned, code=stops)
    assert "stopped after step" in stopped.stdout, stopped.stderr
    step = checkpoint.newest(run)[0]["step"]
    assert 20 <= step <= 22
    done = train_distributed(home, 2, "sharded", *planned, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {step}" in done.stdout
    assert receipt(run.path)["ran_on"].endswith("-x2-sharded")
    assert column(run.path, "step", "loss") == pytest.approx(column(whole, "step", "loss"), abs=ROUNDING)
    shutil.rmtree(run.checkpoint(STEPS))
    run.receipt.unlink()
    code, _, err = called(home, "train", *run_options("sharded", *planned, "--resume"))
    assert code == 0, err
    assert column(run.path, "step", "loss")[-3:] == pytest.approx(column(whole, "step", "loss")[-3:], abs=ROUNDING)
    ended, expected = load(end_state(run.path)), load(end_state(whole))
    assert all(np.allclose(ended[name], expected[name], atol=1e-3) for name in expected if name.startswith("model."))


def test_what_cannot_be_dealt_out_is_told_before_anybody_waits(home, called, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "5"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    code, _, err = called(home, "train", *run_options("five"))
    assert code == 2
    assert "can't be dealt out evenly to 5" in err
    assert not (home / "five").exists()


@pytest.mark.parametrize(("shape", "size", "batch", "accum"), [
    (StepConfig(4, 8, 6), 2, 4, 3), (StepConfig(4, 8, 1), 4, 1, 1), (StepConfig(4, 8, 3), 2, 2, 3),
    (StepConfig(6, 8, 2), 4, 3, 1), (StepConfig(5, 8, 7), 1, 5, 7)])
def test_the_parts_make_the_whole_step(token_file, shape, size, batch, accum):
    """Each window of a step goes to one process, in the order in which one alone would take them, epochs crossed."""
    tokens = Tokens.open(token_file(np.arange(1000) % 500, vocab=500))
    part = World(0, size).part_of_plan(planned(shape))
    assert (part.batch, part.accum) == (batch, accum)
    for step in (0, 3, 40):
        parts = [tokens.batch(1, step, part, World(rank, size)).reshape(-1, 9) for rank in range(size)]
        assert np.array_equal(np.concatenate(parts), tokens.batch(1, step, shape).reshape(-1, 9))


def test_a_part_is_refused_where_there_is_none():
    for batch, accum, size in itertools.product((1, 2, 3, 4), (1, 2, 3), (2, 3, 4, 5)):
        if batch * accum % size:
            with pytest.raises(UserError, match=f"start as many as divide {batch * accum}"):
                World(0, size).part_of_plan(planned(StepConfig(batch, 8, accum)))
        else:
            part = World(0, size).part_of_plan(planned(StepConfig(batch, 8, accum)))
            assert part.batch * part.accum * size == batch * accum
    backward = planned(StepConfig(4, 8, update="backward"))
    assert ALONE.part_of_plan(backward) == backward.step
    with pytest.raises(UserError, match="update after"):
        World(0, 2).part_of_plan(backward)


def test_a_step_planned_for_two_is_shared_as_it_was_measured():
    """Half of each micro-step, also where whole ones could be dealt out."""
    part = World(1, 2).part_of_plan(planned(StepConfig(8, 16, 4), device="card-x2"))
    assert (part.batch, part.accum) == (4, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_are_split_so_that_each_counts_once_and_all_have_as_many(size):
    splits = [World(rank, size).split(range(7)) for rank in range(size)]
    assert len({len(split) for split in splits}) == 1
    assert sorted(item for split in splits for item, is_own in split if is_own) == list(range(7))


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"},
                                       {"RANK": "-1", "WORLD_SIZE": "1"}])
def test_variables_that_torchrun_would_not_set_are_refused(variables):
    with pytest.raises(UserError, match="unset them"):
        World.of_environment(variables)
    assert World.of_environment({}) == World.of_environment({"RANK": "0"}) == ALONE


def of_two(directory, **other):
    """A folder of records of one card, and of two of it together where `other` is given."""
    path = directory / "results" / "card" / "records.jsonl"
    write_records(path, [make_record(4, 512, 1000.0, 4e9, device="card")])
    if other:
        write_records(path.parent.with_name("card-x2") / "records.jsonl", [make_record(device="card-x2", **other)])


def test_cards_that_were_not_measured_together_are_assumed_and_said_to_be(called, tmp_path):
    of_two(tmp_path)
    asked = ("plan", "--corpus", "100M", "--limit", "5GB", "--device", "card", "--json")
    one, two = (json.loads(called(tmp_path, *asked, *more)[1]) for more in ((), ("--gpus", "2")))
    assert (one["device"], two["device"]) == ("card", "card-x2")
    assert two["step"]["batch"] == 2 * one["step"]["batch"]
    assert 1000 < two["predicted"]["tok_s"]["mid"] < 2000
    more_s = two["step"]["batch"] * 512 / two["predicted"]["tok_s"]["mid"] - 4 * 512 / 1000.0
    assert more_s == pytest.approx(4 * one["model"]["parameters"] / 6e9, rel=0.01)
    assert "not measured together: assumed from one" in two["why"][0]
    assert "--nproc 2" in two["why"][0]


def test_cards_that_were_measured_together_are_planned_from_that(called, tmp_path):
    of_two(tmp_path, batch=8, tok_s=1500.0, peak=4.5e9)
    _, out, _ = called(tmp_path, "plan", "--corpus", "100M", "--limit", "5GB", "--device", "card", "--gpus", "2", "--json")
    plan = json.loads(out)
    assert plan["predicted"]["tok_s"]["mid"] == pytest.approx(1500)
    assert plan["step"]["batch"] == 8
    assert not any("assumed" in line for line in plan["why"])


def test_devices_that_nobody_measured_are_refused(called, tmp_path):
    write_records(tmp_path / "results" / "card-x2" / "records.jsonl", [make_record(device="card-x2")])
    code, _, err = called(tmp_path, "plan", "--corpus", "1M", "--device", "card-x2", "--gpus", "4")
    assert code == 2
    assert "no records of card-x4, nor of card; there are card-x2" in err


def test_a_cell_is_measured_by_two_as_two_train_it(command, called, tmp_path):
    """Each does its part of every micro-step; the plan made from it starts without a word about another device."""
    done = command("probe", "grid", "--model", "1M", "--batch", "1", "--length", "32", "--vocab", "500", "--accum", "1",
                   "--seconds", "1", "--nproc", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (cell,) = told["cells"]
    assert told["device"].endswith("-x2")
    assert cell["cell"]["batch"] == 2
    assert cell["status"] == "fits"
    assert cell["tok_s"] == pytest.approx(64 / median(cell["step_s"]))
    assert cell["device_peak_bytes"] > 1e8
    code, _, err = called(tmp_path, "plan", "--corpus", "10k", "--device", told["device"], "--out", "plan.json")
    assert code == 0, err
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.device == told["device"]
    assert World(1, 2).part_of_plan(plan).batch == plan.step.batch / 2

"""A plan is checked field by field before anything runs by it."""

import json

import numpy as np
import pytest
from helpers.made import make_plan

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.data.pairs import Pairs
from trainer.data.tokens import Tokens
from trainer.plan import (
    PairCounts,
    Plan,
    Rejected,
    RunnerUp,
    eval_batches,
    eval_windows,
    is_due,
    times_due,
    training_windows,
    validation_tokens,
)

CELL = {"model": "1M", "batch": 4, "length": 32, "vocab": 500}
PAIRS = {"length": 32, "rows": 2, "pairs": 3, "tokens_real": 60, "tokens_answer": 9, "tokens_padded": 4}
PLAN = make_plan(pairs=PairCounts(**PAIRS), why=["why"], runners_up=[RunnerUp(cell=CELL, tok_s=2.0, saves_bytes=-1.0)],
                 rejected=[Rejected(cell=CELL, why=["spills"])], software={"torch": "2.10.0", "driver": None})
PREDICTED = PLAN.to_json()["predicted"]


def test_a_plan_comes_back_as_it_was_written(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["parameters"] == PLAN.model.parameters


@pytest.mark.parametrize(("name", "value", "words"), [
    ("schema", 2, "newer"), ("schema", "1", "schema"), ("steps", 0, "steps"), ("steps", 1.5, "steps"),
    ("model", None, "model"),
    ("step", {"batch": 1}, "length"), ("optimizer", {"lr": "fast"}, "lr"), ("predicted", PREDICTED | {"tok_s": 3}, "tok_s"),
    ("predicted", 3, "predicted"), ("predicted", PREDICTED | {"tok_s": {"low": 2, "mid": 1, "high": 3}}, "tok_s.*in order"),
    ("predicted", {}, "tok_s, peak_bytes, hours"), ("epochs", 0, "epochs"), ("epochs", float("nan"), "epochs"),
    ("why", "because", "why"),
    ("pairs", PAIRS | {"tokens_padded": 5}, "pairs.*60 real and 5 padded"),
    ("runners_up", [{"cell": {"batch": 0}}], "cell"),
    ("rejected", [{"cell": CELL}], "why"), ("software", {"torch": 2}, "software"), ("device", None, "device"),
    ("eval", -1, "eval"), ("limit_bytes", True, "limit_bytes")])
def test_a_bad_field_is_named(tmp_path, name, value, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json() | {name: value}))
    with pytest.raises(UserError, match=rf"plan\.json.*{words}"):
        Plan.load(path)


def test_a_missing_field_is_named(tmp_path):
    for name in PLAN.to_json().keys() - {"software", "pairs", "rules", "smaller_steps"}:  # which older plans have not
        values = PLAN.to_json()
        del values[name]
        (tmp_path / "plan.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=name):
            Plan.load(tmp_path / "plan.json")


def test_a_file_that_is_none(tmp_path):
    for content, words in ((b"", "not JSON"), (b"[1]", "JSON object"), (b"\x00\xff", "not JSON"),
                           (b"[" * 100_000, "not JSON")):
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(UserError, match=words):
            Plan.load(tmp_path / "plan.json")
    with pytest.raises(UserError, match="no such file"):
        Plan.load(tmp_path / "other.json")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="other"):
        Plan.load(tmp_path / "other")


def test_evaluations_are_at_the_start_by_cadence_and_at_the_end():
    for steps, every, expected in ((25, 10, [0, 10, 20, 25]), (20, 10, [0, 10, 20]), (1, 5, [0, 1])):
        assert [n for n in range(steps + 1) if is_due(n, steps, every)] == expected
        assert times_due(steps, every) == len(expected)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_what_is_held_back_is_the_same_share_whatever_the_batch(batch):
    step = StepConfig(batch, 512, accum=2)
    for tokens, held in ((1000, 513), (50_000, 5000), (100_000, 16 * 512 + 1), (1_000_000, 10_000), (10**9, 32_769)):
        assert validation_tokens(tokens, step) == held
        assert eval_windows(tokens, step) == (held - 1) // 512
        assert eval_batches(tokens, step) == -(-((held - 1) // 512) // batch)


def test_a_plan_of_before_holds_back_what_it_did(tmp_path):
    """By the batch: a run that is under way goes on with the same data."""
    assert validation_tokens(1_000_000, StepConfig(4, 512), 1) == 10_000
    assert validation_tokens(1000, StepConfig(4, 512), 1) == 513
    assert validation_tokens(100_000, StepConfig(4, 512), 1) == 2049  # a whole batch, where a hundredth has less
    assert validation_tokens(10**9, StepConfig(4, 512), 1) == 16 * 4 * 512 + 1
    assert eval_windows(1_000_000, StepConfig(4, 512), 1) == 16  # of 19, four whole batches
    assert eval_windows(1000, StepConfig(4, 512), 1) == 1
    assert PLAN.rules == 2
    values = PLAN.to_json()
    del values["rules"]
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert Plan.load(tmp_path / "plan.json").rules == 1


@pytest.mark.parametrize(("tokens", "length", "windows"), [
    (300, 512, 0), (300, 64, 3), (130, 64, 1), (129, 64, 0), (1, 8, 0)])
def test_how_many_sequences_there_are_to_train_on(token_file, tokens, length, windows):
    """As the trainer finds them in a file of so many."""
    step = StepConfig(1, length)
    assert training_windows(tokens, step) == windows
    if windows:
        training, held = Tokens.open(token_file(range(tokens))).split(step)
        assert training.windows(length) == windows
        assert held.windows(length) == eval_windows(tokens, step)


@pytest.mark.parametrize("rows", [2, 3, 30, 5000])
def test_how_many_pairs_there_are_to_train_on(rows):
    step = StepConfig(1, 16)
    training, held = Pairs(np.zeros((rows, 17), np.int32), 300, "pairs").split(step)
    assert training_windows(rows * 16, step, True) == len(training.rows)
    assert len(held.rows) == eval_windows(rows * 16, step)

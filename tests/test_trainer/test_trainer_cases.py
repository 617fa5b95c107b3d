"""Faults that other trainers had, as their issues tell them, where no other test keeps them out."""

import dataclasses
import shutil

import pytest
from helpers.made import make_plan, make_record
from helpers.runs import STEPS, Clock, log, open_run, receipt, run_options
from tokenizers import Tokenizer, models, pre_tokenizers

from spillcliff.errors import UserError
from trainer import checkpoint
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.dataset import open_data
from trainer.data.tokens import Tokens
from trainer.run import loop
from trainer.run.log import Throughput, live_line
from trainer.run.loop import Run
from trainer.run.receipt import pauses_left_s
from trainer.run.step import TrainStep
from trainer.run.timing import StepTimes
from trainer.run.validation import ValidationLosses
from trainer.run_folder import RunFolder
from trainer.tokenize.corpus import CorpusOptions, tokenize
from trainer.tokenize.tokenizer import END_OF_TEXT

PLAN = make_plan("cpu-x")


def steps(seconds: float, count: int) -> list[StepTimes]:
    return [StepTimes(loss=2.0, norm=1.0, step_s=seconds, micro_s=seconds, optimizer_s=0.0, data_s=0.0, log_s=0.0)] * count


def test_data_for_one_window_alone_is_refused_with_both_numbers(token_file):
    """nanoGPT 292: no longer than a block, data crash. Here a window to train on and one to validate on are needed."""
    plan = dataclasses.replace(PLAN, step=StepConfig(2, 10))
    with pytest.raises(UserError, match=r"has 21 tokens; .* take 22"):
        open_data(plan, [token_file(range(21))])
    train, held = open_data(plan, [token_file(range(22))])
    assert train.windows(10) == held.windows(10) == 1


def test_ids_above_65535_are_kept_from_text_to_batch(tmp_path):
    """transformers 2825, llm.c 701: they wrap silently in uint16."""
    words = [*(f"w{i}" for i in range(70_000)), END_OF_TEXT]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("w65535 w65536 w69999 w1")
    tokenize(CorpusOptions([tmp_path / "text.txt"], tmp_path / "text.bin", vocab=70_001, tokenizer=tmp_path / "words.json"))
    tokens = Tokens.open(tmp_path / "text.bin")
    tokens.check(70_001)
    assert tokens.batch(0, 0, StepConfig(1, 4)).tolist() == [[[65_535, 65_536, 69_999, 1, 70_000]]]
    with pytest.raises(UserError, match="70000 at position 4"):
        tokens.check(70_000)


def test_evaluations_that_take_forever_are_in_no_step_s_time(tmp_path, monkeypatch):
    """nanoGPT 215: evaluation drags tok/s down. Each takes 1000 s here, by a clock that is put forward."""
    Clock(monkeypatch).slows(monkeypatch, TrainStep, "evaluate", 1000.0)
    run = open_run(tmp_path, 12, 3)
    receipt = run.train()
    assert receipt["eval_s"] >= 5 * 1000
    assert max(line["step_s"] for line in log(run.folder.path, "step")) < 1000
    assert receipt["actual"]["tok_s"] > run.plan.step.tokens / 1000


def test_after_a_resume_rate_and_time_left_are_those_of_the_steps_since():
    """unsloth pull 11297, transformers 40560: absurd, since the steps before and the first slow ones were counted."""
    plan, throughput = dataclasses.replace(PLAN, steps=10_000), Throughput(PLAN.step.tokens)
    assert throughput.tok_s is None
    for times in (*steps(100.0, Throughput.WARMUP_STEPS), *steps(0.5, 30)):
        throughput.add(times)
    assert throughput.tok_s == throughput.recent_tok_s == PLAN.step.tokens / 0.5
    assert "128 tok/s  50 s left" in live_line(plan, 9_900, 2.0, throughput, None)


@pytest.mark.parametrize(("change", "words"), [
    ({"steps": 33}, "steps 32 -> 33"), ({"optimizer": OptimizerConfig(2e-3)}, "optimizer .*0.001.* -> .*0.002"),
    ({"step": StepConfig(4, 32)}, "step .*'batch': 2.* -> .*'batch': 4"), ({"epochs": 2}, "epochs 1 -> 2"),
    ({"corpus_tokens": 2000}, "corpus_tokens 1000 -> 2000")])
def test_a_resume_by_another_plan_names_what_changed(tmp_path, change, words):
    """open_clip 413: a changed number of steps shifts the learning rate."""
    folder = RunFolder(tmp_path)
    folder.start(PLAN)
    folder.check_resume(dataclasses.replace(PLAN, eval=5, at="later"))
    with pytest.raises(UserError, match=f"another plan .*{words}"):
        folder.check_resume(dataclasses.replace(PLAN, **change))


def test_tokens_are_divided_by_seconds_that_passed():
    """litgpt pull 1805: 999,424 tokens in 48.3 s were told as 60.93 tok/s, divided by a time of day."""
    plan = dataclasses.replace(PLAN, step=StepConfig(8, 2048))
    throughput, step_s = Throughput(plan.step.tokens), 48.3 / 61
    for times in steps(step_s, 61):
        throughput.add(times)
    assert plan.step.tokens * 61 == 999_424
    assert throughput.tok_s == pytest.approx(20_692, abs=0.5)
    assert "20,692 tok/s" in live_line(plan, 30, 2.0, throughput, None)
    assert round(make_record(8, 2048, step_s=(step_s,) * 61).tok_s) == 20_692


@pytest.mark.parametrize(("done", "evaluations", "saves", "left_s"), [
    (1, 1, 0, 9 * 2.0), (10, 1, 0, 9 * 2.0), (11, 2, 0, 8 * 2.0), (12, 2, 0, 8 * 2.0), (13, 2, 1, 8 * 2.0 + 7 * 3.0),
    (61, 7, 5, 3 * 2.0 + 3 * 3.0), (84, 9, 6, 1 * 2.0 + 2 * 3.0), (85, 9, 7, 1 * 2.0 + 1 * 3.0)])
def test_the_time_left_counts_what_is_still_to_come_beside_the_steps(done, evaluations, saves, left_s):
    """An evaluation with its texts takes 2 s, a checkpoint 3 s; of 85 steps there are ten at 0, 10, ... 80 and 85, and eight
    at 12, 24, ... 84 and 85."""
    plan = dataclasses.replace(PLAN, steps=85, eval=10, checkpoint=12)
    spent = {"eval_s": 1.5 * evaluations, "sample_s": 0.5 * evaluations, "checkpoint_s": 3.0 * saves}
    assert pauses_left_s(plan, done, spent) == pytest.approx(left_s)


def test_the_time_left_is_what_the_run_takes(tmp_path, monkeypatch):
    """By a clock that is put forward: each of nine evaluations takes 100 s and each checkpoint 50, and steps next to
    nothing."""
    clock = Clock(monkeypatch)
    clock.slows(monkeypatch, Run, "_eval_losses", 100.0)
    clock.slows(monkeypatch, checkpoint, "_write", 50.0)
    seen: list[float] = []

    def noted(*arguments) -> str:
        seen.append(arguments[5])
        return ""

    monkeypatch.setattr(loop, "live_line", noted)
    run = open_run(tmp_path, 30, 4)
    run.train()
    assert len(seen) == 30
    assert seen[0] == pytest.approx(8 * 100, rel=0.05)  # no checkpoint yet
    assert seen[8] == pytest.approx(6 * 100 + 6 * 50, rel=0.05)
    assert seen[29] == pytest.approx(100 + 50, rel=0.05)
    line = live_line(PLAN, 31, 2.0, one_second(), None, seen[8])
    assert "15.0 min left" in line, line


def one_second() -> Throughput:
    throughput = Throughput(PLAN.step.tokens)
    for times in steps(1.0, 10):
        throughput.add(times)
    return throughput


def test_a_receipt_s_start_up_is_the_ledger_s(tmp_path):
    receipt = open_run(tmp_path).train()
    assert receipt["start_up_s"] == receipt["ledger"]["start_up_s"] > receipt["libraries_s"] > 0


def test_a_rising_validation_loss_is_told_live_and_in_the_receipt(home, called):
    """Of random tokens, which can be learned by heart alone: from the first evaluation on; over a resume too."""
    code, out, err = called(home, "train", *run_options("rising"))
    assert code == 0, err
    losses = {line["step"]: line["val_loss"] for line in log(home / "rising", "eval")}
    best = min(losses, key=losses.__getitem__)
    assert best < STEPS
    told = receipt(home / "rising")
    assert (told["best_val_step"], told["best_val_loss"]) == (best, losses[best])
    assert out.count(f"risen from its best {losses[best]:.4f} at step {best}") == sum(s > best for s in losses) + 1
    folder = RunFolder(home / "rising")
    folder.receipt.unlink()
    shutil.rmtree(folder.checkpoint(STEPS))
    code, out, err = called(home, "train", *run_options("rising", "--resume"))
    assert code == 0, err
    assert receipt(folder.path)["best_val_step"] == best
    assert f"best {losses[best]:.4f} at step {best}" in out


def test_a_validation_loss_that_falls_is_told_without_more():
    losses = ValidationLosses()
    assert [losses.note(step, loss) for step, loss in ((0, 3.0), (10, 2.0), (20, 2.0), (30, 1.0))] == [""] * 4
    assert losses.note(40, 1.5) == ", risen from its best 1.0000 at step 30"
    assert ValidationLosses.of(losses.to_json()) == losses == ValidationLosses(3.0, 1.0, 30)
    assert ValidationLosses.of({"first_val_loss": 3.0}) == ValidationLosses(3.0)


@pytest.mark.parametrize("engine_batch", [1, 3, 8, 32])
def test_a_validation_loss_is_of_the_same_windows_whatever_the_batch(tmp_path, engine_batch):
    run = open_run(tmp_path, shape=StepConfig(engine_batch, 16), name=f"of-{engine_batch}")
    one = open_run(tmp_path, shape=StepConfig(1, 16), name="of-1-too")
    assert {piece.shape[0] for piece, _ in run.eval_pieces} == {engine_batch}
    assert run.eval_weight == one.eval_weight == 12
    losses = [sum(each._eval_losses(0)) / each.eval_weight for each in (run, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)

"""Faults that other trainers had, as their issues tell them, where no other test keeps them out."""

import dataclasses

import pytest
from helpers.made import make_plan, make_record
from helpers.runs import Clock, log, open_run
from tokenizers import Tokenizer, models, pre_tokenizers

from spillcliff.errors import UserError
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.dataset import open_data
from trainer.data.tokens import Tokens
from trainer.run.log import Throughput, live_line
from trainer.run.step import TrainStep
from trainer.run.timing import StepTimes
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

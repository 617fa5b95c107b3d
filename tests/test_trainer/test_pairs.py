"""Fine-tuning on prompts and answers: the loss is on the answers alone, whatever the rows, the padding, the accumulation."""

import dataclasses
import gzip
import json
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.made import make_plan, make_record, there, tiny, write_records
from helpers.runs import before_step, end_state, log, receipt, run_options, train, train_distributed, train_with

from spillcliff.errors import UserError
from trainer.config import OptimizerConfig, StepConfig
from trainer.data.dataset import changes, identity, open_data
from trainer.data.pairs import Pairs
from trainer.model.decoder import rope_angles
from trainer.plan import Plan
from trainer.ranks import World
from trainer.run.step import TrainStep
from trainer.tokenize import chat, pairs, tokenizer
from trainer.tokenize.pairs import cut, pack, tokenize_pairs

CPU = torch.device("cpu")
WORDS = ["red", "blue", "green", "one", "two", "three", "four", "cat", "dog", "bird"]
LENGTH = 48
STEPS = 48


def lines(count: int):
    """Pairs of many lengths, each of which says what its answer is."""
    return [{"prompt": f"say {WORDS[i % 10]} {WORDS[i // 10 % 10]}" + " please" * (i % 4),
             "answer": f"{WORDS[i % 10]} {WORDS[i // 10 % 10]} {i}"} for i in range(count)]


def jsonl(path, values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """The path of a small tokenizer.json."""
    folder = tmp_path_factory.mktemp("coder")
    text = jsonl(folder / "text", [*lines(100), {"### User:": "### Assistant:"}])
    tokenizer.train([text.read_text()], 300).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def texts(path, coder) -> list[tuple[str, str]]:
    """Of each row of a file of pairs: all of its text, and what the loss is on."""
    pairs, decode = Pairs.open(path), tokenizer.load(coder).decode
    return [(decode([i if i >= 0 else ~i for i in row], skip_special_tokens=False),
             decode([i for i in row[1:] if i >= 0], skip_special_tokens=False)) for row in pairs.rows.tolist()]


def masked(accum=3, batch=2, length=16, seed=0):
    """Tokens of which the first are a prompt and the last padding, as many as each row likes."""
    r = np.random.default_rng(seed)
    ids = r.integers(0, 300, (accum, batch, length + 1), dtype=np.int32)
    for row in ids.reshape(-1, length + 1):
        prompt, end = r.integers(1, length - 2), r.integers(length - 2, length + 1)
        row[:prompt], row[end:] = ~row[:prompt], ~row[end:]
    return torch.from_numpy(ids)


def plain(tokens):
    """Inputs and targets as torch.nn.functional has them."""
    rows = tokens.flatten(0, -2).long()
    inputs = torch.where(rows < 0, ~rows, rows)[:, :-1]
    return inputs, torch.where(rows < 0, -100, rows)[:, 1:]


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_loss_and_gradients_are_those_of_cross_entropy_over_all_answers_of_a_step(accum, recompute):
    """In float64, micro-steps having unequal numbers of answers: no mean of means."""
    t = masked(accum)
    counts = (t[..., 1:] >= 0).sum((1, 2))
    assert accum == 1 or len(set(counts.tolist())) > 1
    shape = StepConfig(2, 16, accum, recompute=recompute)
    train = TrainStep(tiny(), shape, OptimizerConfig(1e-3, clip=None), CPU, masked=True)
    model = train.model.double()
    model.angles = rope_angles(16, 8, 10_000.0, CPU)
    inputs, targets = plain(t)
    logits = model.logits(model(F.embedding(inputs, model.embedding), plain=True))
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    gradients, expected = torch.autograd.grad(mean, list(model.parameters())), mean.item()
    evaluated = sum(float(train.evaluate(micro)) * n for micro, n in zip(t, counts, strict=True)) / counts.sum()
    loss, _ = train(t, 0.0)
    assert float(loss) == pytest.approx(expected, rel=1e-6) == float(evaluated)  # added up in fp32
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(train.named_state()[f"exp_avg.{name}"] / (1 - 0.9), gradient, rtol=1e-9, atol=1e-12)


def weights_after(batches, is_masked=True, accum=1):
    train = TrainStep(tiny(), StepConfig(2, 16, accum), OptimizerConfig(1e-2), CPU, masked=is_masked)
    losses = [float(train(t, 1e-2)[0]) for t in batches]
    return losses, [p.detach() for p in train.model.parameters()]


def test_what_the_padding_is_changes_no_bit():
    batches = [masked(2, seed=i) for i in range(4)]
    others = [t.clone() for t in batches]
    for t in others:
        for row in t.view(-1, t.shape[-1]):
            padding = slice(int((row >= 0).nonzero()[-1]) + 1, None)
            row[padding] = ~torch.randint(300, row[padding].shape, dtype=torch.int32)
    assert not all(map(torch.equal, batches, others))
    (a, first), (b, second) = weights_after(batches, accum=2), weights_after(others, accum=2)
    assert a == b
    assert all(map(torch.equal, first, second))


def test_without_anything_masked_a_masked_step_is_a_plain_one_bit_for_bit():
    batches = [masked(1, seed=i) for i in range(4)]
    batches = [torch.where(t < 0, ~t, t) for t in batches]
    (a, first), (b, second) = weights_after(batches), weights_after(batches, False)
    assert a == b
    assert all(map(torch.equal, first, second))


def test_a_step_without_any_answer_has_loss_zero_and_no_gradient():
    train = TrainStep(tiny(), StepConfig(2, 16), OptimizerConfig(1e-2), CPU, masked=True)
    t = masked(1)
    loss, norm = train(torch.where(t < 0, t, ~t), 1e-2)
    assert float(loss) == float(there(norm)) == 0


def test_smaller_batches_keep_the_mean_of_the_step():
    whole, parts = (TrainStep(tiny(), StepConfig(4, 16), OptimizerConfig(1e-2), CPU, masked=True) for _ in range(2))
    parts.use_batch(there(parts.smaller_batch()))
    t = masked(1, 4)
    (a, norm), (b, other) = whole(t, 1e-2), parts(t.view(2, 2, -1), 1e-2)
    assert float(a) == pytest.approx(float(b), rel=1e-6)
    assert float(there(norm)) == pytest.approx(float(there(other)), rel=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_pair_is_seen_exactly_once_an_epoch_in_an_order_of_its_own(tmp_path, coder, is_packed):
    values = lines(90)
    tokenize_pairs([jsonl(tmp_path / "p", values)], tmp_path / "p.bin", 100, coder, is_packed)
    pairs, shape = Pairs.open(tmp_path / "p.bin"), StepConfig(2, 100, 3)
    count = len(pairs.rows)
    assert count == 90 if not is_packed else count <= 60
    every = np.concatenate([pairs.batch(7, step, shape).reshape(-1, 101) for step in range(count)])
    for epoch in range(6):
        dealt = every[epoch * count:(epoch + 1) * count]
        assert sorted(map(bytes, dealt)) == sorted(map(bytes, pairs.rows))
    assert not np.array_equal(every[:count], every[count:2 * count])
    answers = "".join(learned for _, learned in texts(tmp_path / "p.bin", coder))
    assert sorted(answers.split("<|endoftext|>")) == sorted(["", *(v["answer"] for v in values)])


def test_packing_fills_rows_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(5, 120, 2000)
    rows = pack(lengths, 129)
    assert sorted(pair for row in rows for pair in row) == list(range(2000))
    assert max(sum(lengths[row]) for row in rows) <= 129
    assert len(rows) < 1.02 * lengths.sum() / 129


def test_a_cut_takes_the_prompts_beginning_and_never_of_the_answer():
    ids = np.array([~1, ~2, ~3, 4, 5], np.int32)
    assert cut(ids, 5) is ids
    assert np.array_equal(there(cut(ids, 3)), [~3, 4, 5])
    assert cut(ids, 2) is None
    chat = np.array([~1, 2, 3, ~4, 5], np.int32)  # of the first answer, half is left: it is read, not learned
    assert np.array_equal(there(cut(chat, 3)), [~3, ~4, 5])


PAIR = ("### User:\nsay red\n\n### Assistant:\nred<|endoftext|>", "red<|endoftext|>")
CHAT = ("### System:\nbe kind\n\n### User:\nsay red\n\n### Assistant:\nred<|endoftext|>### User:\nand blue\n\n"
        "### Assistant:\nblue<|endoftext|>", "red<|endoftext|>blue<|endoftext|>")
SAID = [("system", "be kind"), ("user", "say red"), ("assistant", "red"), ("user", "and blue"), ("assistant", "blue")]
GPT = {"user": "human", "assistant": "gpt", "system": "system"}


@pytest.mark.parametrize(("line", "expected"), [
    ({"prompt": "say red", "answer": "red"}, PAIR), ({"prompt": "say red", "completion": "red", "id": 3}, PAIR),
    ({"question": "say red", "answer": "red"}, PAIR), ({"instruction": "say red", "input": "", "output": "red"}, PAIR),
    ({"instruction": "say red", "output": "red"}, PAIR),
    ({"instruction": "say", "input": "red", "output": "red"}, (PAIR[0].replace("say red", "say\n\nred"), PAIR[1])),
    ({"messages": [{"role": r, "content": t} for r, t in SAID]}, CHAT),
    ({"conversations": [{"from": GPT[r], "value": t} for r, t in SAID]}, CHAT)])
def test_every_form_is_known_by_its_fields_and_only_answers_are_learned(tmp_path, coder, line, expected):
    facts = tokenize_pairs([jsonl(tmp_path / "p", [line, line])], tmp_path / "p.bin", 200, coder)
    (text, learned), (other, _) = texts(tmp_path / "p.bin", coder)
    assert text == other
    assert text.startswith(expected[0])
    padding = 200 - facts["tokens_real"] // 2
    assert (Pairs.open(tmp_path / "p.bin").rows[:, -padding:] == ~np.arange(201 - padding, 201)).all()
    assert learned == expected[1]
    assert (facts["rows"], facts["tokens_padded"] + facts["tokens_real"]) == (2, 400)
    assert facts["tokens_answer"] == Pairs.open(tmp_path / "p.bin").answers


def test_a_tokenizer_with_marks_of_turns_gets_them_and_text_cannot_forge_them(tmp_path, coder):
    made = tokenizer.load(coder)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(tmp_path / "t.json"))
    tokenize_pairs([jsonl(tmp_path / "p", [{"prompt": "a<|im_end|>", "answer": "b<|im_end|>"}])], tmp_path / "p.bin", 200,
                   tmp_path / "t.json")
    ((text, learned),) = texts(tmp_path / "p.bin", tmp_path / "t.json")
    assert learned == "b<|im_end|><|im_end|><|endoftext|>"
    assert text.startswith("<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n" + learned)
    marks = [i for i in Pairs.open(tmp_path / "p.bin").rows[0].tolist() if max(i, ~i) == made.token_to_id("<|im_end|>")]
    assert len(marks) == 2


def test_what_is_cut_and_left_out_is_counted(tmp_path, coder):
    values = [{"prompt": "x" * 90, "answer": "short"}, {"prompt": "a", "answer": "y " * 90}, {"prompt": "a", "answer": " "},
              {"prompt": "a", "answer": "b"}]
    said: list[str] = []
    facts = tokenize_pairs([jsonl(tmp_path / "p", values)], tmp_path / "p.bin", 40, coder, say=said.append)
    assert (facts["rows"], facts["cut"], facts["too_long"], facts["empty"]) == (2, 1, 1, 1)
    assert [learned for _, learned in texts(tmp_path / "p.bin", coder)] == ["short<|endoftext|>", "b<|endoftext|>"]
    assert sum("1 cut" in line or "1 left out" in line for line in said) == 3


GOOD = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(("content", "words"), [
    (b"", "empty"), (b"\n\n", "empty"), (b'{"text": "a"}\n', "line 1 is neither.*text"), (b"[1]\n", "line 1 begins a list"),
    (GOOD + b"{bad}\n\n" + GOOD + b"[]\n", "line 2 is not JSON; 2 damaged lines"), (GOOD + b"\xff\n", "line 2 is not UTF-8"),
    (GOOD + b'{"prompt": "a"}\n', "line 2 has no answer"), (GOOD + b'{"prompt": 3, "answer": "b"}\n', "prompt is not text"),
    (GOOD + b'{"prompt": "\\ud800", "answer": "b"}\n', "line 2 is not UTF-8"),
    (GOOD + b"[" * 100_000 + b"\n", "line 2 is not JSON; 1 damaged line"),
    (b'{"messages": [{"role": "user", "content": "a"}]}\n', "line 1 has no assistant"),
    (b'{"messages": [{"role": "king", "content": "a"}]}\n', "line 1 role is 'king'"), (b'{"messages": "a"}\n', "not a list"),
    (b'{"prompt": "a", "answer": ""}\n', "of 1 answers none")])
def test_damaged_lines_are_named_and_leave_nothing(tmp_path, coder, content, words):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        tokenize_pairs([tmp_path / "p.jsonl"], tmp_path / "out.bin", 64, coder)
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, coder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pairs, "_write_rows", full)
    with pytest.raises(UserError, match="No space left"):
        tokenize_pairs([jsonl(tmp_path / "p", lines(3))], tmp_path / "out.bin", 64, coder)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + GOOD, gzip.compress(GOOD)], ids=["mark", "gzip"])
def test_a_mark_of_bytes_first_and_compression_are_seen_through(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    assert list(chat.read(tmp_path / "p")) == [[chat.Turn("user", "a"), chat.Turn("assistant", "b")]]


@pytest.fixture(scope="module")
def home(tmp_path_factory, coder):
    """A folder with pairs as data.bin, a plan for them, and a run "whole" that nothing disturbed."""
    folder = tmp_path_factory.mktemp("pairs")
    tokenize_pairs([jsonl(folder / "p.jsonl", lines(100))], folder / "data.bin", LENGTH, coder)
    plan = make_plan(model=tiny(), step=StepConfig(2, LENGTH, 2))
    dataclasses.replace(plan, steps=STEPS, checkpoint=3, optimizer=OptimizerConfig(1e-2)).save(folder / "plan.json")
    done = train(folder, "whole")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_lowers_the_loss_of_answers_and_says_their_share(home):
    whole, facts = receipt(home / "whole"), json.loads((home / "data.bin.json").read_text())
    assert whole["val_loss"] < 0.7 * whole["first_val_loss"]
    assert whole["tokens"] == STEPS * 4 * LENGTH  # padding counted, as in the plan
    assert whole["answer_share"] == pytest.approx(facts["tokens_answer"] / (100 * LENGTH), rel=0.05)
    assert log(home / "whole")[0]["answer_share"] == whole["answer_share"]


def test_a_run_takes_no_notice_of_what_the_padding_is(home, tmp_path, called):
    pairs = Pairs.open(home / "data.bin")
    rows = np.array(pairs.rows)
    padding = np.logical_and.accumulate((rows < 0)[:, ::-1], 1)[:, ::-1]  # at the end of each row, after an answer
    assert padding.sum() > 500
    rows[padding] = ~np.int32(7)
    rows.tofile(tmp_path / "data.bin")
    for name in ("data.bin.json", "plan.json"):
        shutil.copy(home / name, tmp_path / name)
    code, _, err = called(tmp_path, "train", *run_options("filled"))
    assert code == 0, err
    assert end_state(tmp_path / "filled") == end_state(home / "whole")
    assert receipt(tmp_path / "filled")["val_loss"] == receipt(home / "whole")["val_loss"]


def test_a_run_starts_from_another_ones_weights(home, called):
    code, _, err = called(home, "train", *run_options("tuned", "--from", "whole"))
    assert code == 0, err
    tuned, before = receipt(home / "tuned"), receipt(home / "whole")
    assert tuned["first_val_loss"] == pytest.approx(before["val_loss"], rel=0.1)
    assert tuned["from"]["path"].endswith("whole")


def test_a_killed_run_goes_on_bit_for_bit(home, called):
    killed = train_with(home, before_step(29, "os.kill(os.getpid(), signal.SIGKILL)"), "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    code, _, err = called(home, "train", *run_options("killed", "--resume"))
    assert code == 0, err
    assert end_state(home / "killed") == end_state(home / "whole")


def test_two_processes_take_the_mean_over_the_answers_of_both(home):
    done = train_distributed(home, 2, "two")
    assert done.returncode == 0, done.stderr
    for kind, name in (("step", "loss"), ("eval", "val_loss")):
        two, whole = ([line[name] for line in log(home / run) if line["kind"] == kind] for run in ("two", "whole"))
        assert two == pytest.approx(whole, abs=1e-4)


def test_shares_make_the_whole_step(home):
    pairs, shape = Pairs.open(home / "data.bin"), StepConfig(2, LENGTH, 2)
    for step in (0, 24, 60):  # the second crosses an epoch's end
        parts = [pairs.batch(1, step, StepConfig(2, LENGTH), World(rank, 2)) for rank in range(2)]
        assert np.array_equal(np.concatenate(parts), pairs.batch(1, step, shape))


def test_another_mask_is_other_data(home):
    rows = np.array(Pairs.open(home / "data.bin").rows)
    rows[0, 3] = ~rows[0, 3]  # a prompt's
    rows.tofile(home / "more.bin")
    shutil.copy(home / "data.bin.json", home / "more.bin.json")
    plan = Plan.load(home / "plan.json")
    before, now = ({"training": identity(open_data(plan, [home / f"{name}.bin"])[0])} for name in ("data", "more"))
    assert not changes(before, before)
    assert "crc32" in changes(before, now)
    assert "answers" in changes(before, now)
    plain = {"training": {"tokens": 1, "vocab": 300, "crc32": 5}}
    assert "answers" in changes(before, plain)
    assert "tokens" in changes(plain, before)


def test_what_does_not_suit_is_refused(home, token_file, tmp_path):
    plan = make_plan(model=tiny(), step=StepConfig(2, LENGTH))
    with pytest.raises(UserError, match=f"rows of {LENGTH} where the plan's length is 32.*--length 32"):
        open_data(dataclasses.replace(plan, step=StepConfig(2, 32)), [home / "data.bin"])
    with pytest.raises(UserError, match="one is of pairs"):
        open_data(plan, [home / "data.bin"], [token_file([1] * 400, 300)])
    with pytest.raises(UserError, match="past the model's vocabulary of 100"):
        open_data(dataclasses.replace(plan, model=tiny(vocab=100)), [home / "data.bin"])
    facts = json.loads((home / "data.bin.json").read_text())
    shutil.copy(home / "data.bin", tmp_path / "p.bin")
    for change, words in (({"rows": 9}, "not 9 rows"), ({"length": None}, "length is None"), ({"schema": 2}, "schema"),
                          ({"rows": 200, "tokens_real": 200 * LENGTH, "tokens_padded": 0}, "200 rows of 49")):
        (tmp_path / "p.bin.json").write_text(json.dumps(facts | change))
        with pytest.raises(UserError, match=words):
            open_data(plan, [tmp_path / "p.bin"])


def test_the_plan_counts_rows_and_tells_padding_apart(home, command, refused, tmp_path):
    write_records(tmp_path / "r.jsonl", [make_record(batch=4, length=LENGTH), make_record(batch=4, length=64)])
    options = ("--corpus", home / "data.bin", "--epochs", 3, "--records", "r.jsonl", "--limit", "5GB", "--out", "p.json")
    done = command("plan", *options, "--json")
    assert done.returncode == 0, done.stderr
    plan, facts = json.loads(done.stdout), json.loads((home / "data.bin.json").read_text())
    assert plan["steps"] == 100 * 3 // 4
    assert plan["step"]["length"] == LENGTH
    assert plan["corpus_tokens"] == 100 * LENGTH
    assert plan["pairs"] == {name: facts[name] for name in plan["pairs"]}
    assert f"{facts['tokens_padded']:,} of padding" in done.stderr
    assert f"--length {LENGTH * 2}" in refused(2, "plan", *options, "--length", LENGTH * 2)


@pytest.mark.parametrize("options", [("--pairs",), ("--pairs", "--length", 48), ("--packed",), ("--length", 48),
                                     ("--pairs", "--length", 48, "--tokenizer", "t.json", "--vocab", 300)])
def test_options_that_do_not_go_together_are_refused(refused, options):
    refused(2, "train", "tokenize", "p.jsonl", "--out", "p.bin", *options)


def test_the_command_says_what_it_made_and_of_what(home, command, coder):
    done = command("train", "tokenize", home / "p.jsonl", "--pairs", "--packed", "--length", LENGTH, "--tokenizer", coder,
                   "--out", "p.bin", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["packed"]
    assert facts["pairs"] == 100
    assert "100 pairs in" in done.stderr
    assert "### User:" in done.stderr

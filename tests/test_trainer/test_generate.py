"""Decoding: kept keys and values change nothing, nor do rows for each other, and sampling changes nothing of a run."""

import dataclasses
import json
import random
import re
from types import SimpleNamespace

import click
import psutil
import pytest
import torch
from helpers.made import tiny
from helpers.runs import end_state, log, receipt, run_options

from spillcliff.errors import UserError
from spillcliff.files import ignore
from trainer.data.tokens import write_sidecar
from trainer.model.decoder import Decoder
from trainer.model.generate import Sampling, generate, sample_tokens
from trainer.run import sample
from trainer.run.log import RunLog
from trainer.run.sample import Sampler, StreamDecoder, TextModel, printable, write_texts
from trainer.run_folder import RunFolder
from trainer.tokenize import tokenizer

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [1], [9] * 11, [40, 3, 250, 17, 2]]
GREEDY = Sampling(temperature=0)


def sharp(length=64, **changes) -> Decoder:
    """A model whose likeliest token is clear, so that rounding decides nothing."""
    model = Decoder(tiny(**changes), length, CPU, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    path = tmp_path_factory.mktemp("coder") / "text.txt"
    path.write_text("the quick brown fox — größer, ♥ 漢字 🙂 jumps over the lazy dog\n" * 30, encoding="utf-8")
    return tokenizer.train([path.read_text()], 300)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4}, {"kv_heads": 1, "layers": 3}])
def test_greedy_with_kept_keys_is_greedy_without(changes):
    """Token for token, past what it was made for too, and each row of a batch as alone."""
    model = sharp(**changes)
    texts = generate(model, PROMPTS, 40, GREEDY)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert generate(model, [prompt], 40, GREEDY) == [text]
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(40):
                ids.append(int(model.logits(model(model.embed(torch.tensor([ids]))))[0, -1].argmax()))
        assert ids[len(prompt):] == text


def test_each_row_draws_as_it_would_alone_and_others_draw_others():
    model = sharp()
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=2**63 - 3)  # the seed goes past its end
    texts = generate(model, PROMPTS, 30, sampling)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        alone = dataclasses.replace(sampling, seed=(sampling.seed + row) % 2**63)
        assert generate(model, [prompt], 30, alone) == [text]
    same = generate(model, [PROMPTS[0]] * 4, 30, sampling)
    assert len({tuple(row) for row in same}) == 4

def test_a_row_ends_before_an_end_and_the_others_go_on():
    model = sharp()
    whole = generate(model, PROMPTS, 20, GREEDY)
    end, told = whole[0][4], []
    texts = generate(model, PROMPTS, 20, GREEDY, frozenset({end}), lambda row, token: told.append((row, token)))
    assert texts == [text[:text.index(end)] if end in text else text for text in whole]
    assert len(texts[0]) <= 4
    assert all([t for r, t in told if r == row] == tokens for row, tokens in enumerate(texts))


def test_draws_keep_to_their_shares():
    """Of four tokens with shares .4, .3, .2, .1: as often as that, and only from the top k or the top p."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(4000, 4)
    chance = torch.rand(4000, generator=torch.Generator().manual_seed(1))

    def shares(**how):
        tokens = sample_tokens(logits, Sampling(**{"temperature": 1.0, **how}), chance)
        return (torch.bincount(tokens, minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert shares(top_p=0.8) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.03)  # .4 + .3 is not .8 yet
    assert shares(temperature=0.5) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=0.03)
    for certain in ({"top_k": 1}, {"top_p": 0.0}, {"temperature": 0}, {"temperature": 1e-6}):
        assert shares(**certain) == [0, 1, 0, 0]
    last = sample_tokens(logits, Sampling(temperature=1.0), torch.full((4000,), 1 - 2**-24))
    assert last.unique().tolist() == [0]  # and none past it


def test_pieces_are_whole_characters_and_add_up(coder):
    """For texts, for bytes at random, and over more tokens than are looked back at."""
    r = random.Random(3)
    text = coder.encode("größer ♥ 漢字🙂 " * 8).ids
    for ids in (text, [r.randrange(1, 300) for _ in range(400)]):
        decoder = StreamDecoder(coder, [7])
        pieces = [decoder.add(token) for token in ids]
        whole = coder.decode([7, *ids])
        assert "".join(pieces) + decoder.end() == whole[len(coder.decode([7])):]
        if ids is text:
            assert "\ufffd" not in "".join(pieces)
            assert sum(map(bool, pieces)) > 20
    assert printable("a\x1b[31m\tb\r\n\x07é") == "a\ufffd[31m\tb\ufffd\n\ufffdé"


def test_a_text_past_the_trained_length_is_written_and_told(coder):
    said: list[str] = []
    model = TextModel(model=sharp(), tokenizer=coder, ends=frozenset(), length=16)
    (text,) = write_texts(model, ["the quick"], 40, GREEDY, say=said.append)
    assert text.startswith("the quick")
    assert len(said) == 1
    assert "trained on 16" in said[0]


def test_a_text_after_an_evaluation_is_shown_as_it_is(coder, tmp_path, monkeypatch):
    """Lines as lines, behind each other, and nothing that would steer a terminal."""
    monkeypatch.setattr(sample, "write_texts", lambda *arguments: ["the \"end\"\n  größer\x1b[31m", "漢"])
    coder.save(str(tmp_path / "t.json"))
    said: list[str] = []
    run_log = RunLog(RunFolder(tmp_path), ignore)
    Sampler(["the", "漢"], str(tmp_path / "t.json"), tiny()).show(sharp(), 7, run_log, said.append)
    run_log.close()
    assert said == ["sample: the \"end\"\n    größer\ufffd[31m", "sample: 漢"]


def test_a_prompt_that_is_no_text_is_refused_by_name(home, coder, called):
    """Bytes that are no UTF-8, as Python takes them from a command line."""
    bad = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")
    coder.save(str(home / "whole/tokenizer.json"))
    words = "the prompt 'caf? ?' is not UTF-8 text: its character 4 is a byte"
    code, out, err = called(home, "train", "sample", "--run", "whole", "--prompt", bad, "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {words}")
    assert err.count("\n") == 1
    with pytest.raises(UserError, match=re.escape(words)):  # as `train --sample` refuses it
        Sampler([bad], str(home / "whole/tokenizer.json"), tiny())


@pytest.mark.parametrize(("tokens", "words"), [
    ("1000000000000", "--tokens"), ("0", "--tokens"), ("999999", "ask for fewer")])
def test_more_tokens_than_memory_has_room_for_are_refused_before_the_text_begins(home, coder, called, monkeypatch, tokens,
                                                                                  words):
    coder.save(str(home / "whole/tokenizer.json"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**8))
    code, out, err = called(home, "train", "sample", "--run", "whole", "--prompt", "the", "--tokens", tokens, "--device",
                            "cpu")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert words in err


def test_notes_and_failures_are_not_on_the_prompt_s_line(home, coder, called, monkeypatch):
    coder.save(str(home / "whole/tokenizer.json"))
    ask = ("train", "sample", "--run", "whole", "--prompt", "the quick", "--device", "cpu", "--tokens")
    told: list[str] = []

    def echo(line, err) -> None:
        told.append(line)
        print(f"<{line}>")

    monkeypatch.setattr(click, "echo", echo)
    code, out, _ = called(home, *ask, "40")
    assert code == 0
    assert any("trained on 16" in line for line in told)
    assert next(line for line in out.splitlines() if "the quick" in line).startswith("the quick")
    monkeypatch.setattr(sample, "generate", lambda *a: (_ for _ in ()).throw(MemoryError()))
    code, out, err = called(home, *ask, "3")
    assert code == 2
    assert out.endswith("the quick\n")
    assert err.startswith("error: out of memory at 1 texts")


def test_the_best_checkpoint_writes_unless_another_is_asked_for(home, coder, called):
    """The shared run's validation rises: its best is of the first evaluations."""
    coder.save(str(home / "whole/tokenizer.json"))
    steps, told = RunFolder(home / "whole").checkpoint_steps(), {}
    assert receipt(home / "whole")["best_val_step"] == 0
    for which in (None, "best", "newest", str(steps[0]), f"step-{steps[1]}"):
        more = () if which is None else ("--checkpoint", which)
        code, out, err = called(home, "train", "sample", "--run", "whole", "--prompt", "the", "--device", "cpu", *more)
        assert code == 0, err
        told[which] = (out, err)
    assert told[None] == told["best"] != told["newest"]
    assert told[str(steps[0])][0] == told["best"][0]
    assert f"the checkpoint of step {steps[0]} is taken (best); the newest is of step {steps[-1]}" in told["best"][1]
    assert "checkpoint" not in told["newest"][1]
    for which, words in (("last", "best, newest or step-N"), ("7", "no checkpoint of step 7")):
        code, _, err = called(home, "train", "sample", "--run", "whole", "--prompt", "the", "--checkpoint", which)
        assert code == 2
        assert words in err


def test_sampling_touches_no_generator_and_no_weight(coder, tmp_path):
    coder.save(str(tmp_path / "t.json"))
    model, folder = sharp(), RunFolder(tmp_path)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    run_log = RunLog(folder, ignore)
    Sampler(["the", ""], str(tmp_path / "t.json"), model.config).show(model, 7, run_log, ignore)
    run_log.close()
    assert torch.get_rng_state().equal(state)
    assert all(map(torch.equal, model.parameters(), before))
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert [(x["kind"], x["step"], x["prompt"]) for x in lines] == [("sample", 7, "the"), ("sample", 7, "")]
    assert all(x["text"] and x["seconds"] > 0 for x in lines)


def test_a_run_with_samples_and_event_files_is_the_same_run(home, coder, called):
    """Bit for bit; the samples' time has its own place in the ledger, and without a tokenizer it is refused at the start."""
    code, _, err = called(home, "train", *run_options("none", "--sample", "the"))
    assert code == 2
    assert "--sample needs the tokenizer" in err
    assert err.count("\n") == 1
    coder.save(str(home / "tokenizer.json"))
    write_sidecar(home / "data.bin", json.loads((home / "data.bin.json").read_text())["count"], 300, "tokenizer.json")
    code, out, err = called(home, "train", *run_options("shown", "--sample", "the quick", "--sample", "漢", "--tensorboard"))
    assert code == 0, err
    assert end_state(home / "shown") == end_state(home / "whole")
    samples, evals = (log(home / "shown", kind) for kind in ("sample", "eval"))
    assert [s["step"] for s in samples] == [e["step"] for e in evals for _ in range(2)]
    assert samples[0]["prompt"] == "the quick"
    assert "sample: the quick" in out
    assert "sample: 漢" in out
    assert samples[0]["text"]
    spent = receipt(home / "shown")["ledger"]
    told = sum({s["step"]: s["seconds"] for s in samples}.values())
    assert told <= spent["sample_s"]
    assert receipt(home / "whole")["ledger"]["sample_s"] == 0
    assert list((home / "shown" / "tensorboard").glob("events*"))

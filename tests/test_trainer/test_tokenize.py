"""`train tokenize`: every kind of text, documents apart, bounded memory, and the same file however often it is killed."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.made import MODULES, ROOT
from helpers.waiting import PATIENCE_S

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore
from trainer.data.tokens import Tokens, sidecar
from trainer.tokenize import texts
from trainer.tokenize.corpus import CorpusOptions, tokenize
from trainer.tokenize.texts import cut
from trainer.tokenize.tokenizer import END_OF_TEXT, end_of_text, load, train, vocab_of

WORDS = ["the", "of", "naïve", "café", "☕", "def", "return", "lambda\r\n", "x", "=", "7", "##", "", "一二三", "\t"]


def document(seed: int, words: int = 200) -> str:
    r = random.Random(seed)
    return f"{seed}: " + " ".join(r.choice(WORDS) + "\n" * (r.random() < 0.1) for _ in range(words))


DOCUMENTS = [document(i) for i in range(60)]


def tokenized(named: list[Path], out: Path, vocab: int = 400, say: Say = ignore, **options) -> dict:
    return tokenize(CorpusOptions(named, out, vocab, **options), say)


def jsonl(path, documents=DOCUMENTS, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)), encoding="utf-8")
    return path


def read(path) -> list[str]:
    """The documents in a token file."""
    tokens = Tokens.open(path)
    assert tokens.tokenizer is not None
    text = load(tokens.tokenizer).decode(np.asarray(tokens.ids).tolist(), skip_special_tokens=False)
    assert text.endswith(END_OF_TEXT)
    return text.split(END_OF_TEXT)[:-1]


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2  # two frames, as pzstd and `cat a.zst b.zst` make them
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


KINDS = {
    "JSONL": lambda p: jsonl(p),
    "JSONL of content": lambda p: jsonl(p, field="content"),
    "JSONL, gzip": lambda p: p.write_bytes(gzip.compress(jsonl(p).read_bytes())),
    "JSONL, zstd": lambda p: p.write_bytes(zstd(jsonl(p).read_bytes())),
    "plain, between lines": lambda p: p.write_text(f"\n{END_OF_TEXT}\n".join(DOCUMENTS), newline="", encoding="utf-8"),
    "plain, between lines, BOM": lambda p: p.write_text(f"\n{END_OF_TEXT}\r\n".join(DOCUMENTS), newline="",
                                                        encoding="utf-8-sig"),
    "plain, two gzip members": lambda p: p.write_bytes(b"".join(gzip.compress(t.encode()) for t in (
        f"\n{END_OF_TEXT}\n".join(DOCUMENTS[:9]) + f"\n{END_OF_TEXT}\n", f"\n{END_OF_TEXT}\n".join(DOCUMENTS[9:])))),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_of_text_gives_its_documents(tmp_path, make):
    """By content, whatever the name; lines that end a document take nothing but themselves."""
    make(tmp_path / "corpus.dat")
    facts = tokenized([tmp_path / "corpus.dat"], tmp_path / "out.bin")
    assert [d.rstrip("\n") for d in read(tmp_path / "out.bin")] == [d.rstrip("\n") for d in DOCUMENTS]
    assert facts["documents"] == 60
    assert facts["bytes"] == pytest.approx(sum(len(d.encode()) for d in DOCUMENTS), abs=60)


def test_a_folder_is_its_files_in_natural_order(tmp_path):
    for i in range(12):
        (tmp_path / "in" / f"{i % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"{i % 2}" / f"part-{i}.txt").write_text(DOCUMENTS[i], newline="", encoding="utf-8")
    (tmp_path / "in" / ".hidden").write_bytes(b"\xff")
    tokenized([tmp_path / "in" / ".." / "in"], tmp_path / "in" / "out.bin")
    assert read(tmp_path / "in" / "out.bin") == [DOCUMENTS[i] for i in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)]
    tokenized([tmp_path / "in" / ".." / "in" / "1" / "*-?.txt"], tmp_path / "in" / "out2.bin")
    assert read(tmp_path / "in" / "out2.bin") == [DOCUMENTS[i] for i in (1, 3, 5, 7, 9)]


def test_cuts_are_where_they_change_no_id():
    """The ids of the pieces are those of the text as a whole, with code, indents, empty lines and a line without an end."""
    text = "".join(f"def f{i}(x):\n\n    if x:\n\t\treturn  {i} \r\n\n \n" for i in range(2000)) + "word " * 60_000
    reader = iter([text[i:i + 5000] for i in range(0, len(text), 5000)])
    parts = list(cut(lambda n: next(reader, "")))
    assert "".join(parts) == text
    assert len(parts) > 10
    assert max(map(len, parts)) <= texts.LONGEST + 5000
    coder = train([text[:200_000]], 400)
    assert [i for part in parts for i in coder.encode(part).ids] == coder.encode(text).ids


def test_validation_is_split_by_document_and_none_is_in_both(tmp_path):
    """One that is there twice is on one side; the order and the number of files change nothing."""
    jsonl(tmp_path / "a", DOCUMENTS + DOCUMENTS[::-1])
    facts = tokenized([tmp_path / "a"], tmp_path / "out.bin", val_share=0.2)
    train_, val = read(tmp_path / "out.bin"), read(tmp_path / "out.val.bin")
    assert not set(train_) & set(val)
    assert sorted(train_ + val) == sorted(DOCUMENTS * 2)
    assert 4 <= len(val) <= 50
    assert facts["val_documents"] == len(val)
    assert Tokens.open(facts["val"]).vocab == facts["vocab"]
    jsonl(tmp_path / "b", DOCUMENTS[:30])
    jsonl(tmp_path / "c", DOCUMENTS[30:])
    tokenized([tmp_path / "c", tmp_path / "b"], tmp_path / "other.bin", val_share=0.2)
    assert set(read(tmp_path / "other.val.bin")) == set(val)


def test_texts_to_validate_on_go_through_the_same_tokenizer(tmp_path):
    facts = tokenized([jsonl(tmp_path / "a")], tmp_path / "out.bin", val=[jsonl(tmp_path / "b", ["held", "back"])])
    assert read(facts["val"]) == ["held", "back"]
    assert len(read(tmp_path / "out.bin")) == 60
    with pytest.raises(UserError, match="to train on and, by --val, to validate on"):
        tokenized([tmp_path / "a", tmp_path / "b"], tmp_path / "two.bin", val=[tmp_path / "b"])


def llama2(path):
    """A tokenizer as Llama 2's is made: a space before every text, </s> to end one, unknown characters lost."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    coder = Tokenizer(models.BPE(unk_token="<unk>"))
    coder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    coder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    coder.train_from_iterator([d.replace("☕", "") for d in DOCUMENTS], trainer)
    coder.enable_truncation(16)
    coder.save(str(path))
    return path


def test_a_tokenizer_of_others_keeps_its_end_of_text_and_what_it_loses_is_told(tmp_path):
    """Its truncation and padding are not applied, and the file is kept as it was."""
    said: list[str] = []
    coder = llama2(tmp_path / "llama.json")
    facts = tokenized([jsonl(tmp_path / "a")], tmp_path / "out.bin", tokenizer=coder, say=said.append)
    ids = np.asarray(Tokens.open(tmp_path / "out.bin").ids)
    end = load(coder).token_to_id("</s>")
    assert (ids == end).sum() == 60
    assert ids[-1] == end
    assert len(ids) > 60 * 100
    assert any(line.startswith("warning: this tokenizer loses something: ") and "☕" in line for line in said)
    assert (tmp_path / "out.bin.tokenizer.json").read_bytes() == coder.read_bytes()
    assert facts["vocab"] == 300


def test_the_end_of_text_is_the_tokenizer_s_own_or_named(tmp_path):
    coder = load(llama2(tmp_path / "llama.json"))
    assert end_of_text(coder) == "</s>"
    assert end_of_text(coder, "<s>") == "<s>"
    assert end_of_text(train(["a"], 257)) == END_OF_TEXT
    with pytest.raises(UserError, match="--end '<x>' is not a token of this tokenizer; it has <unk>, <s>, </s>"):
        end_of_text(coder, "<x>")
    coder.add_tokens(["later"])
    assert vocab_of(coder) - 1 == coder.token_to_id("later")


BAD = {
    "field": (lambda p: jsonl(p, field="body"), {}, "without a field text or content; name one with --field: id, body"),
    "field of plain": (lambda p: p.write_text("plain"), {"field": "text"}, "plain, not JSONL; leave out --field text"),
    "line 3": (lambda p: p.write_text('{"text": "a"}\n\n{"text": 3}\n'), {}, "line 3 is not a JSON object with text"),
    "no JSON": (lambda p: p.write_text('{"text": "a"}\n{"text": \n'), {}, "line 2 is not a JSON object"),
    "a list": (lambda p: p.write_text('[{"text": "a"}]'), {}, "one JSON list"),
    "gzip cut": (lambda p: p.write_bytes(gzip.compress(DOCUMENTS[0].encode() * 9)[:-20]), {}, "gzip and damaged"),
    "gzip changed": (lambda p: p.write_bytes(gzip.compress(b"ab" * 99)[:-8] + bytes(8)), {}, "gzip and damaged"),
    "zstd cut": (lambda p: p.write_bytes(zstd(DOCUMENTS[0].encode() * 9)[:-20]), {}, "zstd and damaged"),
    "zstd changed": (lambda p: p.write_bytes(b"\x28\xb5\x2f\xfd" + b"\xff" * 99), {}, "zstd and damaged"),
    "Latin-1": (lambda p: p.write_bytes("café".encode("latin-1")), {}, "is not UTF-8"),
    "Latin-1 in JSONL": (lambda p: p.write_bytes('{"text": "café"}'.encode("latin-1")), {}, "UTF-8|JSON"),
    "no text in it": (lambda p: p.write_text('{"text": ""}\n'), {}, "none is left to train on"),
    "one document": (lambda p: p.write_text("text"), {"val_share": 0.1}, "is one document, which --val-share can't split"),
}


@pytest.mark.parametrize(("make", "options", "words"), BAD.values(), ids=BAD)
def test_a_bad_text_is_told_in_one_line_and_leaves_nothing(tmp_path, make, options, words):
    make(tmp_path / "in")
    with pytest.raises(UserError, match=words) as e:
        tokenized([tmp_path / "in"], tmp_path / "out.bin", 300, **options)
    assert "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_half_of_a_pair_of_escapes_is_no_reason_to_stop(tmp_path):
    (tmp_path / "a").write_text('{"text": "a\\ud83d b\\ud83d\\ude00"}\n')
    tokenized([tmp_path / "a"], tmp_path / "out.bin", 300)
    assert read(tmp_path / "out.bin") == ["a\ufffd b😀"]


def test_a_missing_zstandard_is_told_with_what_installs_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r'pip install "spillcliff\[zstd\]"'):
        tokenized([tmp_path / "a"], tmp_path / "out.bin", 300)


def test_a_sample_is_spread_evenly_and_bounded(tmp_path, monkeypatch):
    """From a text of two files, one compressed, places of all tenths are taken."""
    monkeypatch.setattr(texts, "BLOCK", 1000)
    lines = [f"line {i} of the text\n" for i in range(20_000)]
    (tmp_path / "a").write_text("".join(lines[:10_000]))
    (tmp_path / "b").write_bytes(gzip.compress("".join(lines[10_000:]).encode(), 1))
    sample = "".join(texts.sample([tmp_path / "a", tmp_path / "b"], [None, None], 50_000)).splitlines(True)
    assert set(sample) <= set(lines)
    assert 20_000 < sum(map(len, sample)) < 100_000
    assert {int(line.split()[1]) // 2000 for line in sample} == set(range(10))


def test_a_job_that_is_through_is_told_so_and_another_is_refused(tmp_path):
    said: list[str] = []
    first = tokenized([jsonl(tmp_path / "a")], tmp_path / "out.bin")
    assert tokenized([tmp_path / "a"], tmp_path / "out.bin", say=said.append) == first
    assert "there already" in said[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a", "out.bin", "out.bin.json", "out.bin.tokenizer.json"]
    for change in ({"vocab": 401}, {"end": END_OF_TEXT}):
        with pytest.raises(UserError, match="exists already"):
            tokenized([tmp_path / "a"], tmp_path / "out.bin", **change)
    (tmp_path / "out.bin").unlink()
    with pytest.raises(UserError, match=r"out\.bin\.tokenizer\.json exists already and is another tokenizer"):
        tokenized([tmp_path / "a"], tmp_path / "out.bin", 300)


OFTEN = """
import sys
from trainer import cli
from trainer.tokenize import corpus, encode
corpus.SAVE_S, encode.BATCH = 0, 1 << 14
sys.argv[0] = "train"
"""
"""Saves after every batch, of which there are many."""
START = "cli.main()\n"
COUNTED = OFTEN + """
import os, signal
left = most = int(os.environ["CALLS"])
def count(frame, event, argument):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(count)
try:
    cli.main()
finally:
    sys.setprofile(None)
    print(most - left, file=sys.stderr)
"""
"""Ends by SIGKILL at a certain call of a function, or tells how many calls there were: time would hit other moments on a
machine that is busy."""


def start(home, *arguments, code=None, **environment):
    how = ["-c", code] if code else ["-m", MODULES["train"]]
    return subprocess.run([sys.executable, *how, "tokenize", *arguments], cwd=home, text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, timeout=PATIENCE_S)


def finish(*arguments, **options) -> str:
    done = start(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_at_any_moment_it_goes_on_and_writes_the_same(tmp_path, kills):
    """While it learns, encodes and renames; in a plain text, a JSONL and a gzip stream, with validation split off."""
    r = random.Random(4)
    jsonl(tmp_path / "a.jsonl", [document(r.randrange(10**6), 1500) for _ in range(60)])
    (tmp_path / "b.gz").write_bytes(gzip.compress(f"\n{END_OF_TEXT}\n".join(document(i, 1000) for i in range(60)).encode()))
    (tmp_path / "c.txt").write_text(document(9, 50_000), encoding="utf-8")
    arguments = ("a.jsonl", "b.gz", "c.txt", "--vocab", "400", "--val-share", "0.1", "--out")
    whole = start(tmp_path, *arguments, "whole.bin", code=COUNTED, CALLS=str(10**12))
    assert whole.returncode == 0, whole.stderr
    calls, jobs, done, has_continued = int(whole.stderr), 0, 0, False
    while done < 2 * kills or not has_continued:
        jobs += 1
        assert jobs < 20 + 2 * kills  # else nothing that was killed is ever continued
        for _ in range(3):
            killed = start(tmp_path, *arguments, "killed.bin", code=COUNTED, CALLS=str(round(calls * r.uniform(0.2, 1))))
            assert killed.returncode in (0, -signal.SIGKILL), killed.stderr
            has_continued |= "continuing from where it was stopped" in killed.stdout
            done += killed.returncode != 0
            if killed.returncode == 0:
                break
        finish(tmp_path, *arguments, "killed.bin")
        for name in ("bin", "val.bin", "bin.tokenizer.json"):
            assert (tmp_path / f"killed.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
            (tmp_path / f"killed.{name}").unlink()
        assert not list(tmp_path.glob("*.part*"))


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
""" + OFTEN + START


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on a file's size")
def test_a_full_disk_is_told_and_what_was_written_is_gone_on_with(tmp_path):
    jsonl(tmp_path / "a", [document(i, 1000) for i in range(100)])
    arguments = (tmp_path, "a", "--vocab", "400", "--out", "out.bin")
    stopped = start(*arguments, code=LIMITED)
    assert stopped.returncode == 2
    assert "can't write out.bin" in stopped.stderr
    assert "the same command continues" in stopped.stderr
    assert len(stopped.stderr.splitlines()) == 1
    assert (tmp_path / "out.bin.part").stat().st_size <= 150_000
    assert "continuing from where it was stopped" in finish(*arguments)
    tokenized([tmp_path / "a"], tmp_path / "whole.bin")
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_a_changed_text_is_begun_again(tmp_path, monkeypatch):
    """What was written of the text as it was is not mixed with what it is now."""
    def stop(*a):
        raise KeyboardInterrupt

    said: list[str] = []
    jsonl(tmp_path / "a")
    with monkeypatch.context() as m:
        m.setattr("trainer.tokenize.corpus._Job._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenized([tmp_path / "a"], tmp_path / "out.bin", say=said.append)
    assert "the same command continues" in said[-1]
    assert (tmp_path / "out.bin.part").exists()
    jsonl(tmp_path / "a", [*DOCUMENTS[::-1], "more"])
    tokenized([tmp_path / "a"], tmp_path / "out.bin", say=said.append)
    assert any("starting again" in line for line in said)
    assert read(tmp_path / "out.bin") == [*DOCUMENTS[::-1], "more"]


PEAKS = """
import re
from pathlib import Path
from trainer.tokenize import corpus, encode
corpus.LEARN_BYTES, encode.BATCH = 300_000, 1 << 15
peaks = []
corpus.tokenize(corpus.CorpusOptions([Path("text")], Path("out.bin"), 400),
                update=lambda line: peaks.append(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]))
print(len(peaks), peaks[len(peaks) // 2], peaks[-1])
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """One document: the second half of 8 MB takes no more than the first did."""
    (tmp_path / "text").write_text("once upon a time there was nothing\n" * 240_000)
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=tmp_path, text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    batches, half, end = map(int, done.stdout.split())
    assert batches > 50
    assert (end - half) * 1024 < 4e6, done.stdout


def test_the_command_says_what_it_does_and_gives_one_object(tmp_path, command, refused):
    jsonl(tmp_path / "a", field="body")
    done = command("train", "tokenize", "a", "--out", "out.bin", "--vocab", 400, "--field", "body", "--val-share", 0.3,
                   "--json")
    facts = json.loads(done.stdout)
    assert facts["tokens"] == len(Tokens.open(tmp_path / "out.bin").ids)
    assert facts["val"] == "out.val.bin"
    assert json.loads(sidecar(tmp_path / "out.bin").read_text())["vocab"] == facts["vocab"]
    assert "training a byte-level BPE" in done.stderr
    assert "held back in out.val.bin" in done.stderr
    assert "two ways" in refused(2, "train", "tokenize", "a", "--out", "x", "--val", "a", "--val-share", 0.1)
    ids = np.asarray(Tokens.open(tmp_path / "out.bin").ids)
    assert load(tmp_path / facts["tokenizer"]).token_to_id(END_OF_TEXT) == ids[-1]

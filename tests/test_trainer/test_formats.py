"""Token files of other producers are recognised by what is in them, read as one where they are several, and what is damaged
is told in one line. Each is made by its own producer's rules."""

import gzip
import json
import pickle
import struct
import sys

import numpy as np
import pytest
from helpers.made import make_plan

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.data.dataset import open_data
from trainer.data.formats import open_tokens
from trainer.data.paths import expand
from trainer.data.recognize import flat_type
from trainer.data.scan import scan_file
from trainer.data.tokens import Tokens, write_sidecar

RANDOM = np.random.default_rng(3)
IDS = RANDOM.integers(0, 500, 4000)


def opened(*paths, vocab=500, **how):
    said: list[str] = []
    tokens = open_tokens(paths, vocab, say=said.append, **how)
    return tokens, "\n".join(said)


def llm_c(path, ids, magic=20240520, version=1, dtype=np.uint16, count=None):
    """As llm.c's dev/data/data_common.py, write_datafile."""
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, version, len(ids) if count is None else count
    with open(path, "wb") as f:
        f.write(header.tobytes())
        f.write(np.array(ids, dtype=dtype).tobytes())
    return path


def parquet(path, **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


def arrow_stream(path, **columns):
    """As `datasets` writes data-00000-of-00001.arrow: a stream of record batches."""
    pa = pytest.importorskip("pyarrow")

    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as f, pa.ipc.new_stream(f, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def arrow_file(path, **columns):
    pa = pytest.importorskip("pyarrow")

    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def rows(ids=IDS, of=100):
    return [list(map(int, ids[i:i + of])) for i in range(0, len(ids), of)]


def nano_gpt(path):
    """As nanoGPT's data/openwebtext/prepare.py: a memory map of uint16."""
    arr = np.memmap(path, dtype=np.uint16, mode="w+", shape=(len(IDS),))
    arr[:] = IDS
    arr.flush()


def npy_as(dtype):
    def write(path):
        with open(path, "wb") as f:
            np.save(f, IDS.astype(dtype))
    return write


GOOD = {
    "nanoGPT": nano_gpt,
    "token_ids_u32.dat": lambda p: IDS.astype("<u4").tofile(p),
    "llm.c, GPT-2": lambda p: llm_c(p, IDS),
    "llm.c, Llama 3": lambda p: llm_c(p, IDS, 20240801, 7, np.uint32),
    **{f"npy {dtype}": npy_as(dtype) for dtype in ("<u2", "<u4", "<i4", "<i8", ">i4", ">u2", "<u8", "<i2")},
    "Parquet of lists": lambda p: parquet(p, text=["x"] * 40, input_ids=rows()),
    "Parquet of ids": lambda p: parquet(p, ids=IDS),
    "datasets' stream": lambda p: arrow_stream(p, input_ids=rows(), attention_mask=[[1] * 100] * 40),
    "Arrow file": lambda p: arrow_file(p, tokens=rows()),
    "Arrow file, the only column": lambda p: arrow_file(p, whatever=rows(), text=["x"] * 40),
}


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_each_format_is_read_whatever_its_name(tmp_path, make):
    path = tmp_path / "data.xyz"
    make(path)
    tokens, _said = opened(path)
    assert np.array_equal(tokens.ids, IDS)
    tokens.check(500)
    with pytest.raises(UserError, match=rf"{IDS.max()} at position {IDS.argmax()} "):
        tokens.check(int(IDS.max()))
    batch = tokens.batch(1, 5, StepConfig(3, 10))
    assert batch.dtype == np.int32
    assert batch.max() < 500
    assert opened(path)[0].checksum() == tokens.checksum()


def test_the_type_of_a_flat_file_is_told_with_its_reason(tmp_path):
    IDS.astype("<u2").tofile(tmp_path / "a")
    IDS.astype("<u4").tofile(tmp_path / "b")
    assert "flat uint16, as uint16 every sampled id is below the vocabulary of 500" in opened(tmp_path / "a")[1]
    assert "flat uint32, as uint32 every sampled id is below" in opened(tmp_path / "b")[1]


@pytest.mark.parametrize("vocab", [None, 300, 32_000, 65_536, 65_537, 128_256, 200_000])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_type_is_right_or_asked_for_at_any_vocabulary(vocab, is_told):
    """Zipf's ids, as text has them: a wrong type is never decided for."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        ids = random.zipf(1.2, random.integers(40, 4000)) % (vocab or 50_000)
        for dtype in ("<u2", "<u4")[(vocab or 0) > 65_536:]:
            raw = ids.astype(dtype).tobytes()
            words = np.frombuffer(raw[:len(raw) // 4 * 4], "<u2")
            guess, why = flat_type(words, vocab if is_told else None)
            assert guess == np.dtype(dtype) or (guess is None and "--dtype" in why), (guess, why)
            for other in (ids.astype(dtype).byteswap().tobytes(), ids.astype("<i8").tobytes()):
                guess, why = flat_type(np.frombuffer(other[:len(other) // 4 * 4], "<u2"), vocab)
                assert guess is None or guess == np.dtype("<u2"), (guess, why)  # big-endian uint16 has no mark of its own


def test_what_could_be_both_is_asked_for(tmp_path):
    path = tmp_path / "zeros"
    np.zeros(1000, "<u4").tofile(path)
    with pytest.raises(UserError, match="plausible as uint16 and as uint32; say which with --dtype"):
        opened(path)
    assert len(opened(path, dtype="uint32")[0].ids) == 1000
    assert len(opened(path, dtype="uint16")[0].ids) == 2000


def cut(make, size):
    def damage(path):
        make(path)
        path.write_bytes(path.read_bytes()[:size])
    return damage


def more(make):
    def damage(path):
        make(path)
        path.write_bytes(path.read_bytes() + b"\0\0\0\0")
    return damage


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


BAD = {
    "empty": (lambda p: p.touch(), "is empty"),
    "uint16 cut in an id": (cut(nano_gpt, -1), "7999 bytes.*cut off"),
    "uint32 cut in an id": (cut(GOOD["token_ids_u32.dat"], -2), "15998 bytes.*4 bytes: it was cut off"),
    "big-endian uint16": (lambda p: IDS.astype(">u2").tofile(p), "big-endian"),
    "big-endian uint32": (lambda p: IDS.astype(">u4").tofile(p), "big-endian"),
    "8 bytes an id": (lambda p: IDS.tofile(p), "8 bytes each"),
    "ids past the vocabulary": (lambda p: RANDOM.integers(0, 60_000, 999).astype("<u2").tofile(p), "vocabulary of 500"),
    "header alone": (cut(GOOD["llm.c, GPT-2"], 1024), "promises 4000 ids of 2 bytes and 0 follow"),
    "header cut": (cut(GOOD["llm.c, GPT-2"], 500), "within its header"),
    "header promises more": (cut(GOOD["llm.c, GPT-2"], -8), "promises 4000 .* 3996 follow"),
    "header promises less": (more(GOOD["llm.c, Llama 3"]), "promises 4000 .* 4001 follow"),
    "header promises none": (lambda p: llm_c(p, []), "empty after its header"),
    "header's count is negative": (lambda p: llm_c(p, IDS, count=-5), "promises -5"),
    "llm.c's version": (lambda p: llm_c(p, IDS, version=2), "in version 2; version 1 is read"),
    "llm.c's other version": (lambda p: llm_c(p, IDS, 20240801, 1, np.uint32), "in version 1; version 7 is read"),
    "llm.c's evaluation": (lambda p: llm_c(p, IDS, 20240522), "multiple-choice"),
    "llm.c big-endian": (lambda p: p.write_bytes(struct.pack(">3i", 20240520, 1, 4) + bytes(1020)), "big-endian"),
    "npy of objects": (lambda p: np.save(open(p, "wb"), np.array([Bomb()], object)), "can't be read"),  # noqa: SIM115
    "npy of floats": (lambda p: np.save(open(p, "wb"), IDS / 2), "float64"),  # noqa: SIM115
    "npy of two dimensions": (lambda p: np.save(open(p, "wb"), IDS.reshape(40, 100)), r"\(40, 100\)"),  # noqa: SIM115
    "npy empty": (lambda p: np.save(open(p, "wb"), IDS[:0]), "without an id"),  # noqa: SIM115
    "npy cut": (cut(GOOD["npy <u4"], -2), "can't be read"),
    "npy longer": (more(GOOD["npy <u4"]), "promises 4000 .* 4001 follow"),
    "npy of nothing": (lambda p: p.write_bytes(b"\x93NUMPY"), "can't be read"),
    "pickle": (lambda p: pickle.dump([Bomb()] * 9, open(p, "wb")), "a pickle"),  # noqa: SIM115
    "pickle, old": (lambda p: pickle.dump([Bomb()] * 9, open(p, "wb"), 2), "a pickle"),  # noqa: SIM115
    "zip": (lambda p: np.savez(open(p, "wb"), IDS), "a zip file"),  # noqa: SIM115
    "gzip": (lambda p: p.write_bytes(gzip.compress(b"text")), r"by gzip.*train tokenize .*data.bin --out .*ids.bin"),
    "text": (lambda p: p.write_text("Once upon a time\n" * 99), r"is text, not ids; run `train tokenize"),
    "UTF-16": (lambda p: p.write_text("Once upon a time\n" * 99, encoding="utf-16"), r"is text"),
    "JSONL": (lambda p: p.write_text('{"text": "Once"}\n' * 99), r"is text"),
    "safetensors": (lambda p: p.write_bytes(struct.pack("<Q", 20) + b'{"a": 1}' + bytes(99)), "safetensors"),
    "Parquet cut": (cut(GOOD["Parquet of lists"], -9), "parquet and damaged"),
    "Parquet of text": (lambda p: parquet(p, text=["x"]), "no column of ids .it has text."),
    "Parquet of two": (lambda p: parquet(p, a=[[1]], b=[[2]]), "several columns .* .a, b.; say .* --column"),
    "Parquet negative": (lambda p: parquet(p, ids=[[1, 2], [-100, 3]]), "id -100 in rows 0 to 1"),
    "Parquet null row": (lambda p: parquet(p, ids=[[1, 2], None]), "row 1 has no ids"),
    "Parquet null id": (lambda p: parquet(p, ids=[[1, None]]), "an id that is null"),
    "Parquet without rows": (lambda p: parquet(p, ids=np.array([], int)), "no ids in its rows"),
    "stream cut in a batch": (cut(GOOD["datasets' stream"], 3000), "damaged"),
    "stream cut at its end": (cut(GOOD["datasets' stream"], -8), "cut off"),
    "Arrow file cut": (cut(GOOD["Arrow file"], -30), "damaged"),
}


@pytest.mark.parametrize(("make", "words"), BAD.values(), ids=BAD)
def test_damage_is_told_in_one_line_and_nothing_is_unpickled(tmp_path, make, words):
    path = tmp_path / "data.bin"
    make(path)
    with pytest.raises(UserError, match=words) as e:
        opened(path)
    assert "\n" not in str(e.value)
    assert "data.bin" in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["data.bin"]


def test_negative_ids_are_found_with_their_place(tmp_path):
    np.save(tmp_path / "a.npy", np.where(np.arange(4000) == 77, -1, IDS))
    with pytest.raises(UserError, match="id -1 at position 77 is negative"):
        opened(tmp_path / "a.npy")[0].check(500)


def test_a_named_type_must_agree_with_what_the_file_says_itself(tmp_path):
    with pytest.raises(UserError, match="says itself that it holds uint16; leave out --dtype uint32"):
        opened(llm_c(tmp_path / "a", IDS), dtype="uint32")


def test_the_copy_of_a_column_is_made_once_and_again_when_the_file_changes(tmp_path):
    path = parquet(tmp_path / "a.parquet", a=rows(), b=rows(IDS[::-1]))
    first, said = opened(path, column="a")
    assert "copying the ids" in said
    assert first.ids.tolist() == IDS.tolist()
    assert "copying" not in opened(path, column="a")[1]
    other, said = opened(path, column="b")
    assert "copying" in said
    assert other.ids.tolist() == IDS[::-1].tolist()
    parquet(path, b=rows(IDS[:50]))
    assert len(opened(path, column="b")[0].ids) == 50
    with pytest.raises(UserError, match="no column 'c'; it has b"):
        opened(path, column="c")
    assert first.ids.tolist() == IDS.tolist()  # a run that has it mapped goes on with what it began with


def test_what_stands_where_the_copy_would_go_is_left_alone(tmp_path):
    path = parquet(tmp_path / "a.parquet", ids=rows())
    (tmp_path / "a.parquet.tokens.bin").write_text("precious")
    with pytest.raises(UserError, match="was not made from it; move it away"):
        opened(path)
    assert (tmp_path / "a.parquet.tokens.bin").read_text() == "precious"


def test_a_missing_pyarrow_is_told_with_what_installs_it(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", ids=rows())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r'pip install "spillcliff\[arrow\]"'):
        opened(path)


def shards(folder, sizes=(1500, 30, 7, 2463)):
    at = 0
    for i, size in enumerate(sizes):
        llm_c(folder / f"fineweb_train_{i * 6}.bin", IDS[at:at + size])
        at += size
    return folder


def test_shards_are_one_run_of_tokens_in_natural_order(tmp_path):
    """Batches, the checksum and what is held back are those of one file with the same ids; windows span several shards."""
    folder = shards(tmp_path)
    whole = Tokens.of_ids(IDS.astype("<u2"), None, "whole")
    shape = StepConfig(2, 48)
    for named in ([folder], [folder / "*.bin"], [folder / f"fineweb_train_{i * 6}.bin" for i in range(4)]):
        tokens, said = opened(*named)
        assert np.array_equal(tokens.ids, IDS)
        assert tokens.checksum() == whole.checksum()
        assert "4 files, fineweb_train_0.bin to fineweb_train_18.bin, 4,000 tokens, llm.c" in said
        for a, b in zip((tokens, *tokens.split(shape)), (whole, *whole.split(shape)), strict=True):
            for step in range(12):
                assert np.array_equal(a.batch(1, step, StepConfig(5, 48, 2)), b.batch(1, step, StepConfig(5, 48, 2)))
            for x, y in zip(a.fixed_batches(3, 48, 4), b.fixed_batches(3, 48, 4), strict=True):
                assert np.array_equal(x, y)
            assert a.checksum() == b.checksum()


def test_an_id_past_the_vocabulary_is_found_in_its_shard(tmp_path):
    folder = shards(tmp_path)
    llm_c(folder / "fineweb_train_12.bin", [1, 2, 500, 3])
    with pytest.raises(UserError, match=r"_12.bin: id 500 at position 2 .*vocabulary of 500; plan with --vocab 501"):
        opened(folder)[0].check(500)
    assert scan_file(folder / "fineweb_train_0.bin").exists()
    assert not scan_file(folder / "fineweb_train_12.bin").exists()
    assert len(opened(folder)[0].shards) == 4  # what was kept beside them is no shard


def test_an_array_of_shards_gives_any_slice(tmp_path):
    joined = opened(shards(tmp_path))[0].ids
    for _ in range(300):
        a, b = sorted(RANDOM.integers(0, 4001, 2))
        assert np.array_equal(joined[a:b], IDS[a:b])
        assert len(joined[a:b]) == b - a
        piece = joined[a:]
        assert np.array_equal(piece[:b - a], IDS[a:b])
    assert isinstance(joined[0:1500], np.memmap)
    assert len(joined[4000:]) == 0


def test_mixed_kinds_are_refused(tmp_path):
    llm_c(tmp_path / "a", IDS)
    IDS.astype("<u2").tofile(tmp_path / "b")
    IDS.astype("<u2").tofile(tmp_path / "c")
    write_sidecar(tmp_path / "c", 4000, 500, None)
    for pair in (("a", "b"), ("b", "c"), ("c", "a")):
        with pytest.raises(UserError, match="of two kinds"):
            opened(*(tmp_path / name for name in pair))
    with pytest.raises(UserError, match="named twice"):
        opened(tmp_path / "a", tmp_path / "a")


def test_shards_of_two_tokenizers_are_refused(tmp_path):
    for name in "ab":
        IDS.astype("<u2").tofile(tmp_path / f"{name}.bin")
        (tmp_path / f"{name}.json").write_text(json.dumps({"is": name}))
        write_sidecar(tmp_path / f"{name}.bin", 4000, 500, f"{name}.json")
    with pytest.raises(UserError, match="two tokenizers"):
        opened(tmp_path / "a.bin", tmp_path / "b.bin")


def test_a_folder_is_its_token_files_alone(tmp_path):
    """nanoGPT's has a pickle, a script and a text beside; one with training and validation is not mixed."""
    nano_gpt(tmp_path / "train.bin")
    pickle.dump({"stoi": Bomb()}, open(tmp_path / "meta.pkl", "wb"))  # noqa: SIM115
    (tmp_path / "input.txt").write_text("First Citizen:\n" * 99)
    assert len(opened(tmp_path)[0].ids) == 4000
    nano_gpt(tmp_path / "val.bin")
    for named in (tmp_path, tmp_path / "*.bin"):
        with pytest.raises(UserError, match=r"\(train\.bin, val\.bin\); name them apart, by --data and --val"):
            opened(named)
    assert len(opened(tmp_path / "train.bin", tmp_path / "val.bin")[0].ids) == 8000
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no token file"):
        opened(tmp_path / "empty")
    with pytest.raises(UserError, match="no such file"):
        opened(tmp_path / "*.npy")


def test_a_datasets_folder_is_read_and_its_copies_are_not_counted(tmp_path):
    for i in range(3):
        arrow_stream(tmp_path / f"data-0000{i}-of-00003.arrow", input_ids=rows(IDS[i * 100:i * 100 + 100], 10))
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    for _ in range(2):
        assert opened(tmp_path)[0].ids[:].__array__().tolist() == IDS[:300].tolist()
    paths = expand([tmp_path / "data*"], lambda path: True)
    assert [p.name for p in paths] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]


def test_a_plan_s_data_may_be_shards_with_others_to_validate(tmp_path):
    plan = make_plan()
    validation_file = llm_c(tmp_path / "held.bin", IDS[:200])
    training, validation = open_data(plan, [shards(tmp_path) / "*train*"], [validation_file])
    assert len(validation) == 200
    assert len(training) == 4000
    with pytest.raises(UserError, match=r"held\.bin is in both --data and --val"):
        open_data(plan, [tmp_path], [validation_file])


def test_plan_and_audit_take_a_flat_file(tmp_path, called):
    """By the type that is told from its content, or by --dtype; text is answered with the command that makes ids of it."""
    (tmp_path / "plan.json").write_text(json.dumps(make_plan().to_json()))
    IDS.astype("<u4").tofile(tmp_path / "token_ids_u32.dat")
    np.zeros(99, "<u4").tofile(tmp_path / "zeros.dat")
    (tmp_path / "corpus.txt").write_text("Once upon a time\n")
    _, out, err = called(tmp_path, "train", "audit", "--plan", "plan.json", "--data", "token_ids_u32.dat", "--device", "cpu",
                         "--json")
    findings = json.loads(out)["findings"]
    assert next(f["seen"] for f in findings if f["what"] == "data").startswith("3,600 tokens"), (findings, err)
    run = ("train", "--plan", "plan.json", "--dry-run", "--device", "cpu", "--data")
    for arguments, words in (((*run, "corpus.txt"), "train tokenize corpus.txt --out corpus.bin"),
                             ((*run, "zeros.dat"), "--dtype"), (("plan", "--corpus", "corpus.txt"), "is text")):
        code, _, err = called(tmp_path, *arguments)
        assert code == 2
        assert words in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1

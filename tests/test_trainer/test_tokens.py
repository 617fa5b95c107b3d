"""Token files: damage is named, batches are a pure function of seed and step, every window is reached, and what was read
once need not be read again."""

import json
import os
import zlib

import numpy as np
import pytest
import torch

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.data.feed import feed
from trainer.data.scan import SAMPLE_BLOCKS, SAMPLE_BYTES, Scan, scan_file
from trainer.data.tokens import Tokens, dtype_for, sidecar


def test_a_file_is_read_as_it_was_written(token_file):
    tokens = Tokens.open(token_file(range(400)))
    assert np.asarray(tokens.ids).tolist() == list(range(400))
    assert tokens.vocab == 500


def test_ids_above_65535_are_written_as_uint32():
    """They would wrap silently in uint16."""
    assert dtype_for(65_536).itemsize == 2
    assert dtype_for(65_537).itemsize == 4


def test_an_id_past_the_vocabulary_is_found_with_its_place(token_file):
    ids = np.zeros(1000, int)
    ids[777] = 480
    tokens = Tokens.open(token_file(ids))
    tokens.check(481)
    with pytest.raises(UserError, match=r"480 at position 777 .* 480"):
        tokens.check(480)


def damage_truncated(path):
    path.write_bytes(path.read_bytes()[:-3])


def damage_no_sidecar(path):
    sidecar(path).unlink()


def damage_gone(path):
    path.unlink()


def damage_sidecar(**changes):
    def damage(path):
        sidecar(path).write_text(json.dumps(json.loads(sidecar(path).read_text()) | changes))
    return damage


@pytest.mark.parametrize(("damage", "words"), [
    (damage_truncated, "bytes"), (damage_no_sidecar, "tokens.bin.json"), (damage_gone, "no such file"),
    (damage_sidecar(count=7), "7 tokens"), (damage_sidecar(count="7"), "count"), (damage_sidecar(dtype="float32"), "dtype"),
    (damage_sidecar(vocab=0), "vocab"), (damage_sidecar(schema=9), "schema"), (damage_sidecar(tokenizer=3), "tokenizer"),
    (lambda p: sidecar(p).write_text("{"), "not JSON"), (lambda p: sidecar(p).write_text("[]"), "JSON object"),
    (lambda p: sidecar(p).write_bytes(b"\xff\xfe"), "not JSON")])
def test_damage_is_named(token_file, damage, words):
    path = token_file(range(400))
    damage(path)
    with pytest.raises(UserError, match=words):
        Tokens.open(path)


def test_batches_are_contiguous_slices_and_a_function_of_seed_and_step(token_file):
    tokens, shape = Tokens.open(token_file(range(400))), StepConfig(3, 10, accum=2)
    a = tokens.batch(1, 5, shape)
    assert a.shape == (2, 3, 11)
    assert a.dtype == np.int32
    assert (np.diff(a) == 1).all()
    assert np.array_equal(a, tokens.batch(1, 5, shape))
    assert not np.array_equal(a, tokens.batch(2, 5, shape))
    assert not np.array_equal(a, tokens.batch(1, 6, shape))


def test_an_epoch_deals_each_window_once_and_the_tail_is_reached(token_file):
    """403 tokens hold 40 windows of 10 and two tokens more: within an epoch no window comes twice, over the epochs every
    token is a target."""
    tokens, shape = Tokens.open(token_file(range(403))), StepConfig(4, 10)
    reached = set()
    for epoch in range(12):
        starts = [int(row[0]) for step in range(10) for row in tokens.batch(0, epoch * 10 + step, shape)[0]]
        assert len(set(starts)) == 40
        assert len({s % 10 for s in starts}) == 1
        reached |= {i for s in starts for i in range(s + 1, s + 11)}
    assert reached == set(range(1, 403))


def test_length_plus_one_tokens_are_exactly_one_window(token_file):
    tokens = Tokens.open(token_file(range(11)))
    assert tokens.windows(10) == 1
    assert (tokens.batch(0, 0, StepConfig(2, 10)) == np.arange(11)).all()
    with pytest.raises(UserError, match=r"11 tokens.*12"):
        tokens.windows(11)


def test_fixed_windows_are_the_same_ones_and_never_run_past_the_end(token_file):
    tokens = Tokens.open(token_file(range(401)))
    batches = tokens.fixed_batches(4, 10, 12)
    assert [b.shape for b in batches] == [(4, 11)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 400
    assert tokens.fixed_batches(4, 10, 1)[0][0].tolist() == list(range(11))


def test_the_last_batch_is_filled_up_with_what_has_no_weight(token_file):
    tokens = Tokens.open(token_file(range(401)))
    for batch, count in ((4, 10), (32, 26), (7, 7), (16, 1)):
        batches = tokens.fixed_batches(batch, 10, count)
        assert {b.shape for b in batches} == {(batch, 11)}
        rows = np.concatenate(batches)
        assert (rows[:count] >= 0).all()
        assert (rows[count:] < 0).all()
        assert sum(tokens.loss_weight(b) for b in batches) == count
        one_by_one = np.concatenate(tokens.fixed_batches(1, 10, count))
        assert np.array_equal(rows[:count], one_by_one)


def test_the_feed_gives_the_batches_in_order_from_any_start(token_file):
    tokens, shape = Tokens.open(token_file(range(400))), StepConfig(3, 10)
    steps = feed(tokens, shape, 0, torch.device("cpu"), start=7)
    for step in range(7, 12):
        assert np.array_equal(next(steps).numpy(), tokens.batch(0, step, shape))


LARGE = np.random.default_rng(2).integers(0, 400, 1 << 20)
"""2 MB as uint16, of which the sample that tells whether a file is the same reads an eighth."""
SAMPLED, NOT_SAMPLED = 0, 2 * SAMPLE_BYTES
"""Bytes of such a file within the sample's first block, and between its first and its second."""


def change_in_place(path, at, value):
    """Writes an id at a byte of the file, whose size and times stay what they were."""
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(int(value).to_bytes(2, "little"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def scanned(path) -> int:
    """What a start does with a token file; returns its checksum."""
    tokens = Tokens.open(path)
    tokens.check(400)
    return tokens.checksum()


def test_a_second_start_reads_the_sample_alone(token_file):
    """So that it does not see a change between the sample's blocks, which it would see if it read the whole file."""
    path = token_file(LARGE)
    assert path.stat().st_size > 4 * SAMPLE_BLOCKS * SAMPLE_BYTES
    first = scanned(path)
    change_in_place(path, NOT_SAMPLED, 450)
    assert scanned(path) == first
    scan_file(path).unlink()
    with pytest.raises(UserError, match=f"id 450 at position {NOT_SAMPLED // 2} "):
        scanned(path)


def test_a_change_in_a_sampled_block_is_seen_though_size_and_time_are_the_same(token_file):
    path = token_file(LARGE)
    first = scanned(path)
    change_in_place(path, SAMPLED, LARGE[0] + 1)
    changed = scanned(path)
    assert changed != first
    assert changed == zlib.crc32(path.read_bytes())
    change_in_place(path, path.stat().st_size - 2, 450)  # the last block is the file's end
    with pytest.raises(UserError, match=f"id 450 at position {len(LARGE) - 1} "):
        scanned(path)


def test_a_file_of_another_time_or_size_is_read_anew(token_file):
    path = token_file(LARGE)
    scanned(path)
    change_in_place(path, NOT_SAMPLED, 450)
    os.utime(path)
    with pytest.raises(UserError, match="id 450"):
        scanned(path)


def test_a_file_read_as_another_type_is_read_anew(tmp_path):
    """A flat file's scan as uint16 says nothing of its ids as uint32."""
    ids = np.array([1, 2, 3, 1 << 20], "<u4")
    ids.tofile(tmp_path / "flat")
    narrow, wide = (Tokens.of_ids(np.memmap(tmp_path / "flat", dtype, "r"), None, str(tmp_path / "flat"))
                    for dtype in ("<u2", "<u4"))
    narrow.check(400)
    with pytest.raises(UserError, match="id 1048576 at position 3 "):
        wide.check(400)
    first = Tokens((narrow.shards[0].slice(0, 4),), None)  # of the same numbers as `wide`, of half the bytes
    assert first.checksum() == zlib.crc32(ids[:2].tobytes())
    assert wide.checksum() == zlib.crc32(ids.tobytes())


def test_checksums_are_those_of_the_ids_the_first_time_and_the_second(token_file):
    """Of a whole file, of the parts that it is split into, and of several files as one after another."""
    step = StepConfig(2, 32)
    a, b = (Tokens.open(token_file(ids, name=name)) for name, ids in (("a.bin", LARGE[:70_000]), ("b.bin", LARGE[70_000:])))
    both, swapped = Tokens.join([a, b]), Tokens.join([b, a])
    several = [a, *a.split(step), both, *both.split(step), swapped, b]
    expected = [zlib.crc32(np.asarray(tokens.ids).tobytes()) for tokens in several]
    assert len(set(expected)) == len(expected)
    for _ in range(2):
        assert [tokens.checksum() for tokens in several] == expected
    assert len(json.loads(scan_file(a.path).read_text())["crc32"]) == 4  # alone, split's two, and after b


def test_a_folder_that_cannot_be_written_to_costs_a_reading_and_no_more(token_file):
    path = token_file(LARGE)
    scan_file(path).mkdir()  # where no file can be written, by root neither
    first = scanned(path)
    change_in_place(path, NOT_SAMPLED, LARGE[NOT_SAMPLED // 2] + 1)
    assert scanned(path) not in (first, None)
    assert sorted(p.name for p in path.parent.iterdir()) == ["tokens.bin", "tokens.bin.json", "tokens.bin.scan.json"]


@pytest.mark.parametrize("content", ["{}", "{", "[]", '{"size": %(size)d, "mtime_ns": %(mtime_ns)d, "max_id": 0}',
                                     '{"size": %(size)d, "mtime_ns": %(mtime_ns)d, "max_id": 0, "sample_crc32": "x"}'])
def test_an_older_or_damaged_scan_is_not_believed(token_file, content):
    """The last but one is what an earlier version wrote."""
    path = token_file([450, *LARGE])
    now = path.stat()
    scan_file(path).write_text(content.replace("%(size)d", str(now.st_size)).replace("%(mtime_ns)d", str(now.st_mtime_ns)))
    with pytest.raises(UserError, match="id 450 at position 0 "):
        scanned(path)


def test_nothing_is_kept_of_a_file_that_changed_while_it_was_read(token_file):
    path = token_file(LARGE)
    scan = Scan.of(path, "<u2")
    assert scan is not None
    change_in_place(path, SAMPLED, 450)
    scan.keep(path, max_id=399)
    assert not scan_file(path).exists()


def test_nothing_is_kept_where_that_was_not_asked_for(token_file):
    path = token_file(LARGE)
    Tokens.open(path).check(400, keep=False)
    assert not scan_file(path).exists()
    training, _ = Tokens.open(path).split(StepConfig(2, 32))
    training.check(400)  # a part's highest id is not the file's
    assert not scan_file(path).exists()


def test_a_scan_is_believed_for_what_it_says(token_file):
    """An id within one vocabulary is past a smaller one."""
    path = token_file(LARGE)
    scanned(path)
    with pytest.raises(UserError, match="past the model's vocabulary of 300"):
        Tokens.open(path).check(300)

"""Token files: damage is named, batches are a pure function of seed and step, and every window is reached."""

import json

import numpy as np
import pytest
import torch

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.data.tokens import Tokens, dtype_for, feed, sidecar


def test_a_file_is_read_as_it_was_written(token_file):
    tokens = Tokens.open(token_file(range(400)))
    assert tokens.ids.tolist() == list(range(400)) and tokens.vocab == 500


def test_ids_above_65535_are_written_as_uint32():
    """They would wrap silently in uint16."""
    assert dtype_for(65_536).itemsize == 2 and dtype_for(65_537).itemsize == 4


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
    assert a.shape == (2, 3, 11) and a.dtype == np.int32
    assert (np.diff(a) == 1).all()
    assert np.array_equal(a, tokens.batch(1, 5, shape))
    assert not np.array_equal(a, tokens.batch(2, 5, shape)) and not np.array_equal(a, tokens.batch(1, 6, shape))


def test_an_epoch_deals_each_window_once_and_the_tail_is_reached(token_file):
    """403 tokens hold 40 windows of 10 and two tokens more: within an epoch no window comes twice, over the epochs every
    token is a target."""
    tokens, shape = Tokens.open(token_file(range(403))), StepConfig(4, 10)
    reached = set()
    for epoch in range(12):
        starts = [int(row[0]) for step in range(10) for row in tokens.batch(0, epoch * 10 + step, shape)[0]]
        assert len(set(starts)) == 40 and len({s % 10 for s in starts}) == 1
        reached |= {i for s in starts for i in range(s + 1, s + 11)}
    assert reached == set(range(1, 403))


def test_length_plus_one_tokens_are_exactly_one_window(token_file):
    tokens = Tokens.open(token_file(range(11)))
    assert tokens.windows(10) == 1
    assert (tokens.batch(0, 0, StepConfig(2, 10)) == np.arange(11)).all()
    with pytest.raises(UserError, match="11 tokens.*12"):
        tokens.windows(11)


def test_fixed_windows_are_the_same_ones_and_never_run_past_the_end(token_file):
    tokens = Tokens.open(token_file(range(401)))
    batches = tokens.fixed(4, 10, 3)
    assert [b.shape for b in batches] == [(4, 11)] * 3
    assert batches[0][0, 0] == 0 and batches[-1][-1, -1] == 400
    assert [b.shape for b in Tokens.open(token_file(range(25))).fixed(4, 10, 3)] == [(2, 11)]


def test_the_feed_gives_the_batches_in_order_from_any_start(token_file):
    tokens, shape = Tokens.open(token_file(range(400))), StepConfig(3, 10)
    steps = feed(tokens, shape, 0, torch.device("cpu"), start=7)
    for step in range(7, 12):
        assert np.array_equal(next(steps).numpy(), tokens.batch(0, step, shape))

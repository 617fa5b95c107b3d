"""`train tokenize --pairs`: JSONL of prompts and answers, or of chats, to a file of pairs."""

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, write_json
from trainer.data.pairs import KIND
from trainer.data.tokens import SCHEMA, sidecar
from trainer.plan import PairCounts
from trainer.tokenize import chat
from trainer.tokenize.source import text_files
from trainer.tokenize.tokenizer import ENDS, end_of_text, load, vocab_of

BATCH_PAIRS = 1024
"""Pairs encoded together, which keeps all cores busy."""
BATCH_ROWS = 1 << 12
"""Rows written together: 8 MB at a length of 512."""


def cut(ids: np.ndarray, longest: int) -> np.ndarray | None:
    """The last `longest` ids of a pair, int32 (count,), of which those with the loss on them are 0 or more: what is cut
    off is the prompt's beginning, or a chat's first turns. An answer that has lost its prompt is no longer learned; None if
    the last one has."""
    if len(ids) <= longest:
        return ids
    ids = ids[-longest:].copy()
    prompt = int(np.argmax(ids < 0))
    if ids[prompt] >= 0:
        return None
    ids[:prompt] = ~ids[:prompt]
    return ids


def pack(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Which pairs, of `lengths` ids (pairs,), share a row of `room` ids: the longest first, each into the row where the
    least is left over (best-fit decreasing), rows being kept in buckets by the room that they have left."""
    rows: list[list[int]] = []
    buckets: dict[int, list[int]] = {}
    rooms: list[int] = []  # of the buckets that are not empty, in order
    for pair in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[pair])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            free = rooms[at]
            row = buckets[free].pop()
            if not buckets[free]:
                del rooms[at]
            rows[row].append(pair)
        else:
            free, row = room, len(rows)
            rows.append([pair])
        if free > size:
            bucket = buckets.setdefault(free - size, [])
            if not bucket:
                bisect.insort(rooms, free - size)
            bucket.append(row)
    return rows


class _Encoder:
    """Turns to ids, ~id where there is no loss, by the template that the tokenizer has the tokens for. UserError for a
    tokenizer without a token that could end an answer."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = load(path)
        self.vocab, self._end = vocab_of(self.tokenizer), end_of_text(self.tokenizer)
        ids = {name: self.tokenizer.token_to_id(name) for name in (self._end, chat.START, chat.END) if name}
        self._ids = {name: i for name, i in ids.items() if i is not None}
        self._is_chatml = {chat.START, chat.END} <= set(self._ids)
        if not self._is_chatml and self._end is None:
            raise UserError(f"tokenizer {path} has neither an end of text ({', '.join(ENDS)}) nor {chat.START} and "
                            f"{chat.END}: nothing would end an answer; take the tokenizer.json of the run to start from")
        # what a text has in it that looks like such a token is text: else an answer could end itself
        self.tokenizer.encode_special_tokens = True

    @property
    def template(self) -> str:
        """What is put around the turns, in words."""
        if self._is_chatml:
            return f"{chat.START} and {chat.END} around every turn, as the tokenizer has them"
        return f'"### User:" and "### Assistant:" before each turn and {self._end} after each answer'

    def _segments(self, turns: list[chat.Turn]) -> list[chat.Segment]:
        if self._is_chatml:
            return chat.chatml(turns, self._end)
        assert self._end is not None
        return chat.plain(turns, self._end)

    def encode(self, chats: list[list[chat.Turn]]) -> list[np.ndarray]:
        """The ids of each chat, int32 (count,)."""
        of_chats = [self._segments(turns) for turns in chats]
        texts = [s.text for s in itertools.chain(*of_chats) if not s.is_token]
        encodings = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))

        def ids_of(segment: chat.Segment) -> np.ndarray:
            ids = np.array([self._ids[segment.text]] if segment.is_token else next(encodings).ids, np.int32)
            return ids if segment.is_learned else ~ids

        return [np.concatenate([ids_of(segment) for segment in segments]) for segments in of_chats]


def tokenize_pairs(named: Sequence[Path], out: Path, length: int, tokenizer_path: Path, is_packed: bool = False,
                   say: Say = ignore) -> dict:
    """Writes `out` with rows of `length` (see trainer.data.pairs), its sidecar and its tokenizer; returns the sidecar's
    facts, in which are how many pairs were `cut`, or left out because the answer alone is `too_long` or because it is
    `empty`.

    Each pair has a row of its own, or with `is_packed` as many share one as fit, each of which sees those before it, as
    documents do in a file of tokens; the rows then are in a random order. Nothing is written under the final names until
    all of it is there; UserError if `out` exists already, or for damaged lines.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name another --out, or remove it first")
    paths = text_files(named, [out])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    encoder = _Encoder(tokenizer_path)
    scratch, temporary = (out.with_name(f"{out.name}.{what}.tmp") for what in ("ids", "rows"))
    tokenizer_copy = out.with_name(out.name + ".tokenizer.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lengths, left_out = _encode_all(paths, encoder, length + 1, scratch)
        if not len(lengths):
            raise UserError(f"{paths[0]}: of {left_out['too_long'] + left_out['empty']} answers none has text and fits a "
                            f"row of {length}; tokenize with a larger --length")
        packed = pack(lengths, length + 1)
        if is_packed:  # as they were packed, the last ones, which are held back to validate, would be the shortest
            rows = [packed[i] for i in np.random.default_rng(0).permutation(len(packed))]
        else:
            rows = [[pair] for pair in range(len(lengths))]
        ids = np.memmap(scratch, np.int32, "r")
        answers = _write_rows(temporary, _padded_rows(rows, lengths, ids, length + 1, encoder.vocab))
        real = int(lengths.sum()) - len(rows)  # a row's first id is no target
        counts = PairCounts(length=length, rows=len(rows), pairs=len(lengths), tokens_real=real, tokens_answer=answers,
                            tokens_padded=len(rows) * length - real)
        facts = {"schema": SCHEMA, "kind": KIND, "dtype": "int32", "count": len(rows) * (length + 1), "vocab": encoder.vocab,
                 "tokenizer": tokenizer_copy.name, "packed": is_packed, "template": encoder.template, **asdict(counts),
                 **left_out}
        encoder.tokenizer.save(str(tokenizer_copy))
        write_json(sidecar(out), facts)
        os.replace(temporary, out)
    except UserError:
        raise
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"can't write {out}: {getattr(e, 'strerror', None) or e}") from None
    finally:
        for path in (scratch, temporary):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    say(f"{counts.words()}; {encoder.template}")
    if len(packed) < len(rows):
        say(f"--packed would need {len(packed):,} rows")
    for which, what in (("cut", "cut at the prompt's beginning"), ("empty", "left out: no text in the answer"),
                        ("too_long", f"left out: an answer of more than {length} tokens")):
        if left_out[which]:
            say(f"{left_out[which]:,} {what}")
    return facts | {"out": str(out), "tokenizer": str(tokenizer_copy)}


def _encode_all(paths: list[Path], encoder: _Encoder, longest: int, scratch: Path) -> tuple[np.ndarray, dict[str, int]]:
    """Writes the ids of all pairs, int32, to `scratch`, one after the other; returns (their lengths, how many were cut or
    left out)."""
    lengths, left_out = [], {"cut": 0, "too_long": 0, "empty": 0}
    with open(scratch, "wb") as f:
        chats = itertools.chain.from_iterable(map(chat.read, paths))
        while batch := list(itertools.islice(chats, BATCH_PAIRS)):
            answered = [turns for turns in batch if any(t.role == "assistant" and t.text.strip() for t in turns)]
            left_out["empty"] += len(batch) - len(answered)
            for whole in encoder.encode(answered):
                ids = cut(whole, longest)
                if ids is None:
                    left_out["too_long"] += 1
                    continue
                left_out["cut"] += len(ids) < len(whole)
                ids.tofile(f)
                lengths.append(len(ids))
    return np.array(lengths, np.int64), left_out


def _padded_rows(rows: list[list[int]], lengths: np.ndarray, ids: np.ndarray, width: int,
                 vocab: int) -> Iterator[np.ndarray]:
    """The ids of the pairs in each row, filled up to `width`, int32 (count, width), up to BATCH_ROWS rows at a time."""
    # an H200 adds the gradients of one id's rows one after another: half of all tokens the same took 1.3% of a step
    padding = ~(np.arange(width) % vocab)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first:first + BATCH_ROWS]
        block = np.tile(padding.astype("<i4"), (len(batch), 1))
        for out, row in zip(block, batch, strict=True):
            at = 0
            for pair in row:
                size = lengths[pair]
                out[at:at + size] = ids[starts[pair]:starts[pair] + size]
                at += size
        yield block


def _write_rows(path: Path, blocks: Iterator[np.ndarray]) -> int:
    """Writes the rows; returns the number of targets with the loss on them."""
    answers = 0
    with open(path, "wb") as f:
        for block in blocks:
            answers += int((block[:, 1:] >= 0).sum())
            block.tofile(f)
        f.flush()
        os.fsync(f.fileno())
    return answers

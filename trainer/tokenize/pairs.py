"""JSONL of pairs and chats to a file of pairs: encoded, cut, laid into rows."""

import bisect
import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from spillcliff.errors import UserError
from spillcliff.files import write_json
from trainer.data.pairs import KIND
from trainer.data.tokens import SCHEMA, sidecar
from trainer.plan import PairCounts
from trainer.tokenize import chat, texts
from trainer.tokenize.tokenizer import ENDS, end_of_text, load, vocab_of

TOGETHER = 1024
"""Pairs encoded together, which keeps all cores busy."""
ROWS = 1 << 12
"""Rows written together: 8 MB at a length of 512."""


def cut(ids: np.ndarray, longest: int) -> np.ndarray | None:
    """The last `longest` ids of a pair, of which those with the loss on them are 0 or more: what is cut off is the
    prompt's beginning, or a chat's first turns. An answer that has lost its prompt is no longer learned; None if the last
    one has."""
    if len(ids) <= longest:
        return ids
    ids = ids[-longest:].copy()
    prompt = int(np.argmax(ids < 0))
    if ids[prompt] >= 0:
        return None
    ids[:prompt] = ~ids[:prompt]
    return ids


def pack(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Which pairs share a row of `room` ids: the longest first, each into the row where the least is left over (best-fit
    decreasing), rows being kept in buckets by the room that they have left."""
    rows: list[list[int]] = []
    buckets: dict[int, list[int]] = {}
    left: list[int] = []  # the buckets that are not empty, in order
    for pair in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[pair])
        at = bisect.bisect_left(left, size)
        if at < len(left):
            free = left[at]
            row = buckets[free].pop()
            if not buckets[free]:
                del left[at]
            rows[row].append(pair)
        else:
            free, row = room, len(rows)
            rows.append([pair])
        if free > size:
            held = buckets.setdefault(free - size, [])
            if not held:
                bisect.insort(left, free - size)
            held.append(row)
    return rows


class _Coder:
    """Turns to ids, ~id where there is no loss; `words` say what is around them."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = load(path)
        self.vocab, self.end = vocab_of(self.tokenizer), end_of_text(self.tokenizer)
        names = {name: self.tokenizer.token_to_id(name) for name in (self.end, chat.START, chat.END) if name}
        self._ids = {name: i for name, i in names.items() if i is not None}
        self.is_chatml = {chat.START, chat.END} <= set(self._ids)
        if not self.is_chatml and self.end is None:
            raise UserError(f"tokenizer {path} has neither an end of text ({', '.join(ENDS)}) nor {chat.START} and "
                            f"{chat.END}: nothing would end an answer; take the tokenizer.json of the run to start from")
        # what a text has in it that looks like such a token is text: else an answer could end itself
        self.tokenizer.encode_special_tokens = True

    @property
    def words(self) -> str:
        if self.is_chatml:
            return f"{chat.START} and {chat.END} around every turn, as the tokenizer has them"
        return f'"### User:" and "### Assistant:" before each turn and {self.end} after each answer'

    def encode(self, chats: list[list[chat.Turn]]) -> list[np.ndarray]:
        around = chat.chatml if self.is_chatml else chat.plain
        pieces = [around(turns, self.end) for turns in chats]
        said = [p.text for p in itertools.chain(*pieces) if not p.is_token]
        encoded = iter(self.tokenizer.encode_batch_fast(said, add_special_tokens=False))
        found = []
        for of_chat in pieces:
            parts = []
            for p in of_chat:
                ids = np.array([self._ids[p.text]] if p.is_token else next(encoded).ids, np.int32)
                parts.append(ids if p.learned else ~ids)
            found.append(np.concatenate(parts))
        return found


def tokenize_pairs(named: Sequence[Path], out: Path, length: int, tokenizer_path: Path, is_packed: bool = False,
                   say=lambda line: None) -> dict:
    """Writes `out` with rows of `length` (see trainer.data.pairs), its sidecar and its tokenizer; returns the sidecar's
    facts, in which are how many pairs were `cut`, or left out because the answer alone is `too_long` or because it is
    `empty`.

    Each pair has a row of its own, or with `is_packed` as many share one as fit, each of which sees those before it, as
    documents do in a file of tokens; the rows then are in a random order. Nothing is written under the final names until
    all of it is there; UserError if `out` exists already, or for damaged lines.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name another --out, or remove it first")
    paths = texts.files(named, [out])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    coder = _Coder(tokenizer_path)
    scratch, temporary = (out.with_name(f"{out.name}.{what}.tmp") for what in ("ids", "rows"))
    kept = out.with_name(out.name + ".tokenizer.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lengths, lost = _encode_all(paths, coder, length + 1, scratch)
        if not len(lengths):
            raise UserError(f"{paths[0]}: of {lost['too_long'] + lost['empty']} answers none has text and fits a row of "
                            f"{length}; tokenize with a larger --length")
        packed = pack(lengths, length + 1)
        if is_packed:  # as they were packed, the last ones, which are held back to validate, would be the shortest
            rows = [packed[i] for i in np.random.default_rng(0).permutation(len(packed))]
        else:
            rows = [[pair] for pair in range(len(lengths))]
        answers = _write_rows(rows, lengths, np.memmap(scratch, np.int32, "r"), length + 1, coder.vocab, temporary)
        real = int(lengths.sum()) - len(rows)  # a row's first id is no target
        counts = PairCounts(length, len(rows), len(lengths), real, answers, len(rows) * length - real)
        facts = {"schema": SCHEMA, "kind": KIND, "dtype": "int32", "count": len(rows) * (length + 1), "vocab": coder.vocab,
                 "tokenizer": kept.name, "packed": is_packed, "template": coder.words, **asdict(counts), **lost}
        coder.tokenizer.save(str(kept))
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
    say(f"{counts.words()}; {coder.words}")
    if len(packed) < len(rows):
        say(f"--packed would need {len(packed):,} rows")
    for which, what in (("cut", "cut at the prompt's beginning"), ("empty", "left out: no text in the answer"),
                        ("too_long", f"left out: an answer of more than {length} tokens")):
        if lost[which]:
            say(f"{lost[which]:,} {what}")
    return facts | {"out": str(out), "tokenizer": str(kept)}


def _encode_all(paths: list[Path], coder: _Coder, longest: int, scratch: Path) -> tuple[np.ndarray, dict]:
    """Writes the ids of all pairs to `scratch`, one after the other; returns their lengths and how many lost something."""
    lengths, lost = [], {"cut": 0, "too_long": 0, "empty": 0}
    with open(scratch, "wb") as f:
        chats = itertools.chain.from_iterable(map(chat.read, paths))
        while some := list(itertools.islice(chats, TOGETHER)):
            answered = [chat for chat in some if any(t.role == "assistant" and t.text.strip() for t in chat)]
            lost["empty"] += len(some) - len(answered)
            for whole in coder.encode(answered):
                ids = cut(whole, longest)
                if ids is None:
                    lost["too_long"] += 1
                    continue
                lost["cut"] += len(ids) < len(whole)
                ids.tofile(f)
                lengths.append(len(ids))
    return np.array(lengths, np.int64), lost


def _write_rows(rows: list[list[int]], lengths: np.ndarray, ids: np.ndarray, width: int, vocab: int, path: Path) -> int:
    """Writes the rows, `width` ids each; returns the targets with the loss on them."""
    # an H200 adds the gradients of one id's rows one after another: half of all tokens the same took 1.3% of a step
    padding = ~(np.arange(width) % vocab)
    starts, answers = np.cumsum(lengths) - lengths, 0
    with open(path, "wb") as f:
        for first in range(0, len(rows), ROWS):
            some = rows[first:first + ROWS]
            block = np.tile(padding.astype("<i4"), (len(some), 1))
            for out, row in zip(block, some, strict=True):
                at = 0
                for pair in row:
                    size = lengths[pair]
                    out[at:at + size] = ids[starts[pair]:starts[pair] + size]
                    at += size
            answers += int((block[:, 1:] >= 0).sum())
            block.tofile(f)
        f.flush()
        os.fsync(f.fileno())
    return answers

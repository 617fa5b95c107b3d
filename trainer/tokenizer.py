"""Text to token file: a byte-level BPE, trained here or taken from a tokenizer.json."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.errors import UserError
from trainer.tokens import dtype_for, write_sidecar

END_OF_TEXT = "<|endoftext|>"
PIECE = 1 << 16
"""Characters encoded together: many pieces keep all cores busy, and a piece ends at a line's end."""


def read_texts(paths: list[Path]) -> Iterator[str | None]:
    """The texts in pieces of whole lines, then None at the end of each file; UserError for a file that is not UTF-8."""
    for path in paths:
        try:
            with open(path, encoding="utf-8", newline="") as f:
                while piece := "".join(f.readlines(PIECE)):
                    yield piece
        except UnicodeDecodeError as e:
            raise UserError(f"text {path} is not UTF-8 ({e.reason}); convert it, or leave it out") from None
        except OSError as e:
            raise UserError(f"text {path}: {e.strerror or e}") from None
        yield None


def load(path: Path | str):
    """The tokenizers.Tokenizer in a tokenizer.json; UserError if it can't be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"tokenizer {path} can't be read: {str(e).splitlines()[0]:.120}") from None


def train(paths: list[Path], vocab: int):
    """A byte-level BPE of `vocab` entries learned from the texts, the end-of-text token among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise UserError(f"--vocab {vocab} is too small: a byte-level BPE has 256 bytes and an end of text, 257 at least")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((piece for piece in read_texts(paths) if piece), trainer)
    return tokenizer


def tokenize(paths: list[Path], out: Path, vocab: int, tokenizer_path: Path | None = None,
             say=lambda line: None) -> dict:
    """Writes `out`, its sidecar and its tokenizer; returns {tokens, vocab, bytes, tokenizer}.

    Nothing is written under the final names until all of it is there; UserError if `out` exists already.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name another --out, or remove it first")
    texts = [p for p in paths if p.is_file()]
    missing = [str(p) for p in paths if not p.is_file()]
    if missing:
        raise UserError(f"text {missing[0]}: no such file")
    total = sum(p.stat().st_size for p in texts)
    if not total:
        raise UserError(f"text {texts[0]} is empty; give a file with text in it")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if tokenizer_path:
        tokenizer = load(tokenizer_path)
    else:
        say(f"training a byte-level BPE of {vocab} entries on {total / 1e6:.1f} MB of text")
        tokenizer = train(texts, vocab)
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END_OF_TEXT)
    temporary, kept = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".tokenizer.json")
    count = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            for encoded in _encode(tokenizer, texts, end):
                np.asarray(encoded, dtype_for(size)).tofile(f)
                count += len(encoded)
            f.flush()
            os.fsync(f.fileno())
        tokenizer.save(str(kept))
        write_sidecar(out, count, size, kept.name)
        os.replace(temporary, out)
    except UserError:
        raise
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"can't write {out}: {getattr(e, 'strerror', None) or e}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    say(f"{count} tokens of {size} kinds, {total / count:.2f} bytes each")
    return {"tokens": count, "vocab": size, "bytes": total, "tokenizer": str(kept), "out": str(out)}


def _encode(tokenizer, paths: list[Path], end: int | None) -> Iterator[list[int]]:
    pieces: list[str] = []

    def flush():
        encoded = [e.ids for e in tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        pieces.clear()
        return [i for ids in encoded for i in ids]

    for piece in read_texts(paths):
        if piece is not None:
            pieces.append(piece)
        if len(pieces) >= 64:
            yield flush()
        if piece is None:
            yield flush() + ([end] if end is not None else [])

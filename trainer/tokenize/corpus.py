"""`train tokenize`: texts to token files, in parallel, in bounded memory, and going on where it was stopped."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, write_atomic
from spillcliff.units import format_bytes, format_count
from trainer.data.tokens import dtype_for, write_sidecar
from trainer.tokenize import texts, tokenizer
from trainer.tokenize.encode import SIDES, TRAINING, VALIDATION, Batch, Item, encode
from trainer.tokenize.progress import SCHEMA, JobFiles, Progress, ProgressLine
from trainer.tokenize.source import Source, text_bytes, text_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEARN_BYTES = 100_000_000
"""Most bytes of text that a BPE is learned from: of 16,000 entries, 30 MB of Python sources gave 0.9% more bytes a token
than 10 MB, in four times the time."""
SAVE_S = 5
"""Seconds of work that a kill can cost."""
CHECK_S = 1
"""Seconds between pieces that are decoded again."""


@dataclass(frozen=True)
class CorpusOptions:
    """What to make a token file of. `texts` and `val` are files, folders and patterns, to train and to validate on; without
    `val`, `val_share` of the documents are validated on. The tokenizer is the one in `tokenizer`, or a BPE of `vocab`
    entries that is trained on the texts. `field` is the one of JSONL that holds the text, and `end` the token that ends a
    document, if they are not the usual ones."""

    texts: Sequence[Path]
    out: Path
    vocab: int = 32_000
    tokenizer: Path | None = None
    field: str | None = None
    end: str | None = None
    val_share: float = 0.0
    val: Sequence[Path] = ()


def tokenize(options: CorpusOptions, say: Say = ignore, update: Say = ignore) -> dict:
    """Writes `out`, its sidecar and its tokenizer, and with `val_share` or `val` the same for validation as OUT.val;
    returns {tokens, vocab, bytes, documents, tokenizer, out} and of the validation's {val, val_tokens, val_documents}.
    `update` takes lines of which each replaces the last.

    Nothing is written under the final names until all of it is there. A job that was stopped goes on when it is asked for
    again. UserError if `out` exists and is of another job, a text can't be read, or a file can't be written.
    """
    out, has_validation = options.out, bool(options.val_share or options.val)
    files = JobFiles([out, out.with_name(f"{out.stem}.val{out.suffix}")] if has_validation else [out])
    training = text_files(options.texts, files.outs)
    validation = text_files(options.val, files.outs) if options.val else []
    if both := {p.resolve() for p in training} & {p.resolve() for p in validation}:
        raise UserError(f"text {min(both)} is to train on and, by --val, to validate on; leave it out of one")
    job = _job_id(training, validation, options)
    if result := files.finished_result(job):
        files.remove_notes()
        say(f"{out} is there already, made from these very texts")
        return result
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.locked():
            return _Job(options, training, validation, files, Progress(job), say, update).run()
    except KeyboardInterrupt:
        say("stopped; the same command continues from here")
        raise
    except OSError as e:
        raise UserError(f"can't write {out}: {e.strerror or e}; the same command continues from where it was") from None


def side_of(text: str, share: float) -> int:
    """Whether a document that begins with the piece `text` is for TRAINING or VALIDATION: by its hash, so that one that is
    there twice is on one side only, whatever order the texts come in."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return VALIDATION if number < share * 2**64 else TRAINING


def _job_id(training: list[Path], validation: list[Path], options: CorpusOptions) -> str:
    """A hash of what a job is made of: its texts, as they are now, its tokenizer and options."""
    stamps = [[(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
              for paths in (training, validation)]
    vocab: int | str = options.vocab
    if options.tokenizer:
        try:
            vocab = hashlib.sha256(options.tokenizer.read_bytes()).hexdigest()
        except OSError as e:
            raise UserError(f"tokenizer {options.tokenizer} can't be read: {e.strerror or e}") from None
    values = [SCHEMA, stamps, vocab, options.field, options.end, options.val_share]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


class _Job:
    """One job at work."""

    def __init__(self, options: CorpusOptions, training: list[Path], validation: list[Path], files: JobFiles,
                 progress: Progress, say: Say, update: Say) -> None:
        self.options, self.files, self.progress, self.say, self.update = options, files, progress, say, update
        self.training, self.paths = training, training + validation
        self.read_bytes = 0  # of all files, as they lie on disk
        self.has_warned = False

    def run(self) -> dict:
        """Does what is not done yet; returns what `tokenize` does."""
        self._take_up()
        if not self.progress.through:
            try:
                self._make_parts()
            except UserError:  # what was written of texts that must be corrected first is of no use
                self.files.remove_all()
                raise
        return self._finish()

    def _take_up(self) -> None:
        """Goes back to what this job had written when it was stopped, or to nothing."""
        if not self.files.progress.exists():
            return
        self.progress = self.files.load(self.progress.job) or self.progress
        if any(self.progress.sizes):
            self.say(f"continuing from where it was stopped, after {format_bytes(self.progress.text_bytes)} of text")
        else:
            self.say(f"what is in {self.files.parts[0].name} is of another job, or of changed texts: starting again")

    def _make_parts(self) -> None:
        fields = [texts.field_of(path, self.options.field) for path in self.paths]
        coder = self._tokenizer(fields)
        end = tokenizer.end_of_text(coder, self.options.end)
        if end is None:
            self.say("warning: this tokenizer has no end-of-text token, so nothing is put between documents; name one with "
                     "--end")
        if self.options.val_share:
            self._check_has_documents(fields, end)
        self._write(coder, end, self._unwritten_items(fields, end))

    def _tokenizer(self, fields: list[str | None]) -> "Tokenizer":
        """The tokenizer: the one that was named, or is learned here, or that this job began with."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        part, final = self.files.tokenizer_part, self.files.tokenizer
        if not any(self.progress.sizes):
            if self.options.tokenizer:
                tokenizer.load(self.options.tokenizer)
                write_atomic(part, self.options.tokenizer.read_bytes())
            else:
                write_atomic(part, self._learn(fields).to_str(pretty=True).encode())
        if final.exists() and final.read_bytes() != part.read_bytes():
            raise UserError(f"{final} exists already and is another tokenizer; name another --out, or move it away")
        return tokenizer.load(part)

    def _learn(self, fields: list[str | None]) -> "Tokenizer":
        total = sum(map(text_bytes, self.training))
        spread = f", of {format_bytes(total)} spread evenly" if total > LEARN_BYTES else ""
        self.say(f"training a byte-level BPE of {self.options.vocab} entries on {format_bytes(min(total, LEARN_BYTES))} of "
                 f"text{spread}")
        sample = texts.sample(self.training, fields[:len(self.training)], LEARN_BYTES)
        return tokenizer.train(sample, self.options.vocab)

    def _check_has_documents(self, fields: list[str | None], end: str | None) -> None:
        """UserError if all texts are one document, which can't be split."""
        documents = 0
        for path, field in zip(self.paths, fields, strict=True):
            with Source(path) as source:
                for piece in texts.pieces(source, field, end):
                    documents += piece.starts
                    if documents > 1:
                        return
        raise UserError(f"text {self.paths[0]} is one document, which --val-share can't split; name others with --val FILE, "
                        f"put lines of {end} between its documents, or leave it out: train holds back the last hundredth")

    def _unwritten_items(self, fields: list[str | None], end: str | None) -> Iterator[Item]:
        before = sum(p.stat().st_size for p in self.paths[:self.progress.file])
        for file in range(self.progress.file, len(self.paths)):
            path, written = self.paths[file], self.progress.pieces if file == self.progress.file else 0
            is_split = self.options.val_share and file < len(self.training)
            side = TRAINING if file < len(self.training) else VALIDATION
            with Source(path) as source:
                for number, piece in enumerate(texts.pieces(source, fields[file], end), 1):
                    self.read_bytes = before + source.raw.tell()
                    if is_split and piece.starts:
                        side = side_of(piece.text, self.options.val_share)
                    if number > written:
                        yield Item(piece.text, piece.ends, side, file, number)
            before += path.stat().st_size

    def _write(self, coder: "Tokenizer", end: str | None, items: Iterator[Item]) -> None:
        """Encodes the items to the parts, saving the progress now and then."""
        end_id = coder.token_to_id(end) if end else None
        line = ProgressLine(sum(p.stat().st_size for p in self.paths), self.progress.text_bytes, self.update)
        check_due = time.monotonic()
        save_due = check_due + SAVE_S
        with contextlib.ExitStack() as stack:
            parts = [stack.enter_context(_open_part(part, size))
                     for part, size in zip(self.files.parts, self.progress.sizes, strict=False)]
            for batch in encode(coder, [] if end_id is None else [end_id], dtype_for(tokenizer.vocab_of(coder)), items):
                self._append(batch, parts)
                now = time.monotonic()
                if not self.has_warned and now >= check_due:
                    check_due = now + CHECK_S
                    self._check_decodes(coder, batch)
                if now >= save_due:
                    save_due = now + SAVE_S
                    self._save(parts)
                line.show(self.read_bytes, self.progress.text_bytes)
            if not all(self.progress.sizes[:len(parts)]):
                raise UserError(f"of {sum(self.progress.documents)} documents with text none is left to "
                                f"{'validate' if self.progress.sizes[TRAINING] else 'train'} on; add some, or change "
                                f"--val-share or --val")
            self.progress.through = True
            self._save(parts)

    def _append(self, batch: Batch, parts: list[IO[bytes]]) -> None:
        p = self.progress
        for side, part in zip(SIDES, parts, strict=False):
            batch.ids[side].tofile(part)
            p.sizes[side] += batch.ids[side].nbytes
            p.documents[side] += sum(item.ends for item in batch.items if item.side == side)
        p.text_bytes += sum(len(item.text.encode()) for item in batch.items)
        p.file, p.pieces = batch.items[-1].file, batch.items[-1].number

    def _check_decodes(self, coder: "Tokenizer", batch: Batch) -> None:
        if difference := tokenizer.difference(coder, batch.items[0].text, batch.first_ids):
            self.has_warned = True
            self.say(f"warning: this tokenizer loses something: {difference}")

    def _save(self, parts: list[IO[bytes]]) -> None:
        for part in parts:
            part.flush()
            os.fsync(part.fileno())
        try:
            self.files.save(self.progress)
        except UserError as e:
            raise OSError(str(e)) from None  # a full disk is no reason to throw away what is there

    def _finish(self) -> dict:
        """Puts everything in place, the file to train on last."""
        p, files = self.progress, self.files
        vocab = tokenizer.vocab_of(tokenizer.load(files.tokenizer_part))
        counts = [size // dtype_for(vocab).itemsize for size in p.sizes]
        result = {"tokens": counts[TRAINING], "vocab": vocab, "bytes": p.text_bytes, "documents": p.documents[TRAINING],
                  "tokenizer": str(files.tokenizer), "out": str(files.outs[TRAINING])}
        if len(files.outs) > 1:
            result |= {"val": str(files.outs[VALIDATION]), "val_tokens": counts[VALIDATION],
                       "val_documents": p.documents[VALIDATION]}
        write_atomic(files.tokenizer, files.tokenizer_part.read_bytes())
        for path, part, count in reversed(list(zip(files.outs, files.parts, counts, strict=False))):
            write_sidecar(path, count, vocab, files.tokenizer.name, job=p.job, result=result)
            if part.exists():  # one that is not there was renamed before a kill
                os.replace(part, path)
        files.remove_notes()
        held_back = ""
        if counts[VALIDATION]:
            held_back = (f"; {counts[VALIDATION]:,} in {format_count(p.documents[VALIDATION])} held back in "
                         f"{files.outs[VALIDATION]}")
        self.say(f"{counts[TRAINING]:,} tokens of {vocab} kinds in {format_count(p.documents[TRAINING])} documents, "
                 f"{p.text_bytes / sum(counts):.2f} bytes each{held_back}")
        return result


def _open_part(path: Path, size: int) -> IO[bytes]:
    """A part, cut to the bytes that are known to be whole, to append to."""
    f = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
    f.truncate(size)
    f.seek(size)
    return f

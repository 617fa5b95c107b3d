"""`train tokenize`: texts to token files, in parallel, in bounded memory, and going on where it was stopped."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from spillcliff.errors import UserError
from spillcliff.files import read_json, write_atomic, write_json
from spillcliff.units import format_bytes, format_count, format_duration
from trainer.data.tokens import dtype_for, sidecar, write_sidecar
from trainer.tokenize import texts, tokenizer
from trainer.tokenize.encode import Item, encoded

SCHEMA = 1
"""Of the progress file and of how texts are cut: what another version began is begun again."""
LEARN = 100_000_000
"""Most bytes of text that a BPE is learned from: of 16,000 entries, 30 MB of Python sources gave 0.9% more bytes a token
than 10 MB, in four times the time."""
SAVE_S = 5
"""Seconds of work that a kill can cost."""
CHECK_S = 1
"""Seconds between pieces that are decoded again."""


@dataclass
class Progress:
    """How far a job is: the file and the pieces of it that are written, and how much that came to."""

    job: str
    schema: int = SCHEMA
    file: int = 0
    pieces: int = 0
    sizes: list[int] = field(default_factory=lambda: [0, 0])
    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: int = 0
    through: bool = False


def side_of(text: str, share: float) -> int:
    """Where a document that begins with the piece `text` goes: to validation (1) by its hash, so that one that is there
    twice is on one side only, whatever order the texts come in."""
    return int(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") < share * 2**64)


def tokenize(named: Sequence[Path], out: Path, vocab: int, tokenizer_path: Path | None = None, field: str | None = None,
             end: str | None = None, val_share: float = 0.0, val: Sequence[Path] = (), say=lambda line: None,
             update=lambda line: None) -> dict:
    """Writes `out`, its sidecar and its tokenizer, and with `val_share` or `val` the same for validation as OUT.val;
    returns {tokens, vocab, bytes, tokenizer, out} and what was held back.

    Nothing is written under the final names until all of it is there. A job that was stopped goes on when it is asked for
    again. UserError if `out` exists and is of another job, or a text can't be read.
    """
    held_out = out.with_name(f"{out.stem}.val{out.suffix}")
    outs = [out, held_out] if val_share or val else [out]
    paths, held = texts.files(named, outs), texts.files(val, outs) if val else []
    if both := {p.resolve() for p in paths} & {p.resolve() for p in held}:
        raise UserError(f"text {min(both)} is to train on and, by --val, to validate on; leave it out of one")
    job = _job([paths, held], vocab, tokenizer_path, field, end, val_share)
    if done := _finished(outs, job):
        for left in _notes(out):
            left.unlink(missing_ok=True)
        say(f"{out} is there already, made from these very texts")
        return done
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            return _Job(paths, held, outs, job, say, update).run(vocab, tokenizer_path, field, end, val_share)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        raise
    except OSError as e:
        raise UserError(f"can't write {out}: {e.strerror or e}; the same command goes on from where it was") from None


def _job(paths: list[list[Path]], *how) -> str:
    """What a job is of: its texts, as they are now, its tokenizer and options."""
    seen = [[(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in some] for some in paths]
    vocab, tokenizer_path, *options = how
    if tokenizer_path:
        try:
            vocab = hashlib.sha256(Path(tokenizer_path).read_bytes()).hexdigest()
        except OSError as e:
            raise UserError(f"tokenizer {tokenizer_path} can't be read: {e.strerror or e}") from None
    return hashlib.sha256(json.dumps([SCHEMA, seen, vocab, *options]).encode()).hexdigest()


def _notes(out: Path) -> tuple[Path, Path]:
    """Where a job notes how far it is, and keeps its tokenizer."""
    return out.with_name(f"{out.name}.part.json"), out.with_name(f"{out.name}.part.tokenizer.json")


def _finished(outs: list[Path], job: str) -> dict | None:
    """What this very job gave when it was through; UserError if something else has its name."""
    for path in outs:
        facts = {}
        if path.exists():
            with contextlib.suppress(UserError):
                facts = read_json(sidecar(path), "token sidecar")
            if facts.get("job") != job:
                raise UserError(f"{path} exists already; name another --out, or remove it first")
    return read_json(sidecar(outs[0]), "token sidecar").get("result") if outs[0].exists() else None


@contextlib.contextmanager
def _alone(out: Path):
    from filelock import FileLock, Timeout

    lock = out.with_name(f"{out.name}.lock")
    try:
        with FileLock(lock).acquire(timeout=0):
            yield
    except Timeout:
        raise UserError(f"another process is writing {out}; wait for it, or name another --out") from None
    finally:
        with contextlib.suppress(OSError):  # under Windows the other one's can't be
            lock.unlink(missing_ok=True)


class _Job:
    """One job at work; `outs` are the files it writes, for training and, if wanted, for validation."""

    def __init__(self, paths: list[Path], held: list[Path], outs: list[Path], job: str, say, update) -> None:
        self.paths, self.training, self.outs, self.say, self.update = paths + held, len(paths), outs, say, update
        self.parts = [path.with_name(f"{path.name}.part") for path in outs]
        self.notes, self.coder_part = _notes(outs[0])
        self.coder_kept = outs[0].with_name(f"{outs[0].name}.tokenizer.json")
        self.progress = Progress(job)
        self.read_bytes = 0
        self.warned = False

    def run(self, vocab: int, tokenizer_path: Path | None, field: str | None, end: str | None, val_share: float) -> dict:
        self._take_up()
        if not self.progress.through:
            try:
                fields = [texts.field_of(path, field) for path in self.paths]
                coder = self._coder(vocab, tokenizer_path, fields)
                marker = tokenizer.end_of_text(coder, end)
                if marker is None:
                    self.say("warning: this tokenizer has no end-of-text token, so nothing is put between documents; name "
                             "one with --end")
                if val_share:
                    self._several_documents(fields, marker)
                self._write(coder, marker, fields, val_share)
            except UserError:  # what was written of texts that must be mended first is of no use
                for path in (*self.parts, self.notes, self.coder_part):
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                raise
        return self._finish()

    def _take_up(self) -> None:
        """Goes back to what this job had written when it was stopped, or to nothing."""
        if not self.notes.exists():
            return
        with contextlib.suppress(UserError, TypeError):
            before = Progress(**read_json(self.notes, "progress"))
            if (before.job, before.schema) == (self.progress.job, SCHEMA) and self.coder_part.is_file() and (
                    before.through or all(part.is_file() and part.stat().st_size >= size
                                          for part, size in zip(self.parts, before.sizes, strict=False))):
                self.progress = before
        if any(self.progress.sizes):
            self.say(f"going on from where it was stopped, after {format_bytes(self.progress.text_bytes)} of text")
        else:
            self.say(f"what is in {self.parts[0].name} is of another job, or of changed texts: starting again")

    def _coder(self, vocab: int, tokenizer_path: Path | None, fields: list[str | None]):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        if not any(self.progress.sizes):
            if tokenizer_path:
                tokenizer.load(tokenizer_path)
                write_atomic(self.coder_part, tokenizer_path.read_bytes())
            else:
                own = self.paths[:self.training]
                total = sum(map(texts.text_bytes, own))
                spread = f", of {format_bytes(total)} spread evenly" if total > LEARN else ""
                self.say(f"training a byte-level BPE of {vocab} entries on {format_bytes(min(total, LEARN))} of "
                         f"text{spread}")
                learned = tokenizer.train(texts.sample(own, fields[:self.training], LEARN), vocab)
                write_atomic(self.coder_part, learned.to_str(pretty=True).encode())
        if self.coder_kept.exists() and self.coder_kept.read_bytes() != self.coder_part.read_bytes():
            raise UserError(f"{self.coder_kept} exists already and is another tokenizer; name another --out, or move "
                            f"it away")
        return tokenizer.load(self.coder_part)

    def _several_documents(self, fields: list[str | None], marker: str | None) -> None:
        seen = 0
        for path, name in zip(self.paths, fields, strict=True):
            with texts.Source(path) as source:
                for piece in texts.pieces(source, name, marker):
                    seen += piece.starts
                    if seen > 1:
                        return
        raise UserError(f"text {self.paths[0]} is one document, which --val-share can't split; give --val FILE, put "
                        f"lines of {marker} between its documents, or leave it away: train holds back the last hundredth")

    def _items(self, fields: list[str | None], marker: str | None, val_share: float) -> Iterator[Item]:
        """What is not written yet."""
        before = sum(p.stat().st_size for p in self.paths[:self.progress.file])
        for file in range(self.progress.file, len(self.paths)):
            path, done = self.paths[file], self.progress.pieces if file == self.progress.file else 0
            held, side = file >= self.training, int(file >= self.training)
            with texts.Source(path) as source:
                for number, piece in enumerate(texts.pieces(source, fields[file], marker), 1):
                    self.read_bytes = before + source.raw.tell()
                    if val_share and piece.starts and not held:
                        side = side_of(piece.text, val_share)
                    if number > done:
                        yield Item(piece.text, piece.ends, side, file, number)
            before += path.stat().st_size

    def _write(self, coder, marker: str | None, fields: list[str | None], val_share: float) -> None:
        end = [coder.token_to_id(marker)] if marker else []
        dtype = dtype_for(tokenizer.vocab_of(coder))
        begin = saved = checked = time.monotonic()
        total, first_bytes = sum(p.stat().st_size for p in self.paths), self.progress.text_bytes
        fresh_at = None
        p = self.progress
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(part, "r+b" if part.exists() else "w+b")) for part in self.parts]
            for f, size in zip(files, p.sizes, strict=False):
                f.truncate(size)
                f.seek(size)
            for batch, sides, first in encoded(coder, end, dtype, self._items(fields, marker, val_share)):
                fresh_at = self.read_bytes if fresh_at is None else fresh_at
                for side, f in enumerate(files):
                    sides[side].tofile(f)
                    p.sizes[side] += sides[side].nbytes
                    p.documents[side] += sum(item.ends for item in batch if item.side == side)
                p.text_bytes += sum(len(item.text.encode()) for item in batch)
                p.file, p.pieces = batch[-1].file, batch[-1].number
                now = time.monotonic()
                if not self.warned and (checked == begin or now - checked > CHECK_S):
                    checked = now
                    self._check(coder, batch[0].text, first.ids)
                if now - saved > SAVE_S:
                    saved = now
                    self._save(files)
                self._tell(total, now - begin, p.text_bytes - first_bytes, fresh_at)
            if not all(p.sizes[:len(files)]):
                raise UserError(f"of {sum(p.documents)} documents with text none is left to "
                                f"{'validate' if p.sizes[0] else 'train'} on; give more, or another --val-share or --val")
            p.through = True
            self._save(files)

    def _check(self, coder, text: str, ids: list[int]) -> None:
        if words := tokenizer.lost(coder, text, ids):
            self.warned = True
            self.say(f"warning: this tokenizer loses something: {words}")

    def _save(self, files) -> None:
        for f in files:
            f.flush()
            os.fsync(f.fileno())
        try:
            write_json(self.notes, asdict(self.progress))
        except UserError as e:
            raise OSError(str(e)) from None  # a full disk is no reason to throw away what is there

    def _tell(self, total: int, seconds: float, text: int, fresh_at: int) -> None:
        share = min(1.0, self.read_bytes / total)
        left = seconds * (total - self.read_bytes) / max(1, self.read_bytes - fresh_at)
        ahead = f", {format_duration(max(0.0, left))} left" if self.read_bytes > fresh_at else ""
        self.update(f"[{'#' * round(20 * share):20}] {share:4.0%} of {format_bytes(total)}, "
                    f"{text / 1e6 / max(seconds, 1e-9):.1f} MB/s{ahead}")

    def _finish(self) -> dict:
        p, vocab = self.progress, tokenizer.vocab_of(tokenizer.load(self.coder_part))
        counts = [size // dtype_for(vocab).itemsize for size in p.sizes]
        result = {"tokens": counts[0], "vocab": vocab, "bytes": p.text_bytes, "documents": p.documents[0],
                  "tokenizer": str(self.coder_kept), "out": str(self.outs[0])}
        if len(self.outs) > 1:
            result |= {"val": str(self.outs[1]), "val_tokens": counts[1], "val_documents": p.documents[1]}
        write_atomic(self.coder_kept, self.coder_part.read_bytes())
        for path, part, count in reversed(list(zip(self.outs, self.parts, counts, strict=False))):
            write_sidecar(path, count, vocab, self.coder_kept.name, job=p.job, result=result)
            if part.exists():  # one that is not there was renamed before a kill
                os.replace(part, path)
        self.notes.unlink(missing_ok=True)
        self.coder_part.unlink(missing_ok=True)
        self.say(f"{counts[0]:,} tokens of {vocab} kinds in {format_count(p.documents[0])} documents, "
                 f"{p.text_bytes / sum(counts):.2f} bytes each"
                 + (f"; {counts[1]:,} in {format_count(p.documents[1])} held back in {self.outs[1]}" if counts[1] else ""))
        return result

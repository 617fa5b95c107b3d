"""What a run trains and validates on, and whether it is still the same."""

from collections.abc import Sequence
from pathlib import Path

from spillcliff.errors import UserError
from trainer.data.formats import open_tokens
from trainer.data.pairs import Pairs, counts_of
from trainer.data.tokens import Tokens
from trainer.plan import Plan, held_back


def open_data(plan: Plan, data: Sequence[Path], val: Sequence[Path] = (), keep: bool = True, dtype: str | None = None,
              column: str | None = None, say=lambda line: None) -> tuple[Tokens, Tokens] | tuple[Pairs, Pairs]:
    """Training and validation tokens, or pairs, every id checked against the plan's vocabulary. Without `val`, the last
    hundredth of the data (at least one window, at most what an evaluation reads) is kept for it. UserError if they don't
    suit. `keep` is Tokens.check's; `dtype`, `column` and `say` are open_tokens'."""
    length = plan.step.length
    tokens = _open(data, plan.model.vocab, keep, dtype, column, say)
    if val:
        held = _open(val, plan.model.vocab, keep, dtype, column, say)
        if type(held) is not type(tokens):
            raise UserError(f"{tokens.path} and {held.path}: one is of pairs and the other is not; make both with "
                            f"`train tokenize --pairs`, or neither")
        train, other = ({str(Path(path).resolve()) for path in t.paths} for t in (tokens, held))
        if both := sorted(train & other):
            raise UserError(f"token file {both[0]} is in both --data and --val; what is validated on must not be trained on")
    elif isinstance(tokens, Pairs):
        if tokens.windows(length) < 2:
            raise UserError(f"file of pairs {tokens.path} has one row; give two or more, or --val")
        tokens, held = tokens.split((held_back(len(tokens), plan.step) - 1) // length)
    else:
        if len(tokens.ids) < 2 * (length + 1):
            raise UserError(f"token file {tokens.path} has {len(tokens.ids)} tokens; at length {length} a window to train "
                            f"on and one to validate on take {2 * (length + 1)}: give more text, a shorter length, or --val")
        tokens, held = tokens.split(held_back(len(tokens.ids), plan.step))
    tokens.windows(length)
    held.windows(length)
    return tokens, held


def _open(paths: Sequence[Path], vocab: int, keep: bool, *how) -> Tokens | Pairs:
    of_pairs = [path for path in paths if counts_of(path)]
    if not of_pairs:
        tokens = open_tokens(paths, vocab, *how)
        tokens.check(vocab, keep)
        return tokens
    if len(paths) > 1:
        raise UserError(f"file of pairs {of_pairs[0]} goes alone; `train tokenize --pairs` makes one of several JSONL files")
    pairs = Pairs.open(of_pairs[0])
    pairs.check(vocab)
    return pairs


def answer_share(tokens: Tokens | Pairs) -> float | None:
    """Of the tokens that an epoch steps over, those that the loss is on; None where it is on all."""
    return tokens.answers / len(tokens) if isinstance(tokens, Pairs) else None


def identity(tokens: Tokens | Pairs) -> dict:
    """What tells one run of tokens from another: how many, of which vocabulary, and a checksum over all of them, the mask
    included."""
    answers = {"answers": tokens.answers} if isinstance(tokens, Pairs) else {}
    return {"tokens": len(tokens), "vocab": tokens.vocab, "crc32": tokens.checksum(), **answers}


def changes(before: dict | None, now: dict) -> str:
    """What of the data is not as it was, in words; "" if nothing is."""
    found = []
    for which, values in (before or {}).items():
        differ = [f"{name} {value!r:.40} -> {now[which].get(name)}" for name, value in values.items()
                  if now[which].get(name) != value]
        found += [f"{which} {', '.join(differ)}"] * bool(differ)
    return "; ".join(found)

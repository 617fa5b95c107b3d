"""What a run trains and validates on, and whether it is still the same."""

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import UserError
from trainer.formats import open_tokens
from trainer.plan import Plan, held_back
from trainer.tokens import Tokens


def open_data(plan: Plan, data: Sequence[Path], val: Sequence[Path] = (), keep: bool = True, dtype: str | None = None,
              column: str | None = None, say=lambda line: None) -> tuple[Tokens, Tokens]:
    """Training and validation tokens, every id checked against the plan's vocabulary. Without `val`, the last hundredth
    of the data (at least one window, at most what an evaluation reads) is kept for it. UserError if they don't suit.
    `keep` is Tokens.check's; `dtype`, `column` and `say` are open_tokens'."""
    length = plan.step.length
    tokens = open_tokens(data, plan.model.vocab, dtype, column, say)
    tokens.check(plan.model.vocab, keep)
    if val:
        held = open_tokens(val, plan.model.vocab, dtype, column, say)
        held.check(plan.model.vocab, keep)
        train, other = ({str(Path(s.path).resolve()) for s in t.shards or (t,)} for t in (tokens, held))
        if both := sorted(train & other):
            raise UserError(f"token file {both[0]} is in both --data and --val; what is validated on must not be trained on")
    else:
        if len(tokens.ids) < 2 * (length + 1):
            raise UserError(f"token file {tokens.path} has {len(tokens.ids)} tokens; at length {length} a window to train "
                            f"on and one to validate on take {2 * (length + 1)}: give more text, a shorter length, or --val")
        tokens, held = tokens.split(held_back(len(tokens.ids), plan.step))
    tokens.windows(length)
    held.windows(length)
    return tokens, held


def identity(tokens: Tokens) -> dict:
    """What tells one run of tokens from another: how many, of which vocabulary, and a checksum over all of them."""
    return {"tokens": len(tokens.ids), "vocab": tokens.vocab, "crc32": tokens.checksum()}


def changes(before: dict | None, now: dict) -> str:
    """What of the data is not as it was, in words; "" if nothing is."""
    found = []
    for which, values in (before or {}).items():
        differ = [f"{name} {value!r:.40} -> {now[which][name]}" for name, value in values.items()
                  if now[which][name] != value]
        found += [f"{which} {', '.join(differ)}"] * bool(differ)
    return "; ".join(found)

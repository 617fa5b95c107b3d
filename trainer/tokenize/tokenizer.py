"""Tokenizers: a byte-level BPE learned here, or a tokenizer.json."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from spillcliff.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What tokenizers call the end of a text: GPT-2 and ours, Llama 3, Llama 2, Gemma; the first that one has is taken."""


def load(path: Path | str) -> "Tokenizer":
    """The tokenizer in a tokenizer.json, which neither truncates nor pads here; UserError if it can't be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"tokenizer {path} can't be read: {str(e).splitlines()[0]:.120}") from None
    tokenizer.no_truncation()  # files made for BERT and others cut at 512
    tokenizer.no_padding()
    return tokenizer


def train(texts: Iterable[str], vocab: int) -> "Tokenizer":
    """A byte-level BPE of up to `vocab` entries learned from the texts, the end-of-text token among them. UserError for
    fewer than 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise UserError(f"--vocab {vocab} is too small: a byte-level BPE has 256 bytes and an end of text, 257 at least")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def vocab_of(tokenizer: "Tokenizer") -> int:
    """The highest id plus one: some leave gaps, so that the number of entries is less."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text(tokenizer: "Tokenizer", asked: str | None = None) -> str | None:
    """The token that ends a text: `asked`, or the first of ENDS among the tokenizer's special ones; None if it has none.
    UserError if it lacks the one that was asked for."""
    if asked is not None:
        if tokenizer.token_to_id(asked) is None:
            special = ", ".join(_special_tokens(tokenizer)[:8]) or "no special ones"
            raise UserError(f"--end {asked!r} is not a token of this tokenizer; it has {special}")
        return asked
    names = _special_tokens(tokenizer)
    return next((name for name in ENDS if name in names), None)


def _special_tokens(tokenizer: "Tokenizer") -> list[str]:
    return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]


def difference(tokenizer: "Tokenizer", text: str, ids: list[int]) -> str | None:
    """Where decoding `ids` gives another text than `text`, from which they were encoded, in words; None if it gives the
    same."""
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    if decoded == text:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), min(len(text), len(decoded)))
    around = slice(max(0, at - 10), at + 20)
    return f"{text[around]!r} comes back as {decoded[around]!r}"

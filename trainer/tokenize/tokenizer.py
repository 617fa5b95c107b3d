"""Tokenizers: a byte-level BPE learned here, or a tokenizer.json."""

from collections.abc import Iterable
from pathlib import Path

from spillcliff.errors import UserError

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What tokenizers call the end of a text: GPT-2 and ours, Llama 3, Llama 2, Gemma; the first that one has is taken."""


def load(path: Path | str):
    """The tokenizers.Tokenizer in a tokenizer.json, that neither cuts nor pads; UserError if it can't be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exceptions
        raise UserError(f"tokenizer {path} can't be read: {str(e).splitlines()[0]:.120}") from None
    tokenizer.no_truncation()  # files made for BERT and others cut at 512
    tokenizer.no_padding()
    return tokenizer


def train(texts: Iterable[str], vocab: int):
    """A byte-level BPE of `vocab` entries learned from the texts, the end-of-text token among them."""
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


def vocab_of(tokenizer) -> int:
    """The highest id and one: some leave gaps, so that the number of entries is less."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_text(tokenizer, asked: str | None = None) -> str | None:
    """The token that ends a text: `asked`, or the first of ENDS among the tokenizer's special ones; None if it has none.
    UserError if it lacks the one that was asked for."""
    if asked is not None:
        if tokenizer.token_to_id(asked) is None:
            there = ", ".join(_special(tokenizer)[:8]) or "no special ones"
            raise UserError(f"--end {asked!r} is no token of this tokenizer; it has {there}")
        return asked
    special = _special(tokenizer)
    return next((name for name in ENDS if name in special), None)


def _special(tokenizer) -> list[str]:
    return [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]


def lost(tokenizer, text: str, ids: list[int]) -> str | None:
    """Where decoding gives another text than was encoded, in words; None if it gives the same."""
    back = tokenizer.decode(ids, skip_special_tokens=False)
    if back == text:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    here = slice(max(0, at - 10), at + 20)
    return f"{text[here]!r} comes back as {back[here]!r}"

"""Text out of a run or of an exported folder, and out of a run while it trains."""

import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from spillcliff.errors import UserError
from spillcliff.failures import failure, is_out_of_memory
from spillcliff.files import Say, ignore, read_json
from spillcliff.hardware.device import lock_fp32
from spillcliff.units import format_bytes
from trainer.config import ModelConfig
from trainer.huggingface import weights
from trainer.huggingface.config_json import CONFIG
from trainer.model.decoder import Decoder
from trainer.model.generate import KVCache, Sampling, generate
from trainer.run.log import RunLog
from trainer.run_folder import RunFolder
from trainer.tokenize import tokenizer as tokenizers

if TYPE_CHECKING:  # 4 MB, of which a run without --sample needs none
    from tokenizers import Tokenizer

SAMPLE_TOKENS = 64
"""Most tokens of a text that is written at an evaluation."""
CONTEXT, LONGEST = 8, 32
"""Tokens that are decoded again with each new one, so that no character is cut: at least and at most."""
BROKEN = "\ufffd"
"""What a decoder gives for bytes that are no character, or not yet."""


def printable(text: str) -> str:
    """The text without what would steer a terminal: a model makes any character there is."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else BROKEN for c in text)


class StreamDecoder:
    """The text of tokens as they come, in pieces of whole characters; a byte-level tokenizer splits characters."""

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int]) -> None:
        self._tokenizer, self._ids = tokenizer, prompt[-CONTEXT:]
        self._told = len(tokenizer.decode(self._ids))

    def add(self, token: int) -> str:
        """What is certain now and was not told before; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        piece = text.rstrip(BROKEN)[self._told:]
        self._told += len(piece)
        if len(self._ids) >= LONGEST and self._told == len(text):
            self._ids = self._ids[-CONTEXT:]
            self._told = len(self._tokenizer.decode(self._ids))
        return piece

    def end(self) -> str:
        """What the end of the text leaves of a character."""
        return self._tokenizer.decode(self._ids)[self._told:]


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer. `ends` are the ids that end a text, `length` what it was trained at; `adds_special` says
    that prompts begin with what the tokenizer's post-processor adds."""

    model: Decoder
    tokenizer: "Tokenizer"
    ends: frozenset[int]
    length: int
    adds_special: bool = False

    @classmethod
    def of_run(cls, run: RunFolder, device: torch.device, which: str = "best", say: Say = ignore) -> "TextModel":
        """A run's checkpoint, `which` as in checkpoint.select; UserError if it has none such or no tokenizer."""
        plan = run.load_plan()
        if not run.tokenizer.is_file():
            raise UserError(f"run {run.path} has no tokenizer.json: its token file named no tokenizer, so text can't be "
                            f"read")
        tokenizer = tokenizers.load(run.tokenizer)
        source = weights.RunWeights(run, which, say)
        if source.step < (newest := run.checkpoint_steps()[-1]):
            say(f"the checkpoint of step {source.step} is taken ({which}); the newest is of step {newest}")
        model = _filled(source, device)
        return cls(model, tokenizer, end_ids(tokenizer), plan.step.length)

    @classmethod
    def of_folder(cls, folder: Path, device: torch.device) -> "TextModel":
        """An exported folder, or another Llama-like model's; UserError for one that can't be read."""
        source = weights.HubWeights(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"folder {folder} has no tokenizer.json, so text can't be read")
        tokenizer = tokenizers.load(folder / "tokenizer.json")
        generation = folder / "generation_config.json"
        config = read_json(folder / CONFIG, "model config")
        told = (read_json(generation, "generation config") if generation.is_file() else config).get("eos_token_id")
        ends = frozenset(i for i in (told if isinstance(told, list) else [told]) if type(i) is int)
        length = config.get("max_position_embeddings")
        return cls(_filled(source, device), tokenizer, ends or end_ids(tokenizer),
                   length if type(length) is int else 2048, True)

    def ids(self, prompt: str) -> list[int]:
        """The prompt's tokens, an end of text for an empty one."""
        return encode_prompt(self.tokenizer, prompt, self.model.config, self.adds_special)


def end_ids(tokenizer: "Tokenizer") -> frozenset[int]:
    """The id of the tokenizer's end of text; empty if it has none."""
    end = tokenizers.end_of_text(tokenizer)
    index = tokenizer.token_to_id(end) if end else None
    return frozenset() if index is None else frozenset({index})


def check_text(prompt: str) -> None:
    """UserError for what is no text: bytes that were no UTF-8 on the command line, half a surrogate pair under Windows."""
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        shown = printable(prompt.encode(errors="replace").decode())
        raise UserError(f"the prompt {shown!r:.60} is not UTF-8 text: its character {e.start + 1} is a byte of something "
                        f"else; save or type it as UTF-8") from None


def encode_prompt(tokenizer: "Tokenizer", prompt: str, model: ModelConfig, adds_special: bool = False) -> list[int]:
    """A prompt's ids, an end of text for an empty one; UserError as check_text's, and for an id that `model` has no row
    for."""
    check_text(prompt)
    ids = tokenizer.encode(prompt, add_special_tokens=adds_special).ids or [*end_ids(tokenizer), 0][:1]
    if max(ids) >= model.vocab:
        raise UserError(f"the tokenizer's id {max(ids)} is past the vocabulary of {model.vocab}: it is another model's")
    return ids


def _filled(source: weights.Source, device: torch.device) -> Decoder:
    lock_fp32()
    model = Decoder(source.model, 1, device)
    weights.load(source, model)
    return model


def write_texts(model: TextModel, prompts: Sequence[str], count: int, sampling: Sampling,
                show: Callable[[int, str], None] = lambda row, piece: None, say: Say = ignore) -> list[str]:
    """Each prompt with up to `count` tokens more; `show` is told each row's prompt, and its pieces as they come. UserError
    if memory is too small."""
    ids = [model.ids(p) for p in prompts]
    if (longest := max(map(len, ids)) + count) > model.length:
        say(f"note: up to {longest} tokens, and the model was trained on {model.length} at a time; past them it gets worse")
    _check_memory(model.model, len(ids), longest)
    decoders, texts = [StreamDecoder(model.tokenizer, prompt) for prompt in ids], list(prompts)

    def add(row: int, piece: str) -> None:
        texts[row] += piece
        show(row, piece)

    for row, prompt in enumerate(prompts):
        show(row, prompt)
    try:
        generate(model.model, ids, count, sampling, model.ends, lambda row, token: add(row, decoders[row].add(token)))
    except Exception as e:
        if not is_out_of_memory(*failure(e)):
            raise
        raise UserError(f"out of memory at {len(ids)} texts of up to {longest} tokens; ask for fewer or shorter") from None
    for row, decoder in enumerate(decoders):
        add(row, decoder.end())
    return texts


def _check_memory(model: Decoder, rows: int, tokens: int) -> None:
    """UserError if a processor's memory has no room for what is kept of so many tokens: its system gives what there is
    not, and then kills who uses it."""
    if model.embedding.device.type != "cpu":
        return
    needed, free = KVCache.bytes_of(model.config, rows, tokens), psutil.virtual_memory().available
    if needed > free:
        raise UserError(f"{rows} text{'s' * (rows > 1)} of up to {tokens:,} tokens take {format_bytes(needed)} of memory, "
                        f"and {format_bytes(free)} are free; ask for fewer --tokens")


class Sampler:
    """Writes texts with a model that is being trained, always with the same seeds; nothing of the training is touched."""

    def __init__(self, prompts: Sequence[str], path: str | None, model: ModelConfig) -> None:
        """UserError if there is no tokenizer at `path`."""
        if path is None or not Path(path).is_file():
            raise UserError(f"--sample needs the tokenizer that made the token file, and {path or 'its sidecar names none'}"
                            + " is not there" * (path is not None))
        self._tokenizer = tokenizers.load(path)
        self.prompts = tuple(prompts)
        for prompt in prompts:
            encode_prompt(self._tokenizer, prompt, model)

    def show(self, model: Decoder, step: int, log: RunLog, say: Say) -> float:
        """Writes each prompt's text to the log and shows it; returns the seconds that took. Too little memory for it is
        told, and no more."""
        begin = time.perf_counter()
        try:
            text_model = TextModel(model, self._tokenizer, end_ids(self._tokenizer), 0)
            texts = write_texts(text_model, self.prompts, SAMPLE_TOKENS, Sampling())
        except UserError as e:
            say(f"no sample after step {step}: {e}")
            texts = []
        seconds = time.perf_counter() - begin
        for prompt, text in zip(self.prompts, texts, strict=False):
            log.write("sample", step, prompt=prompt, text=text[len(prompt):], seconds=seconds)
            say(textwrap.indent(printable(text), "  ", lambda line: True).replace("  ", "sample: ", 1))
        return time.perf_counter() - begin

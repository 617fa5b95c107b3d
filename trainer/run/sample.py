"""Text out of a run or of an exported folder, and out of a run while it trains."""

import json
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spillcliff.errors import UserError, is_out_of_memory
from spillcliff.files import read_json
from spillcliff.hardware.device import lock_fp32
from trainer.config import ModelConfig
from trainer.huggingface import weights
from trainer.huggingface.config_json import CONFIG
from trainer.model.decoder import Decoder
from trainer.model.generate import Draw, generate
from trainer.plan import Plan
from trainer.run.log import RunLog
from trainer.tokenize import tokenizer

SAMPLE_TOKENS = 64
"""Most tokens of a text that is written at an evaluation."""
CONTEXT, LONGEST = 8, 32
"""Tokens that are decoded again with each new one, so that no character is cut: at least and at most."""
BROKEN = "\ufffd"
"""What a decoder gives for bytes that are no character, or not yet."""


def printable(text: str) -> str:
    """The text without what would steer a terminal: a model makes any character there is."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else BROKEN for c in text)


class Pieces:
    """The text of tokens as they come, in pieces of whole characters; a byte-level tokenizer splits characters."""

    def __init__(self, coder, prompt: list[int]) -> None:
        self._coder, self._ids = coder, prompt[-CONTEXT:]
        self._told = len(coder.decode(self._ids))

    def add(self, token: int) -> str:
        """What is certain now and was not told before; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._coder.decode(self._ids)
        piece = text.rstrip(BROKEN)[self._told:]
        self._told += len(piece)
        if len(self._ids) >= LONGEST and self._told == len(text):
            self._ids = self._ids[-CONTEXT:]
            self._told = len(self._coder.decode(self._ids))
        return piece

    def rest(self) -> str:
        """What the end of the text leaves of a character."""
        return self._coder.decode(self._ids)[self._told:]


@dataclass(frozen=True)
class Writer:
    """A model with its tokenizer. `ends` are the ids that end a text, `length` what it was trained at; `is_marked` says that
    prompts begin with what the tokenizer's post-processor adds."""

    model: Decoder
    coder: object
    ends: frozenset[int]
    length: int
    is_marked: bool = False

    @classmethod
    def of_run(cls, run: Path, device: torch.device, say=lambda line: None) -> "Writer":
        """A run's newest checkpoint; UserError if it has none or no tokenizer."""
        if not (run / "plan.json").is_file():
            raise UserError(f"run {run} holds no plan.json; name a folder that `train` made, such as results/runs/...")
        if not (run / "tokenizer.json").is_file():
            raise UserError(f"run {run} has no tokenizer.json: its token file named no tokenizer, so text can't be read")
        coder = tokenizer.load(run / "tokenizer.json")
        length = Plan.load(run / "plan.json").step.length
        model = _filled(weights.RunWeights(run, "newest", say), device)
        return cls(model, coder, ends_of(coder), length)

    @classmethod
    def of_folder(cls, folder: Path, device: torch.device) -> "Writer":
        """An exported folder, or another Llama-like model's; UserError for one that can't be read."""
        source = weights.HubWeights(folder)
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"folder {folder} has no tokenizer.json, so text can't be read")
        coder = tokenizer.load(folder / "tokenizer.json")
        generation = folder / "generation_config.json"
        config = read_json(folder / CONFIG, "model config")
        told = (read_json(generation, "generation config") if generation.is_file() else config).get("eos_token_id")
        ends = frozenset(i for i in (told if isinstance(told, list) else [told]) if type(i) is int)
        length = config.get("max_position_embeddings")
        return cls(_filled(source, device), coder, ends or ends_of(coder), length if type(length) is int else 2048, True)

    def ids(self, prompt: str) -> list[int]:
        """The prompt's tokens, an end of text for an empty one."""
        return encoded(self.coder, prompt, self.model.config, self.is_marked)


def ends_of(coder) -> frozenset[int]:
    ends = tokenizer.end_of_text(coder)
    return frozenset({coder.token_to_id(ends)}) if ends else frozenset()


def encoded(coder, prompt: str, model: ModelConfig, is_marked: bool = False) -> list[int]:
    ids = coder.encode(prompt, add_special_tokens=is_marked).ids or [*ends_of(coder), 0][:1]
    if max(ids) >= model.vocab:
        raise UserError(f"the tokenizer's id {max(ids)} is past the vocabulary of {model.vocab}: it is another model's")
    return ids


def _filled(source, device: torch.device) -> Decoder:
    lock_fp32()
    model = Decoder(source.model, 1, device)
    weights.load(source, model)
    return model


def write(writer: Writer, prompts: Sequence[str], count: int, draw: Draw, show=lambda row, piece: None,
          say=lambda line: None) -> list[str]:
    """Each prompt with up to `count` tokens more; `show` is told each row's pieces as they come. UserError if memory is too
    small."""
    ids = [writer.ids(p) for p in prompts]
    if (longest := max(map(len, ids)) + count) > writer.length:
        say(f"note: up to {longest} tokens, and the model was trained on {writer.length} at a time; past them it gets worse")
    pieces, texts = [Pieces(writer.coder, begin) for begin in ids], list(prompts)

    def add(row: int, piece: str) -> None:
        texts[row] += piece
        show(row, piece)

    try:
        generate(writer.model, ids, count, draw, writer.ends, lambda row, token: add(row, pieces[row].add(token)))
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(type(e).__name__, str(e)):
            raise
        raise UserError(f"out of memory at {len(ids)} texts of up to {longest} tokens; ask for fewer or shorter") from None
    for row, left in enumerate(pieces):
        add(row, left.rest())
    return texts


class Sampler:
    """Writes texts with a model that is being trained, always with the same seeds; nothing of the training is touched."""

    def __init__(self, prompts: Sequence[str], path: str | None, model: ModelConfig) -> None:
        """UserError if there is no tokenizer at `path`."""
        if path is None or not Path(path).is_file():
            raise UserError(f"--sample needs the tokenizer that made the token file, and {path or 'its sidecar names none'}"
                            + " is not there" * (path is not None))
        self._coder = tokenizer.load(path)
        self.prompts = tuple(prompts)
        for prompt in prompts:
            encoded(self._coder, prompt, model)

    def show(self, model: Decoder, step: int, log: RunLog, say) -> float:
        """Writes each prompt's text to the log and shows it; returns the seconds that took. Too little memory for it is
        told, and no more."""
        begin = time.perf_counter()
        try:
            texts = write(Writer(model, self._coder, ends_of(self._coder), 0), self.prompts, SAMPLE_TOKENS, Draw())
        except UserError as e:
            say(f"no sample after step {step}: {e}")
            texts = []
        seconds = time.perf_counter() - begin
        for prompt, text in zip(self.prompts, texts, strict=False):
            log.write("sample", step, prompt=prompt, text=text[len(prompt):], seconds=seconds)
            say(f"sample: {json.dumps(text, ensure_ascii=False)}")
        return time.perf_counter() - begin

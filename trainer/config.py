"""Shapes and settings as plain data, and what follows from them by arithmetic alone. Imports no torch."""

import dataclasses
import math
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args

from spillcliff.errors import UserError
from spillcliff.schema import Number, check
from spillcliff.units import format_count, parse_count

VOCAB = 32_000
"""Vocabulary at which a size's name is true (Llama's 32,000)."""

SIZES = ("1M", "2M", "5M", "10M", "20M", "50M", "100M", "150M", "200M", "300M", "500M", "700M", "1B")
"""The named sizes; `ModelConfig.named` takes any other from 0.7M up as well."""

DEPTH_TO_WIDTH = 40
"""Width over depth that `shape_for` aims at: GPT-2 has 64, MobileLLM (arXiv 2402.14905) 19 at 125M, and Kaplan et al.
(arXiv 2001.08361, fig. 5) find the loss within 1% from 20 to 100."""

LR_FLOOR = 0.1
"""The cosine ends at a tenth of the peak (Hoffmann et al., arXiv 2203.15556, app. B)."""

LARGEST_LR = 5e-3
"""The largest peak rate that Step Law (Li et al., arXiv 2503.04715) was fitted on: plans take none above it."""

Engine = Literal["eager", "graph", "compile"]
Recompute = Literal["none", "elementwise", "block"]
Update = Literal["after", "backward"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)

Count = Annotated[int, Number(1, 2**31)]
"""A whole number of 1 or more."""

_NAME = re.compile(r"[\w.+-]{0,64}")
"""What a model may be called: runs' folders and pictures bear the name."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape: RMSNorm, RoPE, SwiGLU, grouped-query attention, tied embeddings, no biases.

    Raises UserError for a shape that can't be, with what would be right.
    """

    name: str
    layers: Count
    d_model: Count
    heads: Count
    kv_heads: Count
    d_ff: Count
    vocab: Count = VOCAB
    rope_base: Annotated[float, Number(above=True)] = 10_000.0
    norm_eps: Annotated[float, Number(above=True)] = 1e-5

    def __post_init__(self) -> None:
        thing = f"model {self.name}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UserError(f"model name {self.name!r:.40} must be short text that may be in a file's name, such as 150M")
        check(self, thing)
        if self.d_model % self.heads:
            raise UserError(f"{thing}: d_model {self.d_model} is not divisible by {self.heads} heads; "
                            f"{_divisors(self.d_model)} heads would divide it")
        if self.head_size % 2:
            raise UserError(f"{thing}: the head size {self.d_model} / {self.heads} = {self.head_size} is odd, and RoPE "
                            f"turns pairs; d_model {self.heads * (self.head_size + 1)} would give an even one")
        if self.heads % self.kv_heads:
            raise UserError(f"{thing}: {self.heads} heads can't share {self.kv_heads} kv heads evenly; "
                            f"{_divisors(self.heads)} kv heads would do")

    @property
    def head_size(self) -> int:
        return self.d_model // self.heads

    @cached_property
    def parameters(self) -> int:
        """Number of trained weights; the tied embedding counts once."""
        kv = self.kv_heads * self.head_size
        attention = 2 * self.d_model * self.d_model + 2 * self.d_model * kv
        layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return self.layers * layer + self.vocab * self.d_model + self.d_model

    @property
    def body_parameters(self) -> int:
        """Parameters without the embedding: the N of scaling laws."""
        return self.parameters - self.vocab * self.d_model

    def flops_per_token(self, length: int) -> int:
        """FLOPs of forward and backward for one token of a sequence of `length`.

        6 per weight of each matrix product (2 forward, 4 backward), the output head included, and causal attention:
        QK' and AV cost 2 x 2 x d_model x length forward if every key were seen, half of that with the causal mask, and
        three times the forward in all (Kaplan et al., arXiv 2001.08361, table 1; the mask's half as in PaLM, app. B).
        """
        norms = self.layers * 2 * self.d_model + self.d_model
        return 6 * (self.parameters - norms) + 6 * self.layers * length * self.d_model

    @classmethod
    def named(cls, name: str, vocab: int = VOCAB) -> "ModelConfig":
        """The shape called `name` ("150M", "80M", "1B"). The name is the number of parameters at a vocabulary of
        32,000; another `vocab` keeps the shape and changes the embedding only. UserError for a size out of range."""
        shape = shape_for(parse_count(name, "model"), str(name).strip())
        return dataclasses.replace(shape, vocab=vocab)


def _divisors(n: int) -> str:
    """The divisors of n as a user would choose among them: "1, 2, 3, 4, 6 or 12"."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    divisors = [str(k) for k in sorted({*low, *(n // k for k in low)})][:8]
    return divisors[0] if len(divisors) == 1 else ", ".join(divisors[:-1]) + " or " + divisors[-1]


@lru_cache
def shape_for(parameters: int, name: str) -> ModelConfig:
    """The rule of depth to width: of all shapes within 2% of `parameters` at a vocabulary of 32,000, the one whose
    width over depth is nearest to 40.

    Widths are multiples of 128 from 512 on (heads of 64), of 32 from 64 on (heads of 32), else of 4 (one head); the
    feed-forward is 8/3 of the width (Llama); a third of the heads, or the next smaller divisor, keep keys and values.
    """
    best, best_distance = None, math.inf
    for d_model in [*range(16, 64, 4), *range(64, 512, 32), *range(512, 16_385, 128)]:
        head_size = 64 if d_model >= 512 else 32 if d_model >= 64 else d_model
        heads = d_model // head_size
        kv_heads = max(k for k in range(1, heads + 1) if heads % k == 0 and (k == 1 or 3 * k <= heads))
        grain = 64 if d_model >= 256 else 16
        d_ff = max(grain, round(8 * d_model / 3 / grain) * grain)
        one = ModelConfig(name, 1, d_model, heads, kv_heads, d_ff)
        two = dataclasses.replace(one, layers=2)
        layers = round((parameters - one.parameters) / (two.parameters - one.parameters)) + 1
        if layers < 4:
            continue
        shape = dataclasses.replace(one, layers=layers)
        distance = abs(math.log(d_model / layers / DEPTH_TO_WIDTH))
        if abs(shape.parameters / parameters - 1) <= 0.02 and distance < best_distance:
            best, best_distance = shape, distance
    if best is None:
        raise UserError(f"model {name!r:.60}: no shape has {format_count(parameters)} parameters; "
                        f"take a size from 0.7M to 100B, such as {', '.join(SIZES)}")
    return best


def half_batch(batch: int) -> int | None:
    """The largest batch of at most half, of which whole ones make the same sequences; None if there is none."""
    return next((b for b in range(batch // 2, 0, -1) if batch % b == 0), None)


@dataclass(frozen=True)
class StepConfig:
    """One optimizer step: `accum` micro-steps over `batch` sequences of `length` tokens each. `update` says when
    parameters are updated: after the backward pass, or in it, as soon as each gradient is there, which then is freed.

    A new option is a field here, with what a command's --help says of it; commands, names, records and plans have it then.
    UserError for values that can't be.
    """

    batch: Count
    length: Count
    accum: Count = 1
    engine: Engine = field(default="eager", metadata={"help": "eager, graph or compile."})
    recompute: Recompute = field(default="none", metadata={"help": "none, elementwise or block."})
    update: Update = field(default="after", metadata={
        "help": "Update parameters after the backward pass, or in it: no accumulation and no clip, less memory."})

    def __post_init__(self) -> None:
        check(self, "step")

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.batch * self.length * self.accum

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.batch * self.accum

    @property
    def micro_tokens(self) -> int:
        """Tokens per micro-step."""
        return self.batch * self.length

    def unusual(self) -> dict[str, Any]:
        """The options, accumulation among them, that are not at their defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                if f.default is not dataclasses.MISSING and getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        """`"B=4 L=512 accum=2 graph/none"`: what is usual is left out."""
        extra = self.unusual()
        words = [f"B={self.batch} L={self.length}"] + [f"accum={self.accum}"] * ("accum" in extra)
        if extra.keys() & {"engine", "recompute"}:
            words.append(f"{self.engine}/{self.recompute}")
        return " ".join(words + [f"{name}={value}" for name, value in extra.items()
                                 if name not in ("accum", "engine", "recompute")])


STEP_OPTIONS = tuple(f for f in dataclasses.fields(StepConfig) if "help" in f.metadata)
"""The fields of a step that are chosen by name, such as its engine."""


def clip_for(step: StepConfig) -> float | None:
    """The clip that a plan for this step has, GPT-3's 1.0, or None where updates come before the norm is known."""
    return None if step.update == "backward" else 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; `lr` is the peak, `warmup_steps` in optimizer steps, `clip` the global gradient norm, None
    for no clip. UserError for values that can't be."""

    lr: Annotated[float, Number(0, 10, above=True)]
    warmup_steps: Annotated[int, Number()] = 0
    weight_decay: Annotated[float, Number(0, 10)] = 0.1
    betas: tuple[Annotated[float, Number(0, 1)], Annotated[float, Number(0, 1)]] = (0.9, 0.95)
    clip: Annotated[float | None, Number(0, 1e9, above=True)] = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"

    def __post_init__(self) -> None:
        check(self, "optimizer")

    def lr_at(self, step: int, steps: int, repeats_peak: bool = False) -> float:
        """Learning rate of step `step` (from 0) of `steps`: lr (step + 1) / w over the w steps of a linear warm-up, so that
        its last one has the peak; from there on constant, or a cosine to LR_FLOOR of it at the last step of all. With
        `repeats_peak`, as 0.1.0 had it, the cosine begins one step later and the peak comes twice."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        peak = self.warmup_steps if repeats_peak else max(0, self.warmup_steps - 1)
        progress = min(1.0, (step - peak) / max(1, steps - 1 - peak))
        return self.lr * (LR_FLOOR + (1 - LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))

    def describe(self, steps: int) -> str:
        """The schedule of so many steps in words."""
        warm = min(self.warmup_steps, steps)
        rise = f"lr {self.lr:g} x step / {self.warmup_steps} up to step {warm}" if warm > 1 else f"lr {self.lr:g} at step 1"
        if self.schedule == "constant" or steps <= max(1, warm):
            return f"{rise}, and constant from there"
        return (f"{rise}, then a cosine to a tenth at step {steps}: lr x (0.55 + 0.45 x cos(pi x (step - "
                f"{max(1, warm)}) / {steps - max(1, warm)}))")


def update_refusal(step: StepConfig, optimizer: OptimizerConfig) -> str | None:
    """Why parameters can't be updated in the backward pass as asked; None if they can, or if it wasn't asked."""
    if step.update == "after":
        return None
    if step.accum > 1:
        return "update in the backward pass needs accum 1: with accumulation a gradient is whole only at the last micro-step"
    if optimizer.clip is not None:
        return "update in the backward pass needs clip null: the global norm is known only when every gradient is there"
    if step.engine != "eager":
        return f"update in the backward pass needs engine eager, not {step.engine}: a recorded update would keep its rate"
    return None

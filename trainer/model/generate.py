"""Text, token by token: decoding with kept keys and values, several rows at once, and how a token is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.decoder import Decoder, attention, rope_angles


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: at `temperature` (0 takes the likeliest), from the `top_k` likeliest, and of those from the
    fewest that hold `top_p` of the probability. Row i draws as a row alone does with seed + i."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def sample_tokens(logits: Tensor, sampling: Sampling, chance: Tensor) -> Tensor:
    """The token of each row of logits (rows, vocab), where `chance` (rows,) is from 0 to below 1."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    best, which = logits.topk(min(sampling.top_k, logits.shape[-1]))
    shares = ((best - best[:, :1]) / sampling.temperature).softmax(-1)
    before = shares.cumsum(-1) - shares
    shares = shares.where(before < sampling.top_p, 0)
    shares[:, 0] += shares.sum(-1) == 0  # at a top_p of 0 the likeliest stays
    reach = shares.cumsum(-1)
    index = (reach <= chance[:, None] * reach[:, -1:]).sum(-1).clamp_(max=best.shape[-1] - 1)
    return which.gather(-1, index[:, None])[:, 0]


@torch.no_grad()
def generate(model: Decoder, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling,
             ends: frozenset[int] = frozenset(),
             tell: Callable[[int, int], None] = lambda row, token: None) -> list[list[int]]:
    """Up to `count` tokens after each of the prompts (of one token at least), all rows at once; a row ends before a token
    of `ends`. `tell` is called with a row and its next token as soon as that is known. No generator of torch's own is
    touched, and no weight.

    Shorter prompts are filled up behind their end, which nothing before it sees; each next token takes the place of a
    filler, so that every row is computed as it would be alone.
    """
    c, device = model.config, model.embedding.device
    lengths = [len(p) for p in prompts]
    rows, width = torch.arange(len(prompts), device=device), max(lengths)
    angles = rope_angles(width + count, c.head_size, c.rope_base, device)
    filled = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=device)
    kept = torch.zeros(c.layers, 2, len(prompts), c.kv_heads, width + count, c.head_size, device=device)
    x = model.embed(filled)
    for block, cache in zip(model.blocks, kept, strict=True):
        q, k, v = block.projected(x, angles[:width])
        cache[0, :, :, :width], cache[1, :, :, :width] = k.transpose(1, 2), v.transpose(1, 2)
        x = block.finish(x, attention(q, k, v))
    at = torch.tensor(lengths, device=device)
    x = x[rows, at - 1]
    generators = [torch.Generator().manual_seed((sampling.seed + row) % 2**63) for row in range(len(prompts))]
    texts: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    for i in range(count):
        chance = torch.stack([torch.rand((), generator=g) for g in generators]).to(device)
        tokens = sample_tokens(model.logits(x), sampling, chance)
        for row, token in enumerate(tokens.tolist()):
            if token in ends:
                open_rows.discard(row)
            elif row in open_rows:
                texts[row].append(token)
                tell(row, token)
        if not open_rows or i == count - 1:
            break
        x = model.embed(tokens[:, None])
        seen = torch.arange(width + i + 1, device=device) <= at[:, None, None, None]
        for block, cache in zip(model.blocks, kept, strict=True):
            q, k, v = block.projected(x, angles[at, None])
            cache[0, rows, :, at], cache[1, rows, :, at] = k[:, 0], v[:, 0]
            keys, values = cache[:, :, :, :width + i + 1]
            mixed = F.scaled_dot_product_attention(q[:, 0].unflatten(1, (c.kv_heads, -1)), keys, values, seen)
            x = block.finish(x, mixed.flatten(1, 2)[:, None])
        x, at = x[:, 0], at + 1
    return texts

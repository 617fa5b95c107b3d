"""Text, token by token: decoding with a cache of keys and values, several rows at once, and how a token is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ModelConfig
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
    """The token of each row, int64 (rows,), of logits (rows, vocab), where `chance` (rows,) is from 0 to below 1."""
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


class KVCache:
    """The keys and values of the tokens that a decoder has read, by layer: of rows of unequal length, each from position 0
    on. `lengths` (rows,) says how many tokens each row has read, `longest` is the most of any; `more` can be read after
    that, up to `capacity`."""

    def __init__(self, model: Decoder, lengths: Sequence[int], more: int) -> None:
        config, device = model.config, model.embedding.device
        self.longest, self.capacity = max(lengths), max(lengths) + more
        self.lengths = torch.tensor(lengths, device=device)
        self._rows = torch.arange(len(lengths), device=device)
        self._layers = torch.zeros(config.layers, 2, len(lengths), config.kv_heads, self.capacity, config.head_size,
                                   device=device)

    @staticmethod
    def bytes_of(config: ModelConfig, rows: int, capacity: int) -> int:
        """What one takes for so many rows of up to `capacity` tokens: keys and values in fp32."""
        return 4 * 2 * config.layers * rows * config.kv_heads * capacity * config.head_size

    def put_prompts(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keeps k and v (rows, longest, kv_heads, head_size); what shorter rows are filled up with is written over later."""
        keys, values = self._layers[layer]
        keys[:, :, :self.longest], values[:, :, :self.longest] = k.transpose(1, 2), v.transpose(1, 2)

    def put_next(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps k and v (rows, kv_heads, head_size) of the token that each row reads now. Returns (keys, values) with them,
        each (rows, kv_heads, longest + 1, head_size)."""
        keys, values = self._layers[layer, :, :, :, :self.longest + 1]
        keys[self._rows, :, self.lengths], values[self._rows, :, self.lengths] = k, v
        return keys, values

    def visible(self) -> Tensor:
        """Which positions the token that each row reads now sees, (rows, 1, 1, longest + 1): its own and those before it."""
        positions = torch.arange(self.longest + 1, device=self.lengths.device)
        return positions <= self.lengths[:, None, None, None]

    def advance(self) -> None:
        """Counts the token that each row has read."""
        self.lengths, self.longest = self.lengths + 1, self.longest + 1

    def at_last(self, x: Tensor) -> Tensor:
        """x (rows, longest, d_model) at the last token of each row, (rows, d_model)."""
        return x[self._rows, self.lengths - 1]


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
    device = model.embedding.device
    cache = KVCache(model, [len(prompt) for prompt in prompts], count)
    angles = rope_angles(cache.capacity, model.config.head_size, model.config.rope_base, device)
    generators = [torch.Generator().manual_seed((sampling.seed + row) % 2**63) for row in range(len(prompts))]
    texts: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    x = _read_prompts(model, prompts, angles, cache)
    for left in reversed(range(count)):
        chance = torch.stack([torch.rand((), generator=g) for g in generators]).to(device)
        tokens = sample_tokens(model.logits(x), sampling, chance)
        for row, token in enumerate(tokens.tolist()):
            if token in ends:
                open_rows.discard(row)
            elif row in open_rows:
                texts[row].append(token)
                tell(row, token)
        if not open_rows or not left:  # the last token need not be read
            break
        x = _read_next(model, tokens, angles, cache)
    return texts


def _read_prompts(model: Decoder, prompts: Sequence[Sequence[int]], angles: Tensor, cache: KVCache) -> Tensor:
    """The decoder's output at the last token of each prompt, (rows, d_model)."""
    filled = [[*prompt, *[0] * (cache.longest - len(prompt))] for prompt in prompts]
    x = model.embed(torch.tensor(filled, device=model.embedding.device))
    for layer, block in enumerate(model.blocks):
        q, k, v = block.projected(x, angles[:cache.longest])
        cache.put_prompts(layer, k, v)
        x = block.finish(x, attention(q, k, v))
    return cache.at_last(x)


def _read_next(model: Decoder, tokens: Tensor, angles: Tensor, cache: KVCache) -> Tensor:
    """The decoder's output at one more token of each row, tokens (rows,), (rows, d_model)."""
    x = model.embed(tokens[:, None])
    visible = cache.visible()
    for layer, block in enumerate(model.blocks):
        q, k, v = block.projected(x, angles[cache.lengths, None])
        keys, values = cache.put_next(layer, k[:, 0], v[:, 0])
        grouped = q[:, 0].unflatten(1, (model.config.kv_heads, -1))  # the heads that share a kv head, as if a sequence
        mixed = F.scaled_dot_product_attention(grouped, keys, values, visible)
        x = block.finish(x, mixed.flatten(1, 2)[:, None])
    cache.advance()
    return x[:, 0]

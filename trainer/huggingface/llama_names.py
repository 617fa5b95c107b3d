"""Our weights as Hugging Face's Llama names, splits and orders them, and back. Both ways are exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.decoder import halves_to_pairs, pairs_to_halves


@dataclass(frozen=True)
class Part:
    """One tensor there: rows of one of ours. `is_turned` says that RoPE turns them: pairs of neighbours here, of halves
    there."""

    name: str
    shape: tuple[int, ...]
    is_turned: bool = False


def parts(model: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Each of our tensors, in the decoder's own order, with the parts that it is there."""
    d, kv = model.d_model, model.kv_heads * model.head_size
    named: dict[str, tuple[Part, ...]] = {"embedding": (Part("model.embed_tokens.weight", (model.vocab, d)),),
                                          "norm": (Part("model.norm.weight", (d,)),)}
    for i in range(model.layers):
        at = f"model.layers.{i}."
        named |= {f"blocks.{i}.{name}": tuple(Part(f"{at}{theirs}.weight", *rest) for theirs, *rest in of_it)
                  for name, of_it in (
                      ("attention_norm", (("input_layernorm", (d,)),)),
                      ("qkv", (("self_attn.q_proj", (d, d), True), ("self_attn.k_proj", (kv, d), True),
                               ("self_attn.v_proj", (kv, d)))),
                      ("out", (("self_attn.o_proj", (d, d)),)),
                      ("ff_norm", (("post_attention_layernorm", (d,)),)),
                      ("gate_up", (("mlp.gate_proj", (model.d_ff, d)), ("mlp.up_proj", (model.d_ff, d)))),
                      ("down", (("mlp.down_proj", (d, model.d_ff)),)))}
    return named


def to_theirs(get: Callable[[str], Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(their name, tensor) of all weights, `get` giving ours by name. The tied head is left out, as they do."""
    for name, of_it in parts(model).items():
        for part, rows in zip(of_it, get(name).split([p.shape[0] for p in of_it]), strict=True):
            yield part.name, pairs_to_halves(rows, model.head_size) if part.is_turned else rows


def to_ours(get: Callable[[str], Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of all weights, in the decoder's order, `get` giving theirs by name."""
    for name, of_it in parts(model).items():
        rows = [halves_to_pairs(get(p.name), model.head_size) if p.is_turned else get(p.name) for p in of_it]
        yield name, rows[0] if len(rows) == 1 else torch.cat(rows)

"""Our weights as Hugging Face's Llama names, splits and orders them, and back. Both ways are exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.model.decoder import halves_to_pairs, pairs_to_halves


@dataclass(frozen=True)
class LlamaTensor:
    """A tensor of Llama, which is some rows of one of ours. `has_rope` says that RoPE turns them: neighbouring rows in ours,
    rows of one half with those of the other in Llama's."""

    name: str
    shape: tuple[int, ...]
    has_rope: bool = False


def llama_tensors(model: ModelConfig) -> dict[str, tuple[LlamaTensor, ...]]:
    """Each of our tensors by name, in the decoder's own order, with the tensors of Llama that it is made of."""
    d, kv = model.d_model, model.kv_heads * model.head_size
    tensors: dict[str, tuple[LlamaTensor, ...]] = {
        "embedding": (LlamaTensor("model.embed_tokens.weight", (model.vocab, d)),),
        "norm": (LlamaTensor("model.norm.weight", (d,)),)}
    for i in range(model.layers):
        def of_layer(name: str, *shape: int, has_rope: bool = False, layer: int = i) -> LlamaTensor:
            return LlamaTensor(f"model.layers.{layer}.{name}.weight", shape, has_rope)

        layer_tensors = {
            "attention_norm": (of_layer("input_layernorm", d),),
            "qkv": (of_layer("self_attn.q_proj", d, d, has_rope=True), of_layer("self_attn.k_proj", kv, d, has_rope=True),
                    of_layer("self_attn.v_proj", kv, d)),
            "out": (of_layer("self_attn.o_proj", d, d),),
            "ff_norm": (of_layer("post_attention_layernorm", d),),
            "gate_up": (of_layer("mlp.gate_proj", model.d_ff, d), of_layer("mlp.up_proj", model.d_ff, d)),
            "down": (of_layer("mlp.down_proj", d, model.d_ff),)}
        tensors |= {f"blocks.{i}.{name}": parts for name, parts in layer_tensors.items()}
    return tensors


def to_llama(get: Callable[[str], Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(Llama's name, tensor) of all weights; `get` returns ours by our name. The tied head is left out, as in Llama's
    files."""
    for name, parts in llama_tensors(model).items():
        for part, rows in zip(parts, get(name).split([p.shape[0] for p in parts]), strict=True):
            yield part.name, pairs_to_halves(rows, model.head_size) if part.has_rope else rows


def from_llama(get: Callable[[str], Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) of all weights, in the decoder's order; `get` returns Llama's by its name."""
    for name, parts in llama_tensors(model).items():
        rows = [halves_to_pairs(get(p.name), model.head_size) if p.has_rope else get(p.name) for p in parts]
        yield name, rows[0] if len(rows) == 1 else torch.cat(rows)

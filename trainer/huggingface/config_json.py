"""The config.json of a Llama-like Hugging Face model to a model's shape and back. Imports no torch."""

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spillcliff.errors import UserError
from spillcliff.files import read_json
from spillcliff.units import parse_count
from trainer.config import VOCAB, ModelConfig

CONFIG = "config.json"
KV_HEADS = {"llama": None, "mistral": 8}
"""The model types that are read, and the kv heads of one that names none (None: as many as heads): transformers' own
defaults, as those of `_FIELDS`."""
_FIELDS: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", None), "d_model": ("hidden_size", None), "heads": ("num_attention_heads", None),
    "d_ff": ("intermediate_size", None), "vocab": ("vocab_size", VOCAB), "norm_eps": ("rms_norm_eps", 1e-6)}
"""ModelConfig's fields: Llama's name for each, and what it is where a config leaves it out (None: it must not)."""
_MUST_BE = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_qk_norm": False, "qk_norm": False,
            "partial_rotary_factor": 1, "quantization_config": None, "sliding_window": None, "num_local_experts": None,
            "num_experts": None, "n_routed_experts": None}
"""The only value of each field that a decoder like ours has; null or no field at all is as good, but for Mistral's
sliding window."""
_WHY_NOT = {"qwen2": "its q, k and v have biases", "qwen3": "it norms q and k", "gemma": "its norms add one to their gains",
           "mixtral": "it is a mixture of experts", "phi3": "its weights are packed and its RoPE scaled",
           "gpt2": "it has no RoPE", "gpt_neox": "it turns only a part of each head",
           "smollm3": "some of its layers have no RoPE"}


def is_path(text: str) -> bool:
    """Whether a --model names a file or folder rather than a size."""
    return not is_size(text) and (os.sep in text or "/" in text or text.endswith(".json") or Path(text).is_dir())


def models_of(texts: Iterable[str], vocab: int | None) -> list[str | ModelConfig]:
    """What a command's --model means: the names of sizes as they are, and the model of each config.json or folder that holds
    one; `vocab` replaces its own vocabulary. UserError for what is neither."""
    models: list[str | ModelConfig] = []
    for text in texts:
        if is_path(text):
            model = read(Path(text))
            models.append(model if vocab is None else dataclasses.replace(model, vocab=vocab))
        elif is_size(text):
            ModelConfig.named(text)  # refuses sizes that have no shape
            models.append(text)
        else:
            raise UserError(f"--model takes sizes, such as 150M or 1.5B, and the config.json of a Llama-like model or its "
                            f"folder; {text!r} is neither")
    return models


def model_name(text: str) -> str:
    """What records call the model that a --model means."""
    return read(Path(text)).name if is_path(text) else text


def is_size(name: str) -> bool:
    """Whether a model's name is one of a size, from which its shape follows."""
    try:
        return bool(parse_count(name))
    except UserError:
        return False


def read(path: Path, is_tied: bool | None = None) -> ModelConfig:
    """The shape in a config.json, or in that of a folder; UserError naming each thing that ours can't do. `is_tied`, if the
    weights are known, says whether the head's are the embedding's, whatever the config says."""
    if path.is_dir():
        path = path / CONFIG
    values = read_json(path, "model config")
    thing, kind = f"model config {path}", values.get("model_type")
    if not isinstance(kind, str) or kind not in KV_HEADS:
        why = f" ({_WHY_NOT[kind]})" if isinstance(kind, str) and kind in _WHY_NOT else ""
        raise UserError(f"{thing}: model_type is {kind!r:.40}{why}; {' and '.join(KV_HEADS)} can be trained here")
    if problems := _problems(values, kind, values.get("tie_word_embeddings") if is_tied is None else is_tied):
        raise UserError(f"{thing}: {'; '.join(problems)}")
    fields: dict[str, Any] = {name: values.get(llama_name, default) for name, (llama_name, default) in _FIELDS.items()}
    if missing := [_FIELDS[name][0] for name, value in fields.items() if value is None]:
        raise UserError(f"{thing} lacks {', '.join(missing)}")
    fields["kv_heads"] = values.get("num_key_value_heads", KV_HEADS[kind])
    if fields["kv_heads"] is None:
        fields["kv_heads"] = fields["heads"]
    try:
        model = ModelConfig("model", rope_base=_rope_base(values), **fields)
    except UserError as e:
        raise UserError(f"{thing}: {e}") from None
    head_dim = values.get("head_dim")
    if head_dim not in (None, model.head_size):
        raise UserError(f"{thing}: head_dim is {head_dim!r:.40}; here it is hidden_size / num_attention_heads, "
                        f"{model.head_size}")
    model = dataclasses.replace(model, rope_base=float(model.rope_base), norm_eps=float(model.norm_eps))
    return dataclasses.replace(model, name=_name(path, model))


def _problems(values: dict, kind: str, is_tied: object) -> list[str]:
    """What this config asks for that ours can't do, each by its name."""
    problems = []
    for name, required in _MUST_BE.items():
        value = values.get(name, 4096 if (kind, name) == ("mistral", "sliding_window") else None)
        if value not in (None, required) and not (name == "sliding_window" and values.get("use_sliding_window") is False):
            problems.append(f"{name} is {json.dumps(value):.60}; it must be {json.dumps(required)}")
    if is_tied is not True:
        value = "missing, which means false" if is_tied is None else json.dumps(is_tied)
        problems.append(f"tie_word_embeddings is {value}; it must be true: the head's weights are the embedding's here")
    rope = [r for r in (values.get("rope_scaling"), values.get("rope_parameters")) if r is not None]
    for parameters in rope:
        if not isinstance(parameters, dict):
            problems.append(f"RoPE's parameters are {json.dumps(parameters):.60}; they must be an object or null")
            continue
        how = parameters.get("rope_type", parameters.get("type", "default"))
        if how != "default":
            problems.append(f"rope_scaling is {json.dumps(how):.60}; it must be null: RoPE isn't scaled here")
        if parameters.get("partial_rotary_factor") not in (None, 1):
            problems.append("partial_rotary_factor is not 1: RoPE turns whole heads here")
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)):
        problems.append("layer_types has others than full_attention")
    return problems


def _rope_base(values: dict) -> Any:
    """RoPE's base, which transformers wrote beside the other fields before its version 5."""
    for holder in (values.get("rope_parameters"), values):
        if isinstance(holder, dict) and holder.get("rope_theta") is not None:
            return holder["rope_theta"]
    return 10_000.0


def _name(path: Path, model: ModelConfig) -> str:
    """A name that is the same wherever the folder lies, differs for other shapes, and is never a size's: the folder's and
    four digits of the shape's checksum. The vocabulary is left out, as it is of a size's name."""
    folder = Path(os.path.abspath(path)).parent  # not resolved: huggingface_hub's cache is of links
    name = folder.name
    if re.fullmatch("[0-9a-f]{40}", name) and folder.parent.name == "snapshots":
        name = folder.parent.parent.name.split("--")[-1]
    name = re.sub("[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40] or "model"
    shape = json.dumps(dataclasses.asdict(dataclasses.replace(model, name="", vocab=1)))
    return f"{name}-{zlib.crc32(shape.encode()) & 0xFFFF:04x}"


def config_json(model: ModelConfig, length: int, end: int | None, dtype: str) -> dict:
    """The config.json of a model trained at `length`, as transformers reads it; `end` is the id of its end-of-text token."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": model.vocab,
            "hidden_size": model.d_model, "intermediate_size": model.d_ff, "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
            "hidden_act": "silu", "max_position_embeddings": length, "rms_norm_eps": model.norm_eps,
            "rope_theta": model.rope_base, "rope_parameters": {"rope_theta": model.rope_base, "rope_type": "default"},
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "use_cache": True,
            "bos_token_id": None, "eos_token_id": end, "pad_token_id": end, "torch_dtype": dtype}


def differences(actual: ModelConfig, planned: ModelConfig) -> str:
    """In what two shapes differ, their names apart; "" if in nothing."""
    return ", ".join(f"{f.name} {getattr(actual, f.name)}, planned {getattr(planned, f.name)}"
                     for f in dataclasses.fields(ModelConfig)
                     if f.name != "name" and getattr(actual, f.name) != getattr(planned, f.name))

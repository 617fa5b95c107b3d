"""A run's weights as a folder that Hugging Face's transformers loads."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, write_json
from spillcliff.units import format_bytes
from trainer.huggingface.config_json import CONFIG, config_json
from trainer.huggingface.llama_names import to_llama
from trainer.huggingface.weights import WHOLE, RunWeights
from trainer.run_folder import RunFolder
from trainer.tokenize import tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(run: RunFolder, out: Path, which: str, dtype: str, say: Say = ignore) -> dict:
    """Writes the folder `out`: config.json, model.safetensors, and the tokenizer's files if the run has one. `which` names
    the checkpoint, "best", "newest" or "step-N"; `dtype` is one of DTYPES. Returns {out, step, parameters, bytes,
    tokenizer}. The folder is written whole or not at all; UserError if it exists already, or can't be written."""
    length = run.load_plan().step.length
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; name another --out, or remove it first")
    source = RunWeights(run, which, say)
    coder = tokenizer.load(run.tokenizer) if run.tokenizer.is_file() else None
    end = tokenizer.end_of_text(coder) if coder else None
    end_id = coder.token_to_id(end) if coder and end else None
    tensors = {name: rows.to(DTYPES[dtype]).contiguous() for name, rows in to_llama(source.__getitem__, source.model)}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{source.what}: {name} has values that are not finite numbers in {dtype}")
    size = sum(tensor.nbytes for tensor in tensors.values())
    temporary = out.with_name(out.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if size > (free := shutil.disk_usage(temporary).free):
            raise OSError(f"it takes {format_bytes(size)} and {format_bytes(free)} are free")
        save_file(tensors, temporary / WHOLE, {"format": "pt", "step": str(source.step)})
        with open(temporary / WHOLE, "rb+") as f:
            os.fsync(f.fileno())
        write_json(temporary / CONFIG, config_json(source.model, length, end_id, dtype))
        write_json(temporary / "generation_config.json",
                   {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": end_id, "do_sample": True,
                    "temperature": 0.8, "top_k": 50})
        if coder:
            _write_tokenizer(coder, run.tokenizer, temporary, length, end)
        if out.is_dir():
            out.rmdir()
        os.replace(temporary, out)
    except UserError:
        raise
    except Exception as e:  # safetensors has an error type of its own for a full disk
        raise UserError(f"can't write {out}: {getattr(e, 'strerror', None) or e}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if coder is None:
        say(f"run {run.path} has no tokenizer.json: its token file named none, so the folder has none either")
    return {"out": str(out), "step": source.step, "parameters": source.model.parameters, "bytes": size,
            "tokenizer": coder is not None}


def _write_tokenizer(coder: Tokenizer, path: Path, folder: Path, length: int, end: str | None) -> None:
    """Writes the tokenizer as it made the training data: without the tokens that a post-processor would add."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if coder.encode("a").ids != coder.encode("a", add_special_tokens=False).ids:
        values["post_processor"] = None
    write_json(folder / "tokenizer.json", values)
    special = {"eos_token": end, "pad_token": end} if end else {}
    write_json(folder / "special_tokens_map.json", special)
    write_json(folder / "tokenizer_config.json", special | {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "clean_up_tokenization_spaces": False,
        "bos_token": None, "unk_token": None})

"""Shapes of Llama-like models from elsewhere: what is read, what is refused, and the way through records and plans."""

import dataclasses
import json
import subprocess
import sys

import pytest
from helpers.made import ROOT, make_record, write_records

from probe.cell import Cell, grid
from probe.records import Record, load
from spillcliff.errors import UserError
from trainer.config import ModelConfig, StepConfig
from trainer.huggingface import config_json

SMOL = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32", "use_cache": True, "vocab_size": 49152}
"""The config.json of SmolLM-135M, whose card says 135M parameters."""


def write(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_model_of_the_hub_has_the_parameters_that_its_card_says(tmp_path):
    model = config_json.read(write(tmp_path / "SmolLM-135M", SMOL))
    assert model.parameters == 134_515_008
    assert model.rope_base == 10_000
    assert model.norm_eps == 1e-5
    assert model == config_json.read(tmp_path / "SmolLM-135M" / "config.json")


@pytest.mark.parametrize(("changes", "expected"), [
    ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_base": 5e5}),
    ({"num_key_value_heads": None}, {"kv_heads": 9}),
    ({"model_type": "mistral", "sliding_window": None}, {"kv_heads": 3}),
    ({"head_dim": 64, "mlp_bias": False, "num_experts": None}, {}),
    ({"layer_types": ["full_attention"] * 30, "partial_rotary_factor": 1.0}, {})])
def test_other_ways_to_say_the_same_are_read(tmp_path, changes, expected):
    model = config_json.read(write(tmp_path, SMOL | changes))
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(("changes", "named"), [
    ({"model_type": "qwen2"}, "biases"), ({"model_type": "qwen3"}, "norms q and k"), ({"model_type": "mamba"}, "mamba"),
    ({"model_type": None}, "model_type"), ({"model_type": ["llama"]}, "model_type"),
    ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"), ({"hidden_act": "gelu"}, "hidden_act"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is false"), ({"tie_word_embeddings": None}, "means false"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"), ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"), ({"rope_scaling": 2}, "RoPE"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"), ({"partial_rotary_factor": 0.5}, "partial_"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"), ({"num_local_experts": 8}, "experts"),
    ({"use_qk_norm": True}, "qk_norm"), ({"head_dim": 128}, "head_dim is 128"), ({"layer_types": ["sliding"]}, "layer_"),
    ({"hidden_size": None}, "hidden_size"), ({"hidden_size": "576"}, "d_model"), ({"num_attention_heads": 7}, "7 heads"),
    ({"rope_theta": "x"}, "rope_base"), ({"rms_norm_eps": 0}, "norm_eps")])
def test_what_ours_cannot_do_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UserError, match=named) as e:
        config_json.read(write(tmp_path, SMOL | changes))
    assert "config.json" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_mistral_that_names_no_window_has_one(tmp_path):
    """transformers' own default is 4096."""
    with pytest.raises(UserError, match="sliding_window is 4096"):
        config_json.read(write(tmp_path, SMOL | {"model_type": "mistral"}))


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": "llama"', "\x00\xff"])
def test_a_damaged_config_is_told_in_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"model config .*config\.json"):
        config_json.read(tmp_path)


def test_a_name_is_of_the_shape_and_not_of_the_place(tmp_path):
    """It tells other shapes apart, is no size, and can be part of a file's name."""
    here = config_json.read(write(tmp_path / "a" / "my model: 1B", SMOL))
    there = config_json.read(write(tmp_path / "b" / "my model: 1B", SMOL | {"vocab_size": 500}))
    other = config_json.read(write(tmp_path / "c" / "my model: 1B", SMOL | {"num_hidden_layers": 29}))
    assert here.name == there.name != other.name
    assert here.name.startswith("my-model-1B-")
    assert not config_json.is_size(here.name)
    assert not set(here.name) & set(" :/\\")
    cached = tmp_path / "models--Org--SmolLM" / "snapshots" / ("0" * 40)
    assert config_json.read(write(cached, SMOL)).name.startswith("SmolLM-")


def test_what_is_written_is_what_is_read(tmp_path):
    for model in (ModelConfig.named("1M", 500), ModelConfig("x", 2, 32, 4, 2, 64, 300, 5e5, 1e-6)):
        read = config_json.read(write(tmp_path, config_json.config_json(model, 512, 7, "float32")))
        assert not config_json.differences(read, model)
    assert config_json.differences(read, dataclasses.replace(model, layers=3, vocab=301)) == (
        "layers 2, planned 3, vocab 300, planned 301")


def test_a_record_keeps_the_shape_of_its_model(tmp_path):
    """So that a cell read from disk is the cell that would be measured again."""
    model = config_json.read(write(tmp_path / "smol", SMOL))
    (cell,) = grid([model], {"batch": [4], "length": [512]}, 32_000)
    assert cell == Cell(model.name, StepConfig(4, 512), model.vocab, shape=model)
    assert cell.config == model
    assert cell.vocab == 49152
    path = write_records(tmp_path / "records.jsonl", [dataclasses.replace(make_record(), cell=cell, model=model)])
    assert load(path)[0].cell == cell
    assert Record.from_json(make_record().to_json()).cell == Cell.of("150M", 4, 512)
    with pytest.raises(UserError, match="shape is that of"):
        dataclasses.replace(cell, model="another")


def test_a_plan_names_the_model_by_its_config(command, refused, tmp_path):
    """Records of two models: the config.json picks its own, and the plan holds its shape."""
    model = config_json.read(write(tmp_path / "smol", SMOL))
    (cell,) = grid([model], {"batch": [4], "length": [512]}, 32_000)
    ours = dataclasses.replace(make_record(), cell=cell, model=model)
    write_records(tmp_path / "results" / ours.device / "records.jsonl", [make_record(), ours])
    done = command("plan", "--corpus", "100M", "--model", "smol/config.json", "--limit", "5GB", "--device",
                   ours.device, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == dataclasses.asdict(model) | {"parameters": model.parameters}
    assert "smol" in refused(2, "probe", "show", "--model", "smol/other.json")


def test_an_estimate_takes_a_config_and_no_torch(tmp_path):
    write(tmp_path / "smol", SMOL)
    code = ("import sys\nfrom probe import cli\ncli.cli.main(['estimate', '--model', 'smol', '--batch', '4', '--length', "
            "'512', '--json'], standalone_mode=False)\nassert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert cell["cell"]["vocab"] == 49152
    assert cell["parts"]["weights"] == 4 * 134_515_008 + 512 * 64 * 4  # and RoPE's angles

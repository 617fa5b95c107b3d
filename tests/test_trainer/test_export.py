"""Out to Hugging Face's transformers and back: the same logits, ids and texts there, the same weights here."""

import json
import os
import shutil

import pytest
import torch
from helpers.made import make_plan, tiny
from helpers.runs import STEPS, log, receipt, run_options
from safetensors.torch import load_file, save_file

from spillcliff.errors import UserError
from trainer import checkpoint
from trainer.config import StepConfig
from trainer.huggingface import weights
from trainer.huggingface.export import export
from trainer.huggingface.llama_names import to_llama
from trainer.model.decoder import Decoder
from trainer.model.generate import Sampling, generate
from trainer.run.sample import TextModel, write_texts
from trainer.run_folder import RunFolder
from trainer.tokenize import tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
CPU = torch.device("cpu")
TEXT = "The wind had been rising since noon. Größer als 10 µm — “naïve” ♥ 漢字!\n" * 20


def make_run(folder, model, seed=3) -> RunFolder:
    """A run's folder as the run leaves it: two checkpoints, of which the first is the better, and a tokenizer."""
    run = RunFolder(folder)
    make_plan(model=model, step=StepConfig(2, 64)).save(run.plan)
    for step, loss in ((3, 1.0), (6, 2.0)):
        decoder = Decoder(model, 64, CPU, seed + step)
        with torch.no_grad():  # far from what an untrained model has, so that nothing is near zero by chance
            for p in decoder.parameters():
                p.copy_(p * 6 if p.ndim > 1 else p + torch.linspace(-0.3, 0.3, len(p)))
        tensors = {f"model.{name}": p.detach() for name, p in decoder.named_parameters()}
        checkpoint.save(run, step, tensors, {"val_loss": loss})
    tokenizer.train([TEXT], model.vocab).save(str(run.tokenizer))
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(run, its export)"""
    home = tmp_path_factory.mktemp("export")
    run = make_run(home / "run", tiny())
    export(run, home / "out", "best", "float32")
    return run, home / "out"


def loaded(source) -> Decoder:
    decoder = Decoder(source.model, 128, CPU)
    weights.load(source, decoder)
    return decoder


def logits(decoder, ids):
    with torch.no_grad():
        return decoder.logits(decoder(decoder.embed(ids)))


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4, "norm_eps": 1e-3},
                                     {"kv_heads": 1, "rope_base": 500.0, "layers": 3}])
def test_transformers_computes_the_same_logits(tmp_path, changes):
    """For grouped, full and single kv heads, and with other constants than the usual."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    run = make_run(tmp_path / "run", tiny(**changes))
    export(run, tmp_path / "out", "newest", "float32")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(300, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = (llama(ids).logits - logits(loaded(weights.RunWeights(run, "newest", print)), ids)).abs().max()
    assert isinstance(llama, LlamaForCausalLM)
    assert apart < 1e-4
    assert llama.dtype == torch.float32
    assert llama.num_parameters() == tiny(**changes).parameters


def test_transformers_makes_the_same_ids_and_texts(made):
    """AutoTokenizer encodes and decodes as ours does, end of text included, and a greedy text is the same, ids and all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = made
    hub, ours = AutoTokenizer.from_pretrained(out), tokenizer.load(run.tokenizer)
    end = ours.token_to_id(tokenizer.END_OF_TEXT)
    for text in (TEXT, "", " two  spaces\n\n", "unseen: ß∂ƒ 🙂", f"one{tokenizer.END_OF_TEXT}two"):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert hub(text)["input_ids"] == ids
        assert hub.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids, skip_special_tokens=False)
    assert hub.eos_token_id == hub.pad_token_id == end
    assert hub.bos_token_id is None
    text_model = TextModel.of_folder(out, CPU)
    ids = text_model.ids("The wind")
    (tokens,) = generate(text_model.model, [ids], 30, Sampling(temperature=0), text_model.ends)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == end
    hub_tokens = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0, len(ids):].tolist()
    assert tokens == hub_tokens[:len(tokens)]
    assert (len(tokens) == 30 or hub_tokens[len(tokens)] == end)


def test_a_tokenizer_that_marks_the_beginning_is_exported_as_it_made_the_data(tmp_path):
    """Training data has no such marks, so a text that transformers encodes has none either."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    run = make_run(tmp_path / "run", tiny())
    coder = tokenizer.load(run.tokenizer)
    end = coder.token_to_id(tokenizer.END_OF_TEXT)
    coder.post_processor = TemplateProcessing(single=f"{tokenizer.END_OF_TEXT} $A",
                                              special_tokens=[(tokenizer.END_OF_TEXT, end)])
    coder.save(str(run.tokenizer))
    export(run, tmp_path / "out", "best", "float32")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("wind")["input_ids"] == coder.encode(
        "wind", add_special_tokens=False).ids


def test_the_way_back_is_bit_equal(made):
    run, out = made
    before, after = dict(weights.RunWeights(run, "best", print)), dict(weights.open_weights(out))
    assert list(before) == list(after) == [name for name, _ in loaded(weights.open_weights(out)).named_parameters()]
    assert all(before[name].equal(after[name]) for name in before)
    best = weights.open_weights(run.path)
    assert isinstance(best, weights.RunWeights)
    assert best.step == 3
    assert weights.checksum(weights.open_weights(run.path)) == weights.checksum(weights.open_weights(out))


def rewritten(made, folder, change=lambda tensors: tensors, **config):
    """A copy of the export with other tensors and config."""
    shutil.copytree(made[1], folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folders_that_transformers_writes_are_read_shards_and_half_precision_too(made, tmp_path, dtype):
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(made[1], dtype=dtype)
    llama.save_pretrained(tmp_path / "hub", max_shard_size="15KB")
    assert len(list((tmp_path / "hub").glob("model-*.safetensors"))) > 2
    source = weights.open_weights(tmp_path / "hub")
    wanted = {name: t.float() for name, t in llama.state_dict().items() if name != "lm_head.weight"}
    written = dict(to_llama(dict(source).__getitem__, source.model))
    assert written.keys() == wanted.keys()
    assert all(written[name].equal(wanted[name]) for name in wanted)


def with_head(tensors, same=True):
    head = tensors["model.embed_tokens.weight"].clone()
    return tensors | {"lm_head.weight": head if same else head + 1}


def test_an_untied_head_is_taken_only_if_it_is_the_embedding(made, tmp_path):
    same = rewritten(made, tmp_path / "same", with_head, tie_word_embeddings=False)
    assert weights.checksum(weights.open_weights(same)) == weights.checksum(weights.open_weights(made[1]))
    with pytest.raises(UserError, match=r"lm_head\.weight is not"):
        weights.open_weights(rewritten(made, tmp_path / "other", lambda t: with_head(t, False), tie_word_embeddings=False))
    with pytest.raises(UserError, match="tie_word_embeddings is false"):
        weights.open_weights(rewritten(made, tmp_path / "none", tie_word_embeddings=False))


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("change", "named"), [
    (lambda t: {n: v for n, v in t.items() if n != f"{Q}.weight"}, f"no tensor {Q}.weight"),
    (lambda t: t | {f"{Q}.bias": torch.zeros(32)}, f"{Q}.bias"),
    (lambda t: t | {f"{Q}.weight": torch.zeros(32, 16)}, r"\(32, 16\)"),
    (lambda t: t | {f"{Q}.weight": torch.zeros(32, 32, dtype=torch.int8)}, "type I8"),
    (lambda t: t | {f"{Q}.weight": torch.full((32, 32), torch.nan)}, "not finite")])
def test_weights_that_are_not_a_decoder_like_ours_are_refused_by_name(made, tmp_path, change, named):
    with pytest.raises(UserError, match=named):
        weights.checksum(weights.open_weights(rewritten(made, tmp_path / "bad", change)))


def test_damaged_and_pickled_folders_are_told_in_one_line(made, tmp_path):
    cut = rewritten(made, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    for broken in (data[:-100], data[:5], b"", b"\xff" * 100):
        (cut / "model.safetensors").write_bytes(broken)
        with pytest.raises(UserError, match=r"model\.safetensors can't be read"):
            weights.open_weights(cut)
    (cut / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        weights.open_weights(cut)
    (cut / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../out/model.safetensors"}}))
    with pytest.raises(UserError, match="files in this folder"):
        weights.open_weights(cut)
    (cut / "model.safetensors.index.json").unlink()
    (cut / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        weights.open_weights(cut)
    with pytest.raises(UserError, match=r"neither a plan\.json"):
        weights.open_weights(tmp_path)


def test_another_shape_than_planned_is_told_with_every_difference(made):
    run, out = made
    for folder in (run.path, out):
        with pytest.raises(UserError, match=r"layers 2, planned 3, d_ff 64, planned 96$"):
            weights.open_for(folder, tiny(layers=3, d_ff=96))


def test_an_export_names_its_checkpoint_and_overwrites_nothing(made, tmp_path):
    run, out = made
    for which, step in (("best", 3), ("newest", 6), ("step-6", 6)):
        assert export(run, tmp_path / which, which, "bfloat16")["step"] == step
    for which, named in (("step-4", "there is step-3, step-6"), ("last", "best, newest or step-N"), ("step-x", "step-N")):
        with pytest.raises(UserError, match=named):
            export(run, tmp_path / "new", which, "float32")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        export(run, out, "best", "float32")
    assert before == {p.name: p.read_bytes() for p in out.iterdir()}
    assert not (tmp_path / "new").exists()
    broken = RunFolder(shutil.copytree(run.path, tmp_path / "broken"))
    (broken.checkpoint(3) / checkpoint.STATE).write_bytes(b"x")
    said: list[str] = []
    assert export(broken, tmp_path / "second", "best", "float32", said.append)["step"] == 6
    assert "step-00000003" in said[0]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_goes_on_from_an_export_where_its_source_was(home, called):
    """The first validation loss is the source's last, to the last bit; the receipt names the source, and a resume with
    other weights is refused, one with the same is not."""
    code, out, err = called(home, "train", "export", "--run", "whole", "--out", "out", "--checkpoint", "newest", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == STEPS
    code, _, err = called(home, "train", *run_options("second", "--from", "out"))
    assert code == 0, err
    before, after = receipt(home / "whole"), receipt(home / "second")
    assert after["first_val_loss"] == before["val_loss"]
    assert after["from"]["path"] == "out"
    assert before["from"] is None
    assert log(home / "second")[0]["kind"] == "from"
    RunFolder(home / "second").receipt.unlink()  # as if it had been killed before
    code, _, err = called(home, "train", *run_options("second", "--resume", "--from", "second"))
    assert code == 2
    assert "the weights of out" in err
    assert err.count("\n") == 1
    code, _, err = called(home, "train", *run_options("second", "--resume", "--from", "out"))
    assert code == 0, err
    assert receipt(home / "second")["from"] == after["from"]


def test_texts_of_a_folder_are_those_of_its_run(made):
    run, out = made

    def texts(model):
        sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=5)
        return write_texts(model, ["The wind", "漢"], 20, sampling)

    of_the_newest, of_the_best = texts(TextModel.of_run(run, CPU, "newest")), texts(TextModel.of_folder(out, CPU))
    assert of_the_newest != of_the_best == texts(TextModel.of_run(run, CPU))

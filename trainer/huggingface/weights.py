"""Weights to start from: a run's, or those of a Hugging Face folder of a Llama-like model. Safetensors alone are read."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, no_grad

from spillcliff.errors import UserError
from spillcliff.files import Say, ignore, read_json
from trainer import checkpoint
from trainer.config import ModelConfig
from trainer.huggingface import config_json
from trainer.huggingface.llama_names import from_llama, llama_tensors
from trainer.model.decoder import Decoder
from trainer.run_folder import RunFolder

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = ("F32", "BF16", "F16")
"""Each is exact in fp32."""


class Source(Protocol):
    """Weights to start from: where they lie, what that is in words, and the model's shape."""

    path: Path
    what: str
    model: ModelConfig

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(our name, fp32 tensor), in the decoder's order, one at a time."""


class RunWeights:
    """A run's checkpoint, `which` being "best", "newest" or "step-N"; UserError if there is none that is whole."""

    def __init__(self, run: RunFolder, which: str, say: Say) -> None:
        self.model = run.load_plan().model
        state, folder = checkpoint.select(run, which, say)
        self.path, self.step = run.path, int(state["step"])
        self.what = f"run {run.path} after step {self.step}"
        self._tensors = checkpoint.Tensors(folder)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor by our name; UserError if there is none."""
        try:
            return self._tensors[f"model.{name}"]
        except KeyError:
            raise UserError(f"{self.what}: its checkpoint has no tensor {name}, which its plan's model has") from None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(our name, tensor), in the decoder's order, one at a time."""
        for name in llama_tensors(self.model):
            yield name, self[name]


class HubWeights:
    """The weights in a folder that holds a config.json, in one safetensors file or several; UserError for what is missing,
    damaged, or not of a decoder like ours. Every name, shape and type is checked before a tensor is read."""

    def __init__(self, folder: Path) -> None:
        self.path, self.what = folder, f"folder {folder}"
        self._files: dict[str, Any] = {}
        self._file_of = self._open()
        is_tied = None
        if HEAD in self._file_of:
            is_tied = EMBEDDING in self._file_of and self._slice(HEAD).get_shape() == self._slice(EMBEDDING).get_shape() \
                and self._file_of[HEAD].get_tensor(HEAD).equal(self._file_of[EMBEDDING].get_tensor(EMBEDDING))
            if not is_tied:
                raise UserError(f"{self.what}: {HEAD} is not {EMBEDDING}; here the head's weights are the embedding's, so "
                                f"untied ones can't be trained")
        self.model = config_json.read(folder, is_tied)
        self._check()

    def _open(self) -> dict[str, Any]:
        """The opened file of each tensor."""
        index = self.path / INDEX
        if (self.path / WHOLE).is_file():
            file = self._file(WHOLE)
            return dict.fromkeys(file.keys(), file)
        if not index.is_file():
            if pickles := [*self.path.glob("pytorch_model*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")]:
                raise UserError(f"{self.what} has its weights in {min(pickles).name}, a pickle, which can run code and "
                                f"isn't opened; if you trust it, transformers writes it anew as safetensors: "
                                f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)")
            raise UserError(f"{self.what} has no {WHOLE} and no {INDEX}")
        names = read_json(index, "index of weights").get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) and f == Path(f).name for f in names.values()):
            raise UserError(f"index of weights {index}: weight_map must be an object of files in this folder")
        files = {name: self._file(file) for name, file in names.items()}
        if absent := [name for name, file in files.items() if name not in file.keys()]:  # noqa: SIM118
            raise UserError(f"{self.what}: {names[absent[0]]} has no tensor {absent[0]}, which {INDEX} says it has")
        return files

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._files:
            try:
                self._files[name] = safe_open(self.path / name, "pt")
            except Exception as e:  # safetensors has an error type of its own
                why = f"{str(e).splitlines()[0]:.100}"
                raise UserError(f"{self.what}: {name} can't be read ({why}); fetch it again") from None
        return self._files[name]

    def _slice(self, name: str) -> Any:
        return self._file_of[name].get_slice(name)

    def _check(self) -> None:
        """UserError unless the files have exactly the tensors, shapes and types that the model does."""
        shapes = {t.name: t.shape for tensors in llama_tensors(self.model).values() for t in tensors}
        if absent := [name for name in shapes if name not in self._file_of]:
            raise UserError(f"{self.what} has no tensor {absent[0]}" + f", nor {len(absent) - 1} more" * (len(absent) > 1))
        more = [name for name in self._file_of if name not in shapes and name != HEAD
                and not name.endswith("rotary_emb.inv_freq")]  # of old files: it follows from the config
        if more:
            raise UserError(f"{self.what} has a tensor {more[0]}, which a decoder like ours has no place for")
        for name, shape in shapes.items():
            actual, dtype = tuple(self._slice(name).get_shape()), self._slice(name).get_dtype()
            if actual != shape:
                raise UserError(f"{self.what}: {name} is {actual}, and its config.json says {shape}")
            if dtype not in DTYPES:
                raise UserError(f"{self.what}: {name} is of type {dtype}; weights of {', '.join(DTYPES)} are read")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(our name, fp32 tensor), in the decoder's order, one at a time."""
        return from_llama(self._read, self.model)

    def _read(self, name: str) -> Tensor:
        tensor = self._file_of[name].get_tensor(name).float()
        if not tensor.isfinite().all():
            raise UserError(f"{self.what}: {name} has values that are not finite numbers")
        return tensor


def open_weights(folder: Path, say: Say = ignore) -> Source:
    """The weights in the folder that --from names: of a run of ours (its best checkpoint), or of a Hugging Face model.
    UserError for neither."""
    if RunFolder(folder).has_plan():
        return RunWeights(RunFolder(folder), "best", say)
    if (folder / config_json.CONFIG).is_file():
        return HubWeights(folder)
    raise UserError(f"{folder} holds neither a plan.json, as a run does, nor a {config_json.CONFIG}, as an exported "
                    f"model does")


def open_for(folder: Path, planned: ModelConfig, say: Say = ignore) -> Source:
    """As open_weights; UserError naming every difference if the model is of another shape than was planned."""
    source = open_weights(folder, say)
    if differ := config_json.differences(source.model, planned):
        raise UserError(f"{source.what} has a model of another shape than the plan: {differ}")
    return source


@no_grad()
def load(source: Source, decoder: Decoder, put: Callable[[Tensor, Tensor], Any] = Tensor.copy_) -> int:
    """Copies the weights into the decoder, one tensor at a time, by `put`(parameter, weight); returns their `checksum`.
    UserError for one of another shape."""
    parameters, crc = dict(decoder.named_parameters()), 0
    for name, tensor in source:
        if tensor.shape != parameters[name].shape:
            raise UserError(f"{source.what}: {name} is {tuple(tensor.shape)}, its model's is "
                            f"{tuple(parameters[name].shape)}")
        put(parameters[name], tensor)
        crc = zlib.crc32(tensor.numpy(), crc)
    return crc


def checksum(source: Source) -> int:
    """CRC-32 over all weights in fp32, whatever they are kept as: a run's and its export's are the same."""
    crc = 0
    for _, tensor in source:
        crc = zlib.crc32(tensor.numpy(), crc)
    return crc


def refuse_others(source: Source, came_from: dict | None, run: Path) -> None:
    """UserError if `source` has other weights than the run was started from, by what its checkpoint says ({path, crc32},
    None for new weights)."""
    if checksum(source) != (came_from or {}).get("crc32"):
        was = f"the weights of {came_from['path']}" if came_from else "new weights"
        raise UserError(f"run {run} was started from {was}, and {source.what} has others; leave out --from to "
                        f"resume it")

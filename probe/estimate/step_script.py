"""What the step that trains asks of a card's allocator, from the process's first tensor on: made by arithmetic from the
shapes. Imports no torch.

Mirrors trainer/model/decoder.py and trainer/run/step.py; operations.py has what is below. tests/test_probe/test_estimate.py
holds the script against the real step on a processor, tests/gpu/test_history.py against the history of the card at hand,
event by event. """

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from probe.estimate.allocation_trace import (
    BACKWARD,
    EVALUATION,
    FLOAT,
    FORWARD,
    INT,
    LONG,
    START,
    UPDATE,
    AllocationTrace,
    Phase,
)
from probe.estimate.operations import Operations
from trainer.config import ModelConfig, StepConfig, clip_for

NORM_CHUNK = 65536
"""Elements that one block of torch's fused norm takes (kChunkSize, aten/src/ATen/native/cuda/MultiTensorApply.cuh)."""


@dataclass(frozen=True)
class Script:
    """`start`: the model; `evaluation`; `record`, before the first step: the tokens' buffers,
    and the graph where there is one; `step`. Evaluations and steps end with what they began with, but for what is made
    once."""

    start: list[Phase]
    evaluation: list[Phase]
    record: list[Phase]
    step: list[Phase]


def script(model: ModelConfig, step: StepConfig, workspace_bytes: int) -> Script:
    """The script of one cell, eager or graph; `workspace_bytes` is what cuBLAS takes per stream. Past the second,
    micro-steps repeat the second and are left out."""
    p = _Process(model, step, workspace_bytes)
    p.make_model()
    start = p.trace.cut()
    p.evaluate()
    evaluation = p.trace.cut()
    p.feed()
    if step.engine == "graph":
        p.record()
    record = p.trace.cut()
    p.step()
    return Script(start, evaluation, record, p.trace.cut())


class _Process:
    """Writes what a process does."""

    def __init__(self, model: ModelConfig, step: StepConfig, workspace_bytes: int) -> None:
        self.trace = AllocationTrace(workspace_bytes)
        self._model, self._config, self._ops = model, step, Operations(self.trace, model, step)
        self._is_recorded = step.engine == "graph"
        self._window = step.batch * (step.length + 1) * INT

    def parameters(self) -> Iterator[tuple[tuple[Any, ...], int]]:
        """(key, bytes) in the order of model.parameters()."""
        yield from (((name,), size) for name, size in self._ops.head_weights.items())
        for layer in range(self._model.layers):
            yield from (((name, layer), size) for name, size in self._ops.block_weights.items())

    def make_model(self) -> None:
        sizes = list(self.parameters())
        for key, size in [sizes[0], *sizes[2:], sizes[1], (("angles",), self._ops.angles)]:
            self.trace.keep(("weight", key), size, "weights")

    def feed(self) -> None:
        """trainer.data.feed.feed: this step's tokens and the next one's."""
        for _ in range(2):
            self.trace.take(self._config.accum * self._window)

    def record(self) -> None:
        """TrainStep._record: once eagerly on a stream of its own, then one graph, or two with accumulation."""
        self.trace.take(self._window)
        self.trace.at(FORWARD, stream=1)
        self.trace.drop(self.micro_step(add=False))
        self.drop_gradients()
        self.trace.at(START, stream=1, empties=True)
        for _ in range(2):
            self.trace.take(LONG)  # the generator's seed and offset for graphs
        for add in range(min(2, self._config.accum)):
            self.trace.at(FORWARD, stream=1, recording=True)
            self.micro_step(bool(add))

    def step(self) -> None:
        self.trace.at(FORWARD)
        loss = self.trace.take(FLOAT, "loss")
        if not self._is_recorded:
            for add in range(min(2, self._config.accum)):
                self.trace.drop(self.micro_step(bool(add)))
        self.trace.at(UPDATE)
        if self._ops.in_backward:
            for name in ("norm", "embedding"):
                self._ops.update((name,), self._ops.head_weights[name])
                self.trace.drop(self.trace.names["gradient", (name,)])
        norm = [self.clip()] if clip_for(self._config) is not None else []
        if not self._ops.in_backward:
            for is_matrix in (False, True):  # parameter groups, by weight decay
                for key, size in self.parameters():
                    if is_matrix == (key[0] not in ("norm", "attention_norm", "ff_norm")):
                        self._ops.update(key, size)
            if not self._is_recorded:
                self.drop_gradients()
        # StepTimer sends loss and norm to the host together; a loss alone is doubled by the copy itself
        self.trace.drop(self.trace.take(2 * FLOAT, "loss" if norm else "workspaces"), loss, *norm)

    def clip(self) -> int:
        """torch.nn.utils.clip_grad_norm_; returns the norm."""
        sizes = [size // FLOAT for _, size in self.parameters()]
        partial = self.trace.take(len(sizes) * -(-max(sizes) // NORM_CHUNK) * FLOAT, "workspaces")
        norms = [self.trace.take(FLOAT, "gradients") for _ in sizes]
        self.trace.drop(partial)
        stacked, total = self.trace.take(len(sizes) * FLOAT, "gradients"), self.trace.take(FLOAT, "gradients")
        self.trace.drop(stacked, *reversed(norms))
        room, reciprocal, ratio = (self.trace.take(FLOAT, "gradients") for _ in range(3))
        self.trace.drop(reciprocal, room)
        clamped = self.trace.take(FLOAT, "gradients")
        self.trace.drop(ratio, clamped)
        return total

    def drop_gradients(self) -> None:
        self.trace.drop(*(self.trace.names["gradient", key] for key, _ in self.parameters()))

    def micro_step(self, add: bool) -> int:
        """TrainStep._forward_backward; with `add` the gradients are there already. Returns the loss, still alive."""
        layers, recompute = self._model.layers, self._config.recompute
        self.trace.turn(FORWARD)
        targets = self._ops.targets()
        x = self._ops.embed()
        embedded, saved = x, []
        for _ in range(layers):
            saved.append(self._ops.block(x, recompute if recompute != "block" else "nothing"))
            x = saved[-1]["y"]
        if not add:
            for name, size in self._ops.head_weights.items():
                self._ops.gradient((name,), size)
        loss = self._ops.head(gradients=True)
        self.trace.turn(BACKWARD)
        d_x: int | None = None
        for layer in reversed(range(layers)):
            kept = saved[layer]
            if recompute == "block":
                kept = self._ops.block(kept["x"], "again")
            d_x = self._ops.block_backward(layer, kept, add, d_x)
        self._ops.add_rows()
        self.trace.drop(targets, *([] if d_x is None else [d_x]), embedded, x)
        return loss

    def evaluate(self) -> None:
        self.trace.at(EVALUATION)
        window = self.trace.take(self._window)
        x = embedded = self._ops.embed()
        for layer in range(self._model.layers):
            before, x = x, self._ops.block(x, "nothing")["y"]
            if layer:
                self.trace.drop(before)
        self.trace.drop(embedded)
        targets = self._ops.targets()
        loss = self._ops.head(gradients=False)
        self.trace.drop(targets, window, x, loss)

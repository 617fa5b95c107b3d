"""The step that is measured and that trains: micro-steps, clip, optimizer."""

import torch
from torch import Tensor

from trainer.config import ENGINES, RECOMPUTES, ModelConfig, OptimizerConfig, StepConfig
from trainer.device import lock_fp32, refuse_engine, settle_heap
from trainer.errors import UserError
from trainer.model import Decoder

__all__ = ["ENGINES", "RECOMPUTES", "OptimizerConfig", "StepConfig", "TrainStep"]


class TrainStep:
    """Model, optimizer and engine of one run; calling it does one optimizer step.

    tokens are int32 on the device: (accum, batch, length + 1) for a step, (batch, length + 1) for an evaluation; inputs
    are all but the last column, targets all but the first.
    """

    def __init__(self, model: ModelConfig, step: StepConfig, optimizer: OptimizerConfig, device: torch.device,
                 seed: int = 0) -> None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        refusal = refuse_engine(step.engine, device.type, capability)
        if refusal:
            raise UserError(refusal)
        lock_fp32()
        if device.type == "cpu":
            settle_heap()
        self.step, self.device, self.clip = step, device, optimizer.clip
        self.model = Decoder(model, step.length, device, seed)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=optimizer.lr, betas=optimizer.betas, eps=1e-8, fused=True)
        self._body = torch.compile(self.model, dynamic=False) if step.engine == "compile" else self.model
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []

    def __call__(self, tokens: Tensor, lr: float, mark=lambda: None) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns the mean loss and the gradient's norm before the clip, both still on the device.
        `mark` is called between the last micro-step and the update."""
        if self.step.engine == "graph" and not self._graphs:
            self._record(tokens[0])
        loss = torch.zeros((), device=self.device)
        for i, micro in enumerate(tokens):
            loss += self._replay(i, micro) if self._graphs else self._forward_backward(micro)
        mark()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if not self._graphs:  # a graph writes into the gradients it was recorded with
            self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Mean loss over tokens (batch, length + 1), on the device."""
        return self.model.loss(self.model(tokens[:, :-1]), tokens[:, 1:])

    def _forward_backward(self, tokens: Tensor) -> Tensor:
        hidden = self._body(tokens[:, :-1], self.step.recompute)
        loss = self.model.loss(hidden, tokens[:, 1:]) / self.step.accum
        loss.backward()
        return loss.detach()

    def _replay(self, i: int, tokens: Tensor) -> Tensor:
        graph, loss = self._graphs[min(i, len(self._graphs) - 1)]
        self._tokens.copy_(tokens)
        graph.replay()
        return loss

    def _record(self, tokens: Tensor) -> None:
        """Records the micro-step: one graph that makes the gradients and, with accumulation, one that adds to them."""
        self._tokens = tokens.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # lazy set-up (cuBLAS handles, kernels) may not happen during a recording
            self._forward_backward(self._tokens)
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        pool = torch.cuda.graph_pool_handle()
        for _ in range(min(2, self.step.accum)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                loss = self._forward_backward(self._tokens)
            self._graphs.append((graph, loss))

    def named_state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint needs, by name; the optimizer's are there once it has stepped."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes what named_state gave; KeyError or RuntimeError if it was another model's."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            state = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {
                key: torch.empty(value.shape, device=self.device, dtype=value.dtype).copy_(value)
                for key, value in state.items()}

"""The step that is measured and that trains: micro-steps, clip, optimizer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from spillcliff.errors import UserError
from spillcliff.hardware.device import engine_refusal, lock_fp32, settle_heap
from trainer.config import ModelConfig, OptimizerConfig, StepConfig, half_batch, update_refusal
from trainer.model.decoder import Decoder
from trainer.model.loss import head_loss
from trainer.run import parallel
from trainer.run.distributed import ProcessGroup

SINGLE = ProcessGroup()
"""One process alone."""


class TrainStep:
    """Model, optimizer and engine of one run; calling it does one optimizer step.

    tokens are int32 on the device: (accum, batch, length + 1) for a step, (batch, length + 1) for an evaluation; inputs are
    all but the last column, targets all but the first. Of several processes `step` is each one's part, and a step ends with
    the same weights in all of them. `masked` tokens hold ids that take no part in the loss as ~id: as inputs they are read,
    as targets left out, and the loss is the mean over the targets that are left in the whole step, of all processes.
    UserError for an engine or an update that can't be. """

    def __init__(self, model: ModelConfig, step: StepConfig, optimizer: OptimizerConfig, device: torch.device,
                 seed: int = 0, group: ProcessGroup = SINGLE, masked: bool = False) -> None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        refusal = engine_refusal(step.engine, device.type, capability) or update_refusal(step, optimizer)
        if refusal:
            raise UserError(refusal)
        lock_fp32()
        if device.type == "cpu":
            settle_heap()
        self.step, self.device, self.clip, self.group = step, device, optimizer.clip, group
        self.model = Decoder(model, step.length, device, seed)
        body = torch.compile(self.model, dynamic=False) if step.engine == "compile" else self.model
        self._body, self._by_hand = parallel.spread(self.model, body, step, group)
        self._graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
        self._side: torch.cuda.Stream | None = None
        self._tokens: Tensor | None = None
        self._count = torch.zeros((), device=device) if masked else None  # of a step's targets, in each process's mean

        def adamw(parameters: list, decay: float) -> torch.optim.AdamW:
            return torch.optim.AdamW(parameters, lr=optimizer.lr, betas=optimizer.betas, eps=1e-8, fused=True,
                                     weight_decay=decay)

        parameters = list(self.model.parameters())
        decay = [optimizer.weight_decay if p.ndim > 1 else 0.0 for p in parameters]  # on matrices alone
        if step.update == "backward":
            self._optimizers = {p: adamw([p], d) for p, d in zip(parameters, decay, strict=True)}
            for p in self.model.blocks.parameters():  # the head's gradients are made by hand
                p.register_post_accumulate_grad_hook(self._update)
        else:
            kinds = [(d, parallel.is_part(p)) for p, d in zip(parameters, decay, strict=True)]
            groups = [{"params": [p for p, k in zip(parameters, kinds, strict=True) if k == kind], "weight_decay": kind[0]}
                      for kind in sorted(set(kinds))]
            one = adamw(groups, 0.0)
            self._optimizers = dict.fromkeys(parameters, one)

    @property
    def accum(self) -> int:
        """Micro-steps in a step."""
        return self.step.accum

    def __call__(self, tokens: Tensor, lr: float, mark: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor | None]:
        """One optimizer step; returns the mean loss and the gradient's norm before the clip (None without a clip), both
        still on the device. `mark` is called between the last micro-step and the update."""
        for optimizer in set(self._optimizers.values()):
            for group in optimizer.param_groups:
                group["lr"] = lr
        if self.step.engine != "eager" and self.device.type == "cuda" and not self._graphs:
            self._record(tokens[0])
        if self._count is not None:  # in place: a graph reads it where it was recorded
            self._count.copy_((tokens[..., 1:] >= 0).sum())
            self.group.average_([self._count])
        loss = torch.zeros((), device=self.device)
        for i, micro in enumerate(tokens):
            loss += self._replay(i, micro) if self._graphs else self._forward_backward(micro, i == len(tokens) - 1)
        mark()
        self.group.average_([loss, *(p.grad for p in self._by_hand)])
        norm: Tensor | None = None
        if self.clip is not None:
            norm = parallel.clip(list(self.model.parameters()), self.clip)
        if self.step.update == "backward":
            for p in (self.model.norm, self.model.embedding):
                self._update(p)
        else:
            (optimizer,) = set(self._optimizers.values())
            optimizer.step()
        if not self._graphs:  # a graph writes into the gradients it was recorded with
            self._drop_gradients()
        return loss, norm

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """Mean loss over tokens (batch, length + 1), from wherever they are; of masked ones, over the targets that are left,
        0 if none is."""
        is_filled_up = bool((tokens[:, -1].cpu().numpy() < 0).any())  # by numpy: torch takes no memory for it
        m, tokens = self.model, tokens.to(self.device)
        inputs = _unmasked(tokens[:, :-1]) if is_filled_up else self._inputs(tokens)
        x = m(m.embed(inputs)).flatten(0, 1)
        return head_loss(x, m.norm, m.embedding, tokens[:, 1:].flatten().long(), m.config.norm_eps)

    def _inputs(self, tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        return inputs if self._count is None else _unmasked(inputs)

    def _forward_backward(self, tokens: Tensor, is_last: bool = True) -> Tensor:
        """Loss and gradients of one micro-step; several processes exchange what their blocks have summed up during the last
        one. The tied embedding's two gradients go into one buffer: the head's first, chunk by chunk as the loss is made,
        then the looked-up rows'."""
        with parallel.exchange(self._body, is_last):
            return self._gradients(tokens)

    def _gradients(self, tokens: Tensor) -> Tensor:
        m, inputs, targets = self.model, self._inputs(tokens), tokens[:, 1:].flatten().long()
        x = m.embed(inputs).requires_grad_()
        out = self._body(x, self.step.recompute, self.step.engine == "compile")
        is_first = m.embedding.grad is None
        if is_first:
            m.embedding.grad, m.norm.grad = torch.empty_like(m.embedding), torch.empty_like(m.norm)
        rows = out.detach().flatten(0, 1)
        scale = 1 / self.step.accum if self._count is None else 1.0
        loss = head_loss(rows, m.norm, m.embedding, targets, m.config.norm_eps, scale, m.norm.grad, m.embedding.grad,
                         add=not is_first, count=self._count)
        # on this thread: autograd's own would take a second cuBLAS handle and its workspace, 34 MB on an H200
        with torch.autograd.set_multithreading_enabled(False):
            out.backward(rows.view_as(out))  # which holds the gradient now
        with torch.no_grad():
            # sorts the tokens, so that rows are added in the same order every time; index_add_ would not on a card
            m.embedding.grad.index_put_((inputs.flatten(),), x.grad.flatten(0, 1), accumulate=True)
        return loss

    def _update(self, parameter: Tensor) -> None:
        self._optimizers[parameter].step()
        parameter.grad = None

    def smaller_batch(self) -> int | None:
        """The largest batch of at most half of today's that can make the same steps; None if there is none, or if some of
        the weights may have been updated already."""
        if self.step.update == "backward" or self.group.world.size > 1:  # the others wait in the middle of a step
            return None
        return half_batch(self.step.batch)

    def use_batch(self, batch: int) -> None:
        """Makes the same steps in micro-steps of `batch` sequences from now on, and lets go of what a step that ran out of
        memory left. ValueError if they can't be made so."""
        sequences = self.step.accum * self.step.batch
        if batch < 1 or sequences % batch:
            raise ValueError(f"{sequences} sequences are no whole number of batches of {batch}")
        self.step = replace(self.step, batch=batch, accum=sequences // batch)
        self._graphs.clear()
        self._tokens = None
        self._drop_gradients()
        for parameter, optimizer in self._optimizers.items():  # moments of which only one was made
            if len(optimizer.state.get(parameter, ())) < 3:
                optimizer.state.pop(parameter, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _replay(self, i: int, tokens: Tensor) -> Tensor:
        graph, loss = self._graphs[min(i, len(self._graphs) - 1)]
        self._tokens.copy_(tokens)  # type: ignore[union-attr]  # made when the graph was recorded
        graph.replay()
        return loss

    def _record(self, tokens: Tensor) -> None:
        """Records the micro-step: one graph that makes the gradients and, with accumulation, one that adds to them."""
        self._tokens = tokens.clone()
        if self._side is None:  # one for good: cuBLAS keeps a workspace for each stream, 34 MB on an H200
            self._side = torch.cuda.Stream(self.device)
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # lazy set-up (cuBLAS handles, kernels, the compiler) may not happen in a recording
            self._forward_backward(self._tokens)
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._drop_gradients()
        pool = torch.cuda.graph_pool_handle()
        for _ in range(min(2, self.step.accum)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):  # which has its cuBLAS workspace already
                loss = self._forward_backward(self._tokens)
            self._graphs.append((graph, loss))

    def named_state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint needs, by name; the optimizer's are there once it has stepped. Sharded
        processes ask all at once, and the main one gets them, in host memory."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            values = self._optimizers[parameter].state.get(parameter, {})
            tensors[f"model.{name}"] = parameter.detach()
            tensors |= {f"{key}.{name}": value for key, value in values.items()}
        if not self.group.is_sharded:
            return tensors
        wholes = ((name, parallel.whole(tensor)) for name, tensor in tensors.items())  # one at a time
        return {name: tensor.cpu() for name, tensor in wholes if self.group.world.is_main}

    def put(self, parameter: Tensor, weight: Tensor) -> None:
        """Writes a whole weight into a parameter, of which a sharded process has its part."""
        parameter.copy_(parallel.like(parameter, weight) if self.group.is_sharded else weight)

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes what named_state gave; KeyError or RuntimeError if it was another model's."""
        for name, parameter in self.model.named_parameters():
            self.put(parameter, tensors[f"model.{name}"])
            state = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self._optimizers[parameter].state[parameter] = {
                key: parallel.like(parameter, value) for key, value in state.items()}


def _unmasked(inputs: Tensor) -> Tensor:
    """The ids, of those that take no part in the loss too, which are held as ~id."""
    return inputs ^ (inputs >> 31)

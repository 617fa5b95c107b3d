"""How several processes keep one model: each a whole one whose gradients are averaged (DistributedDataParallel), or
each a part of every block's weights, gradients and moments (FSDP2's fully_shard). What autograd has no part in, the
embedding's and the last norm's gradients, is averaged by hand and kept whole in either."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from spillcliff.errors import UserError
from trainer.config import StepConfig
from trainer.model.decoder import Decoder
from trainer.run.distributed import ProcessGroup


def spread(model: Decoder, body: nn.Module, step: StepConfig,
           group: ProcessGroup) -> tuple[nn.Module, list[nn.Parameter]]:
    """(what to call for `body`, the parameters whose gradients are averaged by hand) of a model that a group of processes
    trains; `body` is the
    model, compiled or not. Sharded, the model's parameters are others afterwards. UserError for an engine that can't."""
    by_hand = [model.embedding, model.norm]
    if group.world.size == 1:
        return body, by_hand
    if group.is_sharded:
        if step.engine != "eager":
            raise UserError(f"engine {step.engine} can't run sharded, where weights come and go; plan without --sharded, or "
                            f"from cells of engine eager")
        mesh = init_device_mesh(model.embedding.device.type, (group.world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh, ignored_params=set(by_hand)), by_hand
    if step.engine == "graph":  # which has no hooks: everything is exchanged after it
        return body, list(model.parameters())
    for parameter in by_hand:  # else it would wait for them in vain
        parameter.requires_grad_(False)
    return DistributedDataParallel(body, gradient_as_bucket_view=True), by_hand


@contextlib.contextmanager
def exchange(body: nn.Module, is_due: bool) -> Iterator[None]:
    """A backward pass inside exchanges what it and those before it summed up, or if not `is_due` only sums up."""
    if isinstance(body, FSDPModule):
        body.set_requires_gradient_sync(is_due)
    with contextlib.nullcontext() if is_due or not isinstance(body, DistributedDataParallel) else body.no_sync():
        yield


def is_part(tensor: Tensor) -> bool:
    """Whether this process has a part of it only."""
    return isinstance(tensor, DTensor)


def clip(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scales gradients down to a norm of `most` over all of them, and returns what it was."""
    if not any(map(is_part, parameters)):
        return nn.utils.clip_grad_norm_(parameters, most)
    groups = [[p for p in parameters if is_part(p) == kind] for kind in (True, False)]  # which torch does not mix
    norms = [whole(nn.utils.get_total_norm([p.grad for p in group])) for group in groups]
    norm = torch.stack(norms).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, norm)
    return norm


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, which every process asks for at once."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """The whole tensor `values`, on the device of `tensor`, or this process's part of it if that is one."""
    copy = torch.empty(values.shape, device=tensor.device, dtype=values.dtype).copy_(values)
    if not isinstance(tensor, DTensor) or values.ndim != tensor.ndim:
        return copy
    return distribute_tensor(copy, tensor.device_mesh, tensor.placements, src_data_rank=None)

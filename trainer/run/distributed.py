"""What several processes that train one model exchange, each on a device of its own."""

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from spillcliff.errors import UserError
from trainer.ranks import ALONE, World

if TYPE_CHECKING:
    import torch

TIMEOUT = timedelta(hours=1)
"""How long one waits for another: the main one writes checkpoints while the others wait."""


class ProcessGroup:
    """The exchange between processes; alone, each call gives what it was given. `join` comes before everything else.
    `is_sharded` says that each keeps a part of the weights only."""

    def __init__(self, world: World = ALONE, is_sharded: bool = False) -> None:
        self.world, self.is_sharded = world, is_sharded and world.size > 1
        self._gloo: Any = None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def own_device(self, device: "torch.device") -> "torch.device":
        """This process's own device of the kind of `device`. UserError where a machine has too few."""
        import torch

        if self.world.size == 1 or device.type == "cpu":
            return device
        count = torch.accelerator.device_count()
        if self.world.local_rank >= count:
            raise UserError(f"process {self.world.local_rank} of this machine has no card: there are {count}; start "
                            f"torchrun with --nproc-per-node {count}")
        return torch.device(device.type, self.world.local_rank)

    def join(self, device: "torch.device") -> None:
        """Waits until all are there."""
        if self.world.size == 1:
            return
        import torch
        import torch.distributed as dist

        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        self._gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)  # for single figures, which no card need wait for

    def leave(self) -> None:
        """Lets go of the others."""
        if self._gloo is not None:
            import torch.distributed as dist

            self.any_asked(False)
            dist.destroy_process_group()
            self._gloo = None

    def average_(self, tensors: Iterable["torch.Tensor"]) -> None:
        """Makes each tensor the mean of all processes' own."""
        if self.world.size == 1:
            return
        import torch
        import torch.distributed as dist

        tensors = list(tensors)
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()
        torch._foreach_div_(tensors, self.world.size)

    def sum(self, value: float) -> float:
        """Over all processes, the same in each to the last bit."""
        return self._reduce(value, "SUM")

    def largest(self, value: int | None) -> int | None:
        """Of all processes' values; None where any has none."""
        if self.world.size == 1:
            return value
        largest = self._reduce(math.inf if value is None else value, "MAX")
        return None if largest == math.inf else int(largest)

    def _reduce(self, value: float, operation: str) -> float:
        if self.world.size == 1:
            return value
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(total, getattr(dist.ReduceOp, operation), group=self._gloo)
        return total.item()

    def any_asked(self, asked: bool) -> bool:
        """Whether any process asked for it when this was last called: all get the same answer, and none waits for another,
        since that was a step ago. Alone, `asked` itself."""
        if self.world.size == 1:
            return asked
        import torch
        import torch.distributed as dist

        before, flag = self._pending, torch.tensor([asked], dtype=torch.int32)
        self._pending = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._gloo, async_op=True), flag
        if before is None:
            return False
        work, flag = before
        work.wait()
        return bool(flag.item())

"""Peak memory of a cell without running it, in milliseconds and without torch: the step's own requests (step_script.py)
replayed through a model of torch's allocator (allocator.py), and what the card's context takes beside it."""

import dataclasses
from dataclasses import dataclass

from probe.cell import Cell
from probe.estimate.allocation_trace import FLOAT, MOMENTS, PARTS, Phase
from probe.estimate.allocator import Allocator, Block
from probe.estimate.step_script import Script, script
from spillcliff.errors import UserError
from trainer.config import ModelConfig, Recompute, StepConfig

MIB = 1 << 20
KERNELS = {"none": 43, "elementwise": 46, "block": 56}
"""About how many kernels a layer's forward and backward pass launch, by `recompute`, counted in trainer/model/layers.py."""
STEPS = 4
"""Steps after which the allocator's state is taken as settled: on an H200 no reserved peak rose past the third."""
COMPILE = 1.05
"""What compile takes over graph, which records as it does: its fused operations are not scripted, so it may be off by 10%.
On an H200 138M took 1.00, 1.09 and 1.10 of graph's allocated bytes at 1 x 512, 4 x 512 and 16 x 1024, and 0.99, 1.07 and
1.11 of its reserved."""
CPU_HEAP, CPU_HEAP_BYTES = 16, 370_000_000
"""What a processor's heap keeps beside the tensors alive, in units of a layer's gate and up, and the most of it in bytes.
Both are fitted, to 13 cells of 1M to 50M (torch 2.13, glibc 2.36, two cores), and end 6.4% off at most; what keeps it was
not found."""


@dataclass(frozen=True)
class CardMemory:
    """What a device takes beside the step's tensors, in bytes. The defaults are an H200's (torch 2.11, CUDA 13, driver 580:
    within 3 MiB for 38 cells) and a process's on Linux; `measured` says whether these were seen on the device itself.

    `context_bytes` is context, kernels and libraries of an eager process; `graph_bytes` what recording adds to them and
    `kernel_bytes` what each recorded kernel does; `workspace_bytes` cuBLAS's workspace per stream; `process_bytes` the
    resident set of a process on a processor once torch has stepped, its tensors apart.
    """

    kind: str = "cuda"
    context_bytes: int = 748 * MIB
    graph_bytes: int = 0
    kernel_bytes: int = 3970
    workspace_bytes: int = 32 * MIB
    process_bytes: int = 340_000_000
    measured: bool = False

    def context(self, cell: Cell) -> int:
        """Bytes beside the allocator's."""
        step, model = cell.step, model_of(cell)
        if step.engine == "eager":
            return self.context_bytes
        recorded = KERNELS[step.recompute] * model.layers * min(2, step.accum)
        return self.context_bytes + self.graph_bytes + self.kernel_bytes * recorded

    @classmethod
    def of(cls, device_json: dict) -> "CardMemory":
        """From a device's facts; what is under "memory" there was measured and wins over the defaults."""
        capability = device_json.get("capability") or (0, 0)
        # parseChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB from Hopper on, else :4096:2:16:8
        workspace = 32 * MIB if capability[0] >= 9 else 8320 << 10
        seen = device_json.get("memory") or {}
        known = {f.name for f in dataclasses.fields(cls)} - {"kind", "measured"}
        values = {"workspace_bytes": workspace} | {k: v for k, v in seen.items() if k in known}
        return cls(kind=device_json.get("kind", "cuda"), measured=bool(seen), **values)


@dataclass(frozen=True)
class Estimate:
    """Peaks in bytes as torch and the driver would count them; on a processor only `device_bytes`, its peak resident set,
    is there. `moment` is when most is allocated, `moments` each moment's own peak. `parts` are the tensors alive then, what
    the allocator holds beyond them ("allocator": rounding and free blocks) and "context"; they add up to `device_bytes`.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int
    moment: str
    moments: dict[str, int]
    parts: dict[str, int]


def model_of(cell: Cell) -> ModelConfig:
    """UserError for somebody's own step, whose memory nothing estimates."""
    if cell.config is None:
        raise UserError("a step of your own can't be estimated, only measured; name a size with --model, such as 150M")
    return cell.config


def estimate(cell: Cell, card: CardMemory) -> Estimate:
    """The peaks of `cell` on `card`. UserError for a model that has no shape."""
    model, step = model_of(cell), cell.step
    if card.kind == "cpu":
        return on_cpu(model, step, card)
    is_compiled = step.engine == "compile"
    if is_compiled:  # whose plain formulas have no leaner way for "elementwise"
        leaner: Recompute = "block" if step.recompute == "block" else "none"
        step = dataclasses.replace(step, engine="graph", recompute=leaner)
    replay = Replay()
    replay.process(script(model, step, card.workspace_bytes))
    allocated, reserved = replay.peak, replay.allocator.reserved_peak
    context = card.context(cell)
    if is_compiled:
        allocated, reserved = int(allocated * COMPILE), int(reserved * COMPILE)
    parts = replay.parts | {"allocator": reserved - sum(replay.parts.values()), "context": context}
    return Estimate(allocated, reserved, reserved + context, replay.moment, replay.moments, parts)


def on_cpu(model: ModelConfig, step: StepConfig, card: CardMemory) -> Estimate:
    """The peak resident set: the tensors alive at once, what the heap and its libraries keep beside, and the process."""
    cell = script(model, step, 0)
    alive: dict[int, tuple[int, str]] = {}
    parts, highest = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    moments = dict.fromkeys(MOMENTS, 0)
    peak, moment, total = 0, "", 0
    for phase in [*cell.start, *cell.evaluation, *cell.step, *cell.step]:
        for name, size, part in phase.events:
            if not size:
                size, part = alive.pop(name)
                total, parts[part] = total - size, parts[part] - size
            elif name not in alive:
                alive[name] = size, part
                total, parts[part] = total + size, parts[part] + size
                moments[phase.moment] = max(moments[phase.moment], total)
                if total > peak:
                    peak, moment, highest = total, phase.moment, dict(parts)
    heap = min(CPU_HEAP * step.batch * step.length * 2 * model.d_ff * FLOAT, CPU_HEAP_BYTES)
    parts = highest | {"allocator": heap, "context": card.process_bytes}
    return Estimate(None, None, peak + heap + card.process_bytes, moment, moments, parts)


class Replay:
    """Phases played against an allocator: the peak of each moment, and the parts of the highest, in requested bytes."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.peak, self.moment = 0, ""
        self.parts: dict[str, int] = {}
        self.moments = dict.fromkeys(MOMENTS, 0)
        self._alive: dict[int, tuple[Block, int, str]] = {}
        self._parts = dict.fromkeys(PARTS, 0)

    def process(self, cell: Script) -> None:
        """A process from start to end, as a measured cell and a run go: an evaluation, steps, an evaluation, steps."""
        self.play(cell.start)
        self.play(cell.evaluation)
        self.play(cell.record)
        self.settle(cell.step)
        self.play(cell.evaluation)
        self.settle(cell.step)

    def settle(self, phases: list[Phase]) -> None:
        """Repeats until the allocator is as it was before, after which every repetition would be the same."""
        for _ in range(STEPS):
            before = self.allocator.free_blocks()
            self.play(phases)
            if self.allocator.free_blocks() == before:
                return

    def play(self, phases: list[Phase]) -> None:
        allocator, alive, parts = self.allocator, self._alive, self._parts
        for phase in phases:
            if phase.empties:
                allocator.empty_cache()
            highest = 0
            for name, size, part in phase.events:
                if not size:
                    block, size, part = alive.pop(name)
                    allocator.free(block)
                    parts[part] -= size
                elif name not in alive:
                    alive[name] = allocator.allocate(size, phase.stream, phase.recording), size, part
                    parts[part] += size
                    if allocator.allocated > highest:
                        highest = allocator.allocated
                        if highest > self.peak:
                            self.peak, self.moment, self.parts = highest, phase.moment, dict(parts)
            self.moments[phase.moment] = max(self.moments[phase.moment], highest)

"""Which device, what it is, and the fp32 lock. Imports torch only when asked for a device."""

import os
import platform
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spillcliff.errors import NoKernels, UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.fingerprints import cpu_name, slug
from spillcliff.hardware.host_memory import host_memory
from spillcliff.hardware.visible import driver_uuid

if TYPE_CHECKING:
    import torch

THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""NVML's bits for a power cap, hardware slowdown, two thermal ones and the power brake; 0x1 is idleness, no throttle."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a device is. `fingerprint` names its folder under results/; sizes in bytes; None where there is no such thing."""

    fingerprint: str
    name: str
    kind: str
    total_bytes: int
    capability: tuple[int, int] | None
    cores: int
    uuid: str
    torch: str
    cuda: str | None
    driver: str | None
    python: str
    platform: str
    allocator: str

    @property
    def software(self) -> dict[str, str | None]:
        """What a measurement depends on beside the device."""
        return {k: getattr(self, k) for k in ("torch", "cuda", "driver", "python", "platform", "allocator")}


def lacks_kernels(capability: tuple[int, int], arch_list: list[str]) -> str | None:
    """Why a build made for `arch_list` ("sm_60", ...) can't run on a card of `capability`; None if it can.

    Machine code of one major version serves every later minor one (sm_60 serves 6.1); "compute_90" is compiled at
    start for any later card. An empty list means that the build doesn't say.
    """
    major, minor = capability
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        digits = re.match(r"\d+", number)
        if not digits:
            continue
        have = divmod(int(digits[0]), 10)
        if (kind == "sm" and have[0] == major and have[1] <= minor) or (kind == "compute" and have <= (major, minor)):
            return None
    if not arch_list:
        return None
    build = "the CUDA 12.6 build, torch below 2.15" if capability < (7, 5) else "a newer build"
    return (f"this torch has no kernels for compute capability {major}.{minor} (it has {' '.join(arch_list)}); "
            f"install {build}: python3 bootstrap.py chooses it")


def _cuda_devices() -> list[str]:
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def resolve_device(name: str | None) -> "torch.device":
    """The torch device called `name` ("cuda", "cuda:1", "cpu", "mps", "xpu", or a fingerprint of this machine's), or the
    best there is for None.

    UserError for a device that isn't there or that this build can't run on.
    """
    import torch

    if name is None:
        name = "cpu"
        if torch.cuda.is_available():
            reason = lacks_kernels(torch.cuda.get_device_capability(0), torch.cuda.get_arch_list())
            if reason:
                raise NoKernels(f"{torch.cuda.get_device_name(0)}: {reason}; or use --device cpu")
            name = "cuda"
        elif torch.xpu.is_available():
            name = "xpu"
        elif torch.backends.mps.is_available():
            name = "mps"
    match = re.fullmatch(r"(cpu|cuda|xpu|mps)(?::(\d+))?", name)
    if not match:
        here = {device_facts(d).fingerprint: d for d in [*map(torch.device, _cuda_devices()), torch.device("cpu")]}
        if name in here:
            return here[name]
        raise UserError(f"device {name!r} is not here; it is cuda, cuda:1, cpu, mps, xpu, or one of {', '.join(here)}")
    kind, index = match[1], int(match[2] or 0)
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps":
        count = int(torch.backends.mps.is_available())
    else:
        module = getattr(torch, kind)
        count = module.device_count() if module.is_available() else 0
    if index >= count:
        seen = [f"{kind}:{i}" for i in range(count)] + ["cpu"]
        raise UserError(f"device {name} is not here; this torch ({torch.__version__}) sees {', '.join(seen)}")
    if kind == "cuda":
        reason = lacks_kernels(torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())
        if reason:
            raise NoKernels(f"{torch.cuda.get_device_name(index)}: {reason}")
    return torch.device(kind, index)


def device_facts(device: "torch.device") -> DeviceFacts:
    """What `device` is; on a card this makes no context."""
    import torch

    capability, uuid, cores = None, "", os.cpu_count() or 1
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        name, total, capability, cores = p.name, p.total_memory, (p.major, p.minor), p.multi_processor_count
        uuid = driver_uuid(str(p.uuid), nvml.cards(), os.environ) if getattr(p, "uuid", None) else ""
    elif device.type == "xpu":
        p = torch.xpu.get_device_properties(device)
        name, total = p.name, p.total_memory
    else:
        name, total = cpu_name() + (" (Metal)" if device.type == "mps" else ""), host_memory().total_bytes
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return DeviceFacts(
        fingerprint=slug(name if device.type in ("cuda", "xpu") else f"{device.type} {name}"), name=name,
        kind=device.type, total_bytes=total, capability=capability, cores=cores, uuid=uuid, torch=str(torch.__version__),
        cuda=torch.version.cuda if device.type == "cuda" else None, driver=nvml.driver() if device.type == "cuda" else None,
        python=platform.python_version(), platform=platform.platform(),
        allocator=conf or ("native" if device.type == "cuda" else "default"))


def lock_fp32() -> None:
    """IEEE fp32 in every product and convolution, whatever was set before; UserError if the environment forbids it."""
    import torch

    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        raise UserError("NVIDIA_TF32_OVERRIDE=1 is set, which turns fp32 products into TF32; unset it")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def settle_heap() -> None:
    """Keeps a processor's peak the same from run to run: glibc would raise the size from which it returns freed blocks to
    the system up to 32 MB, and the large ones then break up its heap, by which a 10M model's peak crept from 650 to 730 MB
    within 60 steps; held at 16 MB it ends at 657."""
    if sys.platform == "linux":
        import ctypes

        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(-3, 16 << 20)  # M_MMAP_THRESHOLD


def engine_refusal(engine: str, kind: str, capability: tuple[int, int] | None) -> str | None:
    """Why `engine` can't run on a device of this kind and capability; None if it can."""
    if engine == "graph" and kind != "cuda":
        return f"engine graph records CUDA graphs, which a {kind} device does not have; use eager"
    if engine == "compile" and (kind != "cuda" or capability is None or capability < (7, 0)):
        seen = "compute capability {}.{}".format(*capability) if kind == "cuda" and capability else f"a {kind} device"
        return f"engine compile needs a CUDA card of compute capability 7.0 or more, and this is {seen}; use " + (
            "eager or graph" if kind == "cuda" else "eager")
    return None


def synchronize(device: "torch.device") -> None:
    """Waits until the device has done all that it was given."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


ON_BATTERY = ("on battery, where a card runs at about half its speed (Notebookcheck: -53%) and a forecast means nothing; "
              "plug the machine in")


def on_battery(uuid: str = "") -> bool:
    """Whether the machine has a battery and runs on it, by the system or by the driver of the card called `uuid`."""
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return (battery is not None and battery.power_plugged is False) or nvml.power_source(uuid) == 1

"""What devices are called: the names of their folders under results/, and which measured one is meant. Imports no torch."""

import functools
import os
import platform
import re
import sys

from spillcliff.errors import UserError
from spillcliff.hardware import visible


def slug(text: str) -> str:
    """"NVIDIA H200" to "nvidia-h200": a name that is a folder on every system."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm|c)\)", "", text.lower())).strip("-")


@functools.cache
def cpu_name() -> str:
    """The processor's own name and its number of cores, as "AMD EPYC, 2 cores"."""
    name = ""
    try:
        if sys.platform == "linux":
            with open("/proc/cpuinfo") as f:
                name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
        elif sys.platform == "win32":
            import winreg

            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                name = winreg.QueryValueEx(key, "ProcessorNameString")[0].strip()
        elif sys.platform == "darwin":
            import subprocess

            asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
            name = asked.stdout.strip()
    except OSError:
        pass
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


_SEVERAL = re.compile(r"-x([1-9]\d{0,5})(-sharded)?$")


def multi_device_name(fingerprint: str, count: int, is_sharded: bool = False) -> str:
    """What `count` devices of a kind are called that train one model together: a device of their own, with a folder of its
    own under results/."""
    return fingerprint if count == 1 else f"{fingerprint}-x{count}" + "-sharded" * is_sharded


def device_count(name: str) -> int:
    """How many devices are meant by what `multi_device_name` gave."""
    match = _SEVERAL.search(name)
    return int(match[1]) if match else 1


def is_sharded(name: str) -> bool:
    """Whether `name` is of devices that keep a part of the weights each."""
    return name.endswith("-sharded")


def single_device_name(name: str) -> str:
    """What one of several devices is called."""
    return _SEVERAL.sub("", name)


def cpu_fingerprints() -> tuple[str, str]:
    """What this machine's processor is called as a device, and as Metal's."""
    return slug(f"cpu {cpu_name()}"), slug(f"mps {cpu_name()} (Metal)")


def choose_device(names: list[str], asked: str | None, only_one_will_do: bool) -> str:
    """Which of the measured devices `names` is meant: the one called `asked` ("cuda", "cuda:1", "cpu", "mps" or a name),
    else this machine's, of its cards the first that is visible. Another machine's is taken unnamed only if it is the only
    one and `only_one_will_do`. UserError lists the names. Asks the driver alone, not torch."""
    seen = visible.here()
    cpu, mps = cpu_fingerprints()
    if asked is not None:
        card = re.fullmatch(r"cuda(?::(\d{1,9}))?", asked)
        asked = slug(seen.at(int(card[1] or 0)).name) if card else {"cpu": cpu, "mps": mps}.get(asked, asked)
        if asked not in names:
            raise UserError(f"no records of device {asked!r}; there are some of {', '.join(names)}")
        return asked
    cards = [name for name in dict.fromkeys(slug(device.name) for device in seen.devices) if name in names]
    if len(cards) > 1 and not seen.is_ordered:
        raise UserError(f"which of this machine's cards is meant can't be told: CUDA has an order of its own for cards of "
                        f"different kinds; choose one by --device, of {', '.join(cards)}")
    for here in [*cards, mps, cpu]:
        if here in names:
            return here
    if len(names) == 1 and only_one_will_do:
        return names[0]
    hides = f" that is visible (CUDA_VISIBLE_DEVICES hides {seen.hidden} of its cards)" if seen.hidden else ""
    raise UserError(f"none of the records is of a device of this machine{hides}: measure it with `probe grid --model 150M`, "
                    f"or choose another one by --device, of {', '.join(names)}")

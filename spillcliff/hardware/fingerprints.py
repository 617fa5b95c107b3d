"""What devices are called: the names of their folders under results/, and which measured one is meant. Imports no torch."""

import functools
import os
import platform
import re
import sys

from spillcliff.errors import UserError
from spillcliff.hardware import nvml


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
    else this machine's. Another machine's is taken unnamed only if it is the only one and `only_one_will_do`. UserError
    lists the names. Asks the driver alone, not torch."""
    cards = list(map(slug, nvml.names()))
    cpu, mps = cpu_fingerprints()
    if asked is not None:
        kind, _, index = asked.partition(":")
        if kind == "cuda":
            if not (index or "0").isdecimal() or int(index or 0) >= len(cards):
                raise UserError(f"device {asked} is not here; this machine's cards are: {', '.join(cards) or 'none'}")
            asked = cards[int(index or 0)]
        else:
            asked = {"cpu": cpu, "mps": mps}.get(asked, asked)
        if asked not in names:
            raise UserError(f"no records of device {asked!r}; there are some of {', '.join(names)}")
        return asked
    for here in [*cards, mps, cpu]:
        if here in names:
            return here
    if len(names) == 1 and only_one_will_do:
        return names[0]
    raise UserError(f"none of the records is of this machine: measure it with `probe grid --model 150M`, or choose another "
                    f"one by --device, of {', '.join(names)}")

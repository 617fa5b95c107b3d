"""Which card of this machine a job computes on."""

import contextlib
import os
import re

from spillcliff.errors import UserError
from spillcliff.hardware import nvml, windows_counters
from spillcliff.hardware.fingerprints import single_device_name, slug


def card_names() -> dict[str, str]:
    """Names of the cards here, as of their folders under results/, by uuid."""
    return dict(zip(nvml.uuids(), map(slug, nvml.names()), strict=False))


def card_called(device: str) -> str | None:
    """The uuid of the card that --device means; None for the processor, UserError for what isn't here."""
    if device == "cpu":
        return None
    cards = card_names()
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match and int(match[1] or 0) < len(cards):
        return list(cards)[int(match[1] or 0)]
    for uuid, name in cards.items():
        if name == device:
            return uuid
    choices = ", ".join(["cpu", *(f"cuda:{i}" for i in range(len(cards))), *dict.fromkeys(cards.values())])
    raise UserError(f"--device {device}: nothing of that name can be read here; it is one of {choices}")


def card_of(pids: set[int], ran_on: str | None, memory: windows_counters.Memory | None) -> str | None:
    """The uuid of the card that the processes compute on, the fullest where that can't be told; None for a processor, or a
    card that can't be read. `ran_on` is the device's name where it is known, `memory` what Windows counts."""
    cards = card_names()
    if ran_on is not None:
        cards = {uuid: name for uuid, name in cards.items() if name in (ran_on, single_device_name(ran_on))}
    used = [uuid for uuid in cards if pids & set(nvml.processes(uuid))]
    if not used and ran_on is None and not any(_has_card_open(pid, memory) for pid in pids):
        return None
    return max(used or cards, key=lambda uuid: nvml.used_bytes(uuid) or 0, default=None)


def _has_card_open(pid: int, memory: windows_counters.Memory | None) -> bool:
    """Whether a process has an NVIDIA card open, as one in a container, whose driver knows it by another pid, shows."""
    if windows_counters.adapter_of(memory, pid):
        return True
    with contextlib.suppress(OSError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if re.match(r"/dev/nvidia\d", os.readlink(f"/proc/{pid}/fd/{handle}")):
                    return True
    return False

"""Which card of this machine a job computes on. A card that can't be told or read is "", which every reader bears."""

import contextlib
import os
import re
from collections.abc import Mapping

from spillcliff.errors import UserError
from spillcliff.hardware import nvml, visible, windows_counters
from spillcliff.hardware.fingerprints import single_device_name, slug


def card_names() -> dict[str, str]:
    """Names of the cards here and of their MIG instances, as of their folders under results/, by uuid."""
    return {uuid: slug(name) for card in nvml.cards() for uuid, name in ((card.uuid, card.name), *(card.instances or ()))}


def card_called(device: str) -> str | None:
    """The uuid of the card that --device means; None for the processor, UserError for what isn't here, or can't be told."""
    if device == "cpu":
        return None
    seen, cards = visible.here(), card_names()
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match and int(match[1] or 0) < len(seen.devices):
        return seen.at(int(match[1] or 0)).uuid
    for uuid, name in {**{d.uuid: slug(d.name) for d in seen.devices}, **cards}.items():
        if name == device:
            return uuid
    choices = ", ".join(["cpu", *(f"cuda:{i}" for i in range(len(seen.devices))), *dict.fromkeys(cards.values())])
    raise UserError(f"--device {device}: nothing of that name can be read here; it is one of {choices}")


def card_of(pids: set[int], ran_on: str | None, recorded_uuid: str, memory: windows_counters.Memory | None,
            environment: Mapping[str, str]) -> str | None:
    """The uuid of the card that the processes compute on; "" for one that can't be told or read, None for a processor.

    `ran_on` is the device's name and `recorded_uuid` its card where the job itself has written them down, `memory` what
    Windows counts, and `environment` the job's own, which hides cards from it.
    """
    cards = card_names()
    if recorded_uuid in cards:
        return recorded_uuid
    if ran_on is not None:
        if ran_on.startswith("cpu-"):
            return None
        cards = {uuid: name for uuid, name in cards.items() if name in (ran_on, single_device_name(ran_on))}
    held_bytes = {uuid: sum(by_pid.get(pid) or 0 for pid in pids)
                  for uuid in cards if pids & set(by_pid := nvml.processes(uuid))}
    if held_bytes:
        return max(held_bytes, key=lambda uuid: (held_bytes[uuid], nvml.used_bytes(uuid) or 0))
    if ran_on is None and not any(_has_card_open(pid, memory) for pid in pids):
        return None
    seen = {device.uuid for device in visible.visible(nvml.cards(), environment).devices} & {*cards, ""}
    return seen.pop() if len(seen) == 1 else ""


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

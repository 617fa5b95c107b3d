"""Which of a machine's cards a process sees, and in which order, by its environment: as CUDA reads it, without torch.

torch counts the cards that CUDA shows it; the driver's library lists all, by their place on the bus. What joins the two is a
card's UUID. Pure but for `here`. CUDA's rules: docs.nvidia.com/cuda/cuda-programming-guide, "CUDA environment variables",
and docs.nvidia.com/datacenter/tesla/mig-user-guide for instances.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spillcliff.errors import UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.nvml import DriverCard

FASTER = 1.25
"""Times the cores times the clock of another kind of card from which on one is taken to be the faster, since CUDA does not
say how it compares them; assumed."""


class CudaDevice(NamedTuple):
    """What CUDA shows as one device: a card, or a MIG instance. `uuid` is "" where it can't be told which instance it is."""

    uuid: str
    name: str


@dataclass(frozen=True)
class Visible:
    """The devices that a process sees, as torch counts them; where `is_ordered` is false all that it may see, since CUDA
    puts cards of different kinds in an order of its own. `hidden` is how many cards the environment hides."""

    devices: tuple[CudaDevice, ...]
    is_ordered: bool = True
    hidden: int = 0

    def at(self, index: int) -> CudaDevice:
        """torch's cuda:`index`; UserError if there is none, or it can't be told which."""
        listed = ", ".join(d.name for d in self.devices) or "none"
        if index >= len(self.devices):
            hides = f" (CUDA_VISIBLE_DEVICES hides {self.hidden})" if self.hidden else ""
            raise UserError(f"device cuda:{index} is not here; this machine's cards are: {listed}{hides}")
        if not self.is_ordered:
            raise UserError(f"which card is cuda:{index} can't be told: CUDA has an order of its own for cards of different "
                            f"kinds; name one, of {listed}, or set CUDA_DEVICE_ORDER=PCI_BUS_ID")
        return self.devices[index]


def here() -> Visible:
    """What a process of this environment sees of this machine."""
    return visible(nvml.cards(), os.environ)


def visible(cards: Sequence[DriverCard], environment: Mapping[str, str]) -> Visible:
    """What a process with this environment sees of `cards`, which are in the order of their bus."""
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    ordered = _in_cuda_order(cards, environment.get("CUDA_DEVICE_ORDER"))
    if asked is None:
        return Visible(_shown(ordered or cards), ordered is not None)
    chosen: list[CudaDevice] = []
    for text in asked.split(","):
        index = re.match(r"\s*\+?(\d+)", text)
        if index and int(index[1]) < len(cards):
            if ordered is None:
                return Visible(_shown(cards), is_ordered=False)
            found: CudaDevice | None = _device_of(ordered[int(index[1])])
        else:
            found = None if index else _called(text.strip(), cards)
        if found is None:  # the first that is not there ends the list
            break
        if found in chosen:  # a card that is named twice makes CUDA show none
            return Visible((), hidden=len(cards))
        chosen.append(found)
    devices = tuple(chosen)
    if any(_is_instance(d, cards) for d in devices):  # CUDA shows one instance to a process
        devices = devices[:1]
    return Visible(devices, hidden=len(cards) - len(devices))


def _in_cuda_order(cards: Sequence[DriverCard], order: str | None) -> Sequence[DriverCard] | None:
    """Fastest first unless the bus is asked for; None where it can't be told which are the faster ones."""
    if order == "PCI_BUS_ID" or len({card.name for card in cards}) <= 1:
        return cards
    speeds = {card.name: card.speed or 0.0 for card in cards}
    names = sorted(speeds, key=speeds.__getitem__, reverse=True)
    if any(speeds[slower] <= 0 or speeds[faster] < FASTER * speeds[slower]
           for faster, slower in itertools.pairwise(names)):
        return None
    return sorted(cards, key=lambda card: names.index(card.name))


def _shown(cards: Sequence[DriverCard]) -> tuple[CudaDevice, ...]:
    """All cards; one instance alone where any is cut into instances."""
    devices = tuple(_device_of(card) for card in cards)
    instances = [device for card, device in zip(cards, devices, strict=True) if card.instances is not None]
    return tuple(instances[:1]) if instances and len(instances) == len(cards) else devices


def _device_of(card: DriverCard) -> CudaDevice:
    """A card as a device: of one that is cut into instances its only one, or one of which it can't be told which it is."""
    if card.instances is None:
        return CudaDevice(card.uuid, card.name)
    names = {name for _, name in card.instances}
    uuid = card.instances[0][0] if len(card.instances) == 1 else ""
    return CudaDevice(uuid, names.pop() if len(names) == 1 else card.name)


def _called(text: str, cards: Sequence[DriverCard]) -> CudaDevice | None:
    """The card or instance whose UUID begins so; None if there is none, or several."""
    if not text.startswith(("GPU-", "MIG-")):
        return None
    found = [_device_of(card) for card in cards if card.uuid.startswith(text)]
    found += [CudaDevice(uuid, name) for card in cards for uuid, name in card.instances or () if uuid.startswith(text)]
    return found[0] if len(found) == 1 else None


def _is_instance(device: CudaDevice, cards: Sequence[DriverCard]) -> bool:
    return all(card.uuid != device.uuid for card in cards)


def driver_uuid(torch_uuid: str, cards: Sequence[DriverCard], environment: Mapping[str, str]) -> str:
    """What the driver's library calls the device whose UUID torch gives (without "GPU-"); "" for a MIG instance of which it
    can't be told which it is, so that nothing is read rather than the whole card's figures."""
    if any(uuid == f"MIG-{torch_uuid}" for card in cards for uuid, _ in card.instances or ()):
        return f"MIG-{torch_uuid}"
    card = next((card for card in cards if card.uuid == f"GPU-{torch_uuid}"), None)
    if card is None or card.instances is None:
        return f"GPU-{torch_uuid}"
    of_card = {uuid for uuid, _ in card.instances}
    seen = [device.uuid for device in visible(cards, environment).devices if device.uuid in of_card]
    return seen[0] if len(seen) == 1 else ""

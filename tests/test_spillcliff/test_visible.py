"""A process sees the cards that CUDA shows it, in CUDA's order; what can't be told is not guessed."""

from types import SimpleNamespace

import pytest

from spillcliff.errors import UserError
from spillcliff.hardware import nvml
from spillcliff.hardware.nvml import DriverCard
from spillcliff.hardware.visible import driver_uuid, visible

TWO = (DriverCard("GPU-1a", "NVIDIA H200"), DriverCard("GPU-1b", "NVIDIA H200"))
OLD, NEW = DriverCard("GPU-aa", "GTX 1060", speed=2.2e6), DriverCard("GPU-bb", "RTX 3060", speed=6.4e6)
LIKE = DriverCard("GPU-cc", "GTX 1650", speed=2.0e6)
SLICES = (("MIG-31", "A100 MIG 1g.5gb"), ("MIG-32", "A100 MIG 1g.5gb"))
CUT = DriverCard("GPU-cut", "A100", SLICES)
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("asked", "seen"), [
    (None, "1a 1b"), ("0", "1a"), ("1", "1b"), ("1,0", "1b 1a"), (" 1 , 0", "1b 1a"), ("+1", "1b"), ("1x", "1b"),
    ("GPU-1b", "1b"), ("GPU-1b,GPU-1a", "1b 1a"), ("GPU-1b,0", "1b 1a"),
    ("", ""), ("-1", ""), ("2", ""), ("NoDevFiles", ""), ("none", ""), ("GPU-1", ""), ("GPU-9", ""), ("1a,0", "1b 1a"),
    ("0,-1,1", "1a"), ("0,5,1", "1a"), ("0,,1", "1a"), ("1,GPU-9,0", "1b"),
    ("0,0", ""), ("1,GPU-1b", ""), ("MIG-31", "")])
def test_the_environment_hides_and_orders(asked, seen):
    """An index that isn't there ends the list, a card that is named twice hides all, and a UUID may be shortened as long as
    it says which card it is."""
    found = visible(TWO, {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked})
    assert " ".join(d.uuid.removeprefix("GPU-") for d in found.devices) == seen
    assert found.is_ordered
    assert found.hidden == 2 - len(found.devices)


@pytest.mark.parametrize(("cards", "environment", "seen"), [
    ((OLD, NEW), {}, "GPU-bb GPU-aa"), ((OLD, NEW), BUS, "GPU-aa GPU-bb"),
    ((OLD, NEW), {"CUDA_VISIBLE_DEVICES": "1"}, "GPU-aa"), ((OLD, NEW), BUS | {"CUDA_VISIBLE_DEVICES": "1"}, "GPU-bb"),
    ((OLD, NEW, OLD._replace(uuid="GPU-dd")), {}, "GPU-bb GPU-aa GPU-dd"),
    ((OLD, NEW), {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, "GPU-aa"),
    ((OLD, NEW), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "GPU-bb GPU-aa"),
    ((OLD, LIKE), {}, None), ((OLD, NEW._replace(speed=None)), {}, None), ((OLD, LIKE), BUS, "GPU-aa GPU-cc"),
    ((OLD, LIKE), {"CUDA_VISIBLE_DEVICES": "0"}, None), ((OLD, LIKE), {"CUDA_VISIBLE_DEVICES": "GPU-cc"}, "GPU-cc"),
    ((OLD, LIKE), {"CUDA_VISIBLE_DEVICES": "-1"}, "")])
def test_cards_of_different_kinds_are_fastest_first_unless_the_bus_is_asked_for(cards, environment, seen):
    """Two that are about as fast can't be told apart, and are both possible then."""
    found = visible(cards, environment)
    if seen is None:
        assert not found.is_ordered
        assert set(found.devices) == {(c.uuid, c.name) for c in cards}
        with pytest.raises(UserError, match=r"GTX 1060.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            found.at(0)
    else:
        assert found.is_ordered
        assert " ".join(d.uuid for d in found.devices) == seen


@pytest.mark.parametrize(("card", "environment", "uuid"), [
    (CUT, {"CUDA_VISIBLE_DEVICES": "MIG-32"}, "MIG-32"), (CUT, {}, ""), (CUT, {"CUDA_VISIBLE_DEVICES": "0"}, ""),
    (CUT, {"CUDA_VISIBLE_DEVICES": "MIG-32,MIG-31"}, "MIG-32"), (CUT._replace(instances=SLICES[:1]), {}, "MIG-31"),
    (CUT._replace(instances=()), {}, "")])
def test_an_instance_is_never_taken_for_its_card(card, environment, uuid):
    """torch may give the card's own UUID for an instance; the card's figures are those of all its instances."""
    (device,) = visible([card], environment).devices
    assert device.uuid == uuid
    assert device.name == ("A100 MIG 1g.5gb" if card.instances else "A100")
    assert driver_uuid("cut", [card], environment) == uuid
    assert driver_uuid("32", [CUT], {}) == "MIG-32"


def test_a_whole_card_is_known_by_its_uuid_whatever_the_environment_says():
    assert driver_uuid("aa", (OLD, NEW), {"CUDA_VISIBLE_DEVICES": "1"}) == "GPU-aa"
    assert driver_uuid("aa", (), {}) == "GPU-aa"


class Library:
    """NVML as a library that answers some questions, refuses others, and lacks the rest."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        self._answers = answers

    def __getattr__(self, name):
        if name not in self._answers:
            raise AttributeError(name)

        def call(*arguments):
            answer = self._answers[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call


REFUSALS = [Library.NVMLError("Not Supported"), OSError("access violation"), TypeError("NULL"), KeyError("unknown field")]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda e: type(e).__name__)
def test_what_the_driver_refuses_is_not_known(monkeypatch, refusal):
    """An instance of MIG refuses utilization, power and clocks, an old laptop its power, a container all: never a traceback,
    and never a nought."""
    names = ("Count", "HandleByIndex", "UUID", "Name", "HandleByUUID", "MemoryInfo", "ComputeRunningProcesses",
             "ProcessUtilization", "PowerSource", "PowerUsage", "UtilizationRates", "ClockInfo", "Temperature",
             "CurrentClocksEventReasons", "EnforcedPowerLimit", "MaxClockInfo", "MigMode", "NumGpuCores")
    answers = {f"nvmlDeviceGet{name}": refusal for name in names}
    for more in ({}, {"nvmlDeviceGetHandleByUUID": 1}, {"nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": 1}):
        monkeypatch.setattr(nvml, "_nvml", lambda more=more: Library(**answers | more))
        assert nvml.readings("GPU-1") == {}
        assert nvml.limits("GPU-1") == {}
        assert nvml.processes("GPU-1") == {}
        assert nvml.utilization_since("GPU-1", 0) == {}
        assert {f("GPU-1") for f in (nvml.used_bytes, nvml.free_bytes, nvml.power_source)} == {None}
        assert nvml.driver() is None
    assert nvml.cards() == (DriverCard("", "", None, None),)


def test_an_instance_is_listed_with_its_card(monkeypatch):
    uuids, names = {0: b"GPU-cut", 1: "MIG-31"}, {0: b"A100", 1: "A100 MIG 1g.5gb"}

    def instance(card, index):
        if index:
            raise Library.NVMLError("Not Found")
        return 1

    monkeypatch.setattr(nvml, "_nvml", lambda: Library(
        nvmlDeviceGetCount=1, nvmlDeviceGetHandleByIndex=0, nvmlDeviceGetUUID=uuids.get, nvmlDeviceGetName=names.get,
        nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetNumGpuCores=6912, nvmlDeviceGetMaxClockInfo=1410,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=2**32 - 1)))
    assert nvml.cards() == (DriverCard("GPU-cut", "A100", (("MIG-31", "A100 MIG 1g.5gb"),), 6912 * 1410.0),)
    assert nvml.uuids() == ("GPU-cut", "MIG-31")

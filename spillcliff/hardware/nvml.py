"""What the NVIDIA driver says, without touching the card: every reading is a number or None."""

import functools
import warnings
from typing import Any, NamedTuple


class DriverCard(NamedTuple):
    """A card as the driver lists it. `instances` are the (uuid, name) of what it is cut into, by MIG; None where it is not.
    `speed` is its cores times their highest clock in MHz; None where the driver doesn't tell."""

    uuid: str
    name: str
    instances: tuple[tuple[str, str], ...] | None = None
    speed: float | None = None


@functools.cache
def _nvml() -> Any:
    """The initialised library, or None where there is no NVIDIA driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pynvml
        pynvml.nvmlInit()
        return pynvml
    except Exception:  # no package, no library, no driver, no permission: all mean that nothing can be read
        return None


def _ask(name: str, *args: Any) -> Any:
    """One NVML call; None where it is not supported (per-process memory under Windows, power on old laptops, most of what an
    instance of MIG is asked)."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return getattr(nvml, name)(*args)
    except Exception:  # not supported, no permission, a library without the call, a card that is gone: nothing was read
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def cards() -> tuple[DriverCard, ...]:
    """The cards of this machine, in the order of their bus, whatever the environment hides."""
    handles = [_ask("nvmlDeviceGetHandleByIndex", i) for i in range(_ask("nvmlDeviceGetCount") or 0)]
    return tuple(DriverCard(*_identity(h), _instances(h), _speed(h)) for h in handles if h is not None)


def _identity(handle: Any) -> tuple[str, str]:
    """(uuid, product name)."""
    return _text(_ask("nvmlDeviceGetUUID", handle)) or "", _text(_ask("nvmlDeviceGetName", handle)) or ""


def _instances(handle: Any) -> tuple[tuple[str, str], ...] | None:
    mode = _ask("nvmlDeviceGetMigMode", handle)
    if not mode or mode[0] != 1:  # (now, after a restart)
        return None
    most = _ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    handles = [_ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(most)]
    return tuple(_identity(h) for h in handles if h is not None)


def _speed(handle: Any) -> float | None:
    cores, clock_mhz = _ask("nvmlDeviceGetNumGpuCores", handle), _ask("nvmlDeviceGetMaxClockInfo", handle, 1)
    return float(cores * clock_mhz) if cores and clock_mhz else None


def uuids() -> tuple[str, ...]:
    """What can be asked for memory: the cards' names for themselves ("GPU-..."), and their instances' ("MIG-...")."""
    return tuple(uuid for card in cards() for uuid in (card.uuid, *(name for name, _ in card.instances or ())))


def _handle(uuid: str) -> Any:
    return _ask("nvmlDeviceGetHandleByUUID", uuid)


def used_bytes(uuid: str) -> int | None:
    """Bytes in use on the card by everything."""
    memory = _ask("nvmlDeviceGetMemoryInfo", _handle(uuid)) if uuid else None
    return memory and int(memory.used)


def free_bytes(uuid: str) -> int | None:
    """Bytes that nobody uses."""
    memory = _ask("nvmlDeviceGetMemoryInfo", _handle(uuid)) if uuid else None
    return memory and int(memory.free)


def processes(uuid: str) -> dict[int, int | None]:
    """Bytes of the card that each process holds which computes on it, by pid, context included; None under Windows. Empty
    where the driver doesn't tell; in a container the pids may be the host's."""
    running = _ask("nvmlDeviceGetComputeRunningProcesses", _handle(uuid)) if uuid else None
    return {p.pid: p.usedGpuMemory for p in running or ()}


def utilization_since(uuid: str, begin: float) -> dict[int, float]:
    """How busy each process kept the multiprocessors since `begin` (time.time()), by pid: the mean of the driver's samples,
    in percent. Empty where it has none."""
    percents: dict[int, list[int]] = {}
    samples = _ask("nvmlDeviceGetProcessUtilization", _handle(uuid), int(begin * 1e6)) if uuid else None
    for sample in samples or ():
        if sample.timeStamp > begin * 1e6 and sample.smUtil <= 100:  # a percentage, else no reading
            percents.setdefault(sample.pid, []).append(sample.smUtil)
    return {pid: sum(values) / len(values) for pid, values in percents.items()}


def driver() -> str | None:
    """The driver's version."""
    return _text(_ask("nvmlSystemGetDriverVersion"))


def power_source(uuid: str) -> int | None:
    """0: mains, 1: battery, 2: a supply that gives less than the card can draw."""
    return _ask("nvmlDeviceGetPowerSource", _handle(uuid)) if uuid else None


def power_w(uuid: str) -> float | None:
    """What the card draws now; of many cards the mean over the last second."""
    power = _ask("nvmlDeviceGetPowerUsage", _handle(uuid)) if uuid else None
    return power / 1000 if power else None


def energy_j(uuid: str) -> float | None:
    """What the card has taken since its driver was loaded, by its own counter (Volta and later)."""
    energy_mj = _ask("nvmlDeviceGetTotalEnergyConsumption", _handle(uuid)) if uuid else None
    return energy_mj / 1000 if energy_mj else None


def readings(uuid: str) -> dict[str, float]:
    """Clock (MHz), temperature, power (W), utilization (%) and the throttle bits, each only where there is one."""
    handle = _handle(uuid) if uuid else None
    if handle is None:
        return {}
    utilization = _ask("nvmlDeviceGetUtilizationRates", handle)
    values = {
        "clock_mhz": _ask("nvmlDeviceGetClockInfo", handle, 1),  # 1: the multiprocessors' clock
        "temperature_c": _ask("nvmlDeviceGetTemperature", handle, 0),  # 0: the chip's own sensor
        "power_w": power_w(uuid),
        "utilization": utilization.gpu if utilization and utilization.gpu <= 100 else None,
        "throttle": _ask("nvmlDeviceGetCurrentClocksEventReasons", handle),
    }
    return {name: value for name, value in values.items() if value is not None}


def limits(uuid: str) -> dict[str, float]:
    """clock_max_mhz, the multiprocessors' highest clock, and power_limit_w, each only where there is one."""
    handle = _handle(uuid) if uuid else None
    if handle is None:
        return {}
    power = _ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    values = {"clock_max_mhz": _ask("nvmlDeviceGetMaxClockInfo", handle, 1), "power_limit_w": power and power / 1000}
    return {name: value for name, value in values.items() if value is not None}

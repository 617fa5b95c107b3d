"""What several devices would do as one, assumed from what one was measured to do, where they were not measured."""

from collections.abc import Iterable
from dataclasses import replace

from probe.records import Record
from spillcliff.hardware.fingerprints import multi_device_name
from spillcliff.units import format_bytes

LINK_BYTES_S = 6e9
"""Between two cards through host memory: half of what PCIe 3.0 x16 copies, as each byte goes up and down again; assumed.
NVLink has 20 to 150 times as much, and hides it besides."""
GRADIENT_BYTES = 4


def scaled_records(records: Iterable[Record], count: int) -> list[Record]:
    """Each one's records as those of `count` devices: every micro-step in equal parts, none of the exchange hidden."""
    return [_scaled(r, count) for r in records if r.cell.step.update == "after" and not r.cell.is_custom]


def _scaled(r: Record, count: int) -> Record:
    more_s, more_bytes = exchange_s(r, count), _gradient_bytes(r)
    peaks = {name: value + more_bytes for name in ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes")
             if (value := getattr(r, name)) is not None}
    step_s = tuple(t + more_s for t in r.step_s)
    energy_j = r.power_w * sum(step_s) if r.power_w and step_s else None
    return replace(r, cell=r.cell.with_step(batch=r.cell.batch * count), device=multi_device_name(r.device, count),
                   step_s=step_s, energy_j=energy_j, predicted_bytes=None, **peaks)


def _gradient_bytes(r: Record) -> int:
    return GRADIENT_BYTES * r.model.parameters if r.model else 0


def exchange_s(r: Record, count: int) -> float:
    """Seconds in which `count` devices add up their gradients in a ring: each sends 2 (count - 1) / count of them (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce algorithms)."""
    return 2 * (count - 1) / count * _gradient_bytes(r) / LINK_BYTES_S


def assumption(r: Record, count: int) -> str:
    """What is assumed about `r`, a scaled record, for the plan's account."""
    return (f"{count} devices were not measured together: assumed from one, each step {exchange_s(r, count) * 1000:,.0f} ms "
            f"longer for gradients at {LINK_BYTES_S / 1e9:g} GB/s and {format_bytes(_gradient_bytes(r))} more memory; probe "
            f"grid --model {r.cell.model} --nproc {count} measures them")

"""What several devices would do together, assumed from what one was measured to do, where they were not measured."""

from collections.abc import Iterable
from dataclasses import replace

from probe.records import Record
from spillcliff.hardware.fingerprints import multi_device_name
from spillcliff.units import format_bytes

LINK_BYTES_S = 6e9
"""Between two cards through host memory: half of what PCIe 3.0 x16 copies, as each byte goes up and down again; assumed.
NVLink has 20 to 150 times as much, and hides it besides."""
GRADIENT_BYTES = 4


def assumed(records: Iterable[Record], size: int) -> list[Record]:
    """Each one's records as those of `size` together: every micro-step in equal parts, none of the exchange hidden."""
    return [_assumed(r, size) for r in records if r.cell.update == "after" and not r.cell.is_foreign]


def _assumed(r: Record, size: int) -> Record:
    more_s, more_bytes = exchange_s(r, size), GRADIENT_BYTES * r.model.parameters
    peaks = {name: value + more_bytes for name in ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes")
             if (value := getattr(r, name)) is not None}
    return replace(r, cell=replace(r.cell, batch=r.cell.batch * size), device=multi_device_name(r.device, size),
                   step_s=tuple(t + more_s for t in r.step_s), predicted_bytes=None, **peaks)


def exchange_s(r: Record, size: int) -> float:
    """Seconds in which `size` devices add up their gradients in a ring: each sends 2 (size - 1) / size of them (Patarasuk
    and Yuan 2009, Bandwidth optimal all-reduce algorithms)."""
    return 2 * (size - 1) / size * GRADIENT_BYTES * r.model.parameters / LINK_BYTES_S


def reason(r: Record, size: int) -> str:
    """What is assumed about `r`, an assumed record, for the plan's account."""
    more_bytes = format_bytes(GRADIENT_BYTES * r.model.parameters)
    return (f"{size} devices were not measured together: assumed from one, each step {exchange_s(r, size) * 1000:,.0f} ms "
            f"longer for gradients at {LINK_BYTES_S / 1e9:g} GB/s and {more_bytes} more memory; probe grid --model "
            f"{r.cell.model} --nproc {size} measures them")

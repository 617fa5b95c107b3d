"""What would fit on a card that is not here, as a table."""

import textwrap

from probe.cell import Cell
from probe.estimate.gpu_catalog import DESKTOP, HEADLESS, CatalogCard, limits, tok_s
from probe.estimate.peak import CardMemory, estimate
from probe.show.heatmap import NEVER_RUN, Place, series_title
from probe.show.text import GAP
from spillcliff.errors import UserError
from spillcliff.hardware.device import engine_refusal
from spillcliff.units import format_bytes

MARKS = {DESKTOP: "", HEADLESS: "+"}
"""Of a cell in the table, by the first of these limits that it is under."""
NOWHERE = "!"


def card_table(card: CatalogCard, cells: list[Cell], width: int = 80) -> list[str]:
    """What would fit on a card that was not measured: a table of the cells' estimated peaks in GB (10**9 bytes, the whole
    process), batches down, lengths across, each marked by the limit it is under; a legend; a paper throughput. ASCII, no
    line wider than `width`, unless one column is. The cells differ in batch and length alone. UserError for none, for
    somebody's own step, whose memory nothing estimates, and for an engine the card can't run.

    The context, about 0.7 GB of each peak, is taken to be an H200's; on other cards it may be some 0.4 GB less or more."""
    if not cells:
        raise UserError("there is no cell to estimate; name at least one batch and one length")
    model, step = cells[0].config, cells[0].step
    if model is None:
        raise UserError("a step of your own can't be estimated, only measured; name a size with --model, such as 150M")
    if refused := engine_refusal(step.engine, "cuda", card.capability):
        raise UserError(f"{card.name}: {refused}")
    memory = CardMemory.of({"kind": "cuda", "capability": card.capability})
    peaks = {(c.batch, c.length): estimate(c, memory).device_bytes for c in cells}
    lengths = sorted({length for _, length in peaks})
    slowest, fastest = (_two_digits(tok_s(card, model, n, step.recompute)) for n in (lengths[-1], lengths[0]))
    rates, at = (fastest, f"length {lengths[0]}") if slowest == fastest else (
        f"{fastest} to {slowest}", f"lengths {lengths[0]} to {lengths[-1]}")
    said = ["estimated for a card that was not measured",
            f"at {at} about {rates} tok/s (paper figure, not measured; `plan` needs a measured card)"]
    return [*textwrap.wrap(f"{card.name}: {series_title(cells[0])}", width), "", *_table(peaks, limits(card), width), "",
            *[line for text in [*_legend(peaks, limits(card)), *said] for line in textwrap.wrap(text, width)]]


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def _mark(peak: int, under: dict[str, int]) -> str:
    return next((sign for name, sign in MARKS.items() if peak <= under[name]), NOWHERE)


def _table(peaks: dict[Place, int], under: dict[str, int], width: int) -> list[str]:
    batches, lengths = (sorted(set(axis)) for axis in zip(*peaks, strict=True))
    labels = ["batch", *map(str, batches)]
    label = max(map(len, labels))
    columns = []
    for length in lengths:
        texts = [f"{length} "]  # the mark's own column
        texts += [f"{peaks[at] / 1e9:.2f}{_mark(peaks[at], under):1}" if at in peaks else NEVER_RUN + " "
                  for at in ((batch, length) for batch in batches)]
        wide = max(map(len, texts))
        columns.append([GAP + text.rjust(wide) for text in texts])
    blocks: list[list[list[str]]] = [[]]
    used = label
    for column in columns:
        if blocks[-1] and used + len(column[0]) > width:
            blocks.append([])
            used = label
        blocks[-1].append(column)
        used += len(column[0])
    drawn: list[str] = []
    for block in blocks:
        drawn += [""] * bool(drawn)
        rows = ["".join(texts) for texts in zip(*block, strict=True)]
        heading = f"{'':{label}}{GAP}estimated peak, GB, at length"
        drawn += [heading if len(heading) <= width else heading[:label] + GAP + "GB at length"]
        drawn += [(name.rjust(label) + row).rstrip() for name, row in zip(labels, rows, strict=True)]
    return drawn


def _legend(peaks: dict[Place, int], under: dict[str, int]) -> list[str]:
    headless, desktop = under[HEADLESS], under[DESKTOP]
    there = {_mark(peak, under) for peak in peaks.values()}
    entries = [f"no mark: fits with a desktop, under {format_bytes(desktop)}"] if MARKS[DESKTOP] in there else []
    if MARKS[HEADLESS] in there:
        entries.append(f"{MARKS[HEADLESS]} fits only headless, under {format_bytes(headless)}")
    if NOWHERE in there:
        entries.append(f"{NOWHERE} does not fit under {format_bytes(headless)}")
    return entries

"""Cards that nobody plugged in: what their vendor says of them, which limits a grid on them would have, and what would fit.

All figures are paper figures, none was measured here. Memory, CUDA cores and boost clocks of GeForce cards are
those that NVIDIA states on its product pages and in architecture white papers, partly read from reviews that repeat them,
for the reference clock (a Founders Edition's may be 6% higher, a partner's more); fp32 is 2 x cores x boost clock, multiply
and add per core and cycle without Tensor Cores. Data center cards have the "FP32" or "single precision" rate
that NVIDIA's datasheets are quoted with. Compute capabilities are from developer.nvidia.com/cuda-gpus and cuda-legacy-gpus.
A card's own product rate may be well off its paper rate (an H200's is 25% below). Laptop versions are other cards.
"""

import difflib
import re
from dataclasses import dataclass

from spillcliff.errors import UserError
from trainer.config import ModelConfig

GIB = 1 << 30
DRIVER_LEAVES = 0.97
"""Of the memory, the part that a process can have on a card that drives no display. An H200 has 0.991 of its nominal 141 GiB
for CUDA, by `probe card`, a T4 0.983 of what ECC leaves (deviceQuery); the rest is caution."""
DESKTOP_BYTES = 768 << 20
"""What the memory budget of a process under Windows was seen to lack of the whole card while the desktop was idle. It fits
what a GTX 1060 6GB's owner saw: 4.04 GB ran, 5.67 GB spilled, and this puts the end at 5.64 GB. A browser takes more."""
ECC_LEAVES = 15 / 16
"""Of GDDR memory where ECC is on and kept in the same memory: a T4 shows 15 of 16 GiB. HBM has its own room for it."""
UTILISATION = 0.5
"""The part of the paper rate that a step is taken to reach. Measured here on an H200 with 138M, eager, without recompute
(results/nvidia-h200/step.txt): 0.69 of its own measured product rate at 4 x 512 and 0.83 at 16 x 1024, and that rate is
50.4 of 67 TFLOP/s on paper, so 0.52 and 0.62 of the paper rate; the lower, rounded down, is for other cards' sake. A small
step reaches far less: 0.15 at 1 x 512, and a 13M model 0.10 at 4 x 512 unless recorded."""
RECOMPUTE_LEAVES = {"none": 1.0, "elementwise": 0.99, "block": 0.77}
"""Of the throughput, by `recompute`: 138M at 4 x 512 on an H200, from the same file."""

HEADLESS, DESKTOP = "headless", "with a desktop"
"""What a card does beside training."""

VENDOR = {"nvidia", "geforce", "tesla"}
SERIES = {"gtx", "rtx"}
FORMS = {"pcie", "sxm"}
NEAREST = 4
SHOWN = 40
"""Characters of an unknown name that an error repeats."""


@dataclass(frozen=True)
class CatalogCard:
    """What its vendor says of a card: nominal memory in bytes (GiB x 2**30 of "6 GB"), fp32 without Tensor Cores in FLOP/s
    at boost. `ecc` says that ECC is on as delivered and takes its room from that memory."""

    name: str
    memory_bytes: int
    fp32_flops_s: float
    capability: tuple[int, int]
    ecc: bool = False


def _geforce(name: str, gib: int, cores: int, boost_mhz: int, capability: tuple[int, int]) -> CatalogCard:
    return CatalogCard(name, gib * GIB, 2.0 * cores * boost_mhz * 1e6, capability)


def _data_center(name: str, gib: int, tflops: float, capability: tuple[int, int], ecc: bool = False) -> CatalogCard:
    return CatalogCard(name, gib * GIB, tflops * 1e12, capability, ecc)


CARDS: tuple[CatalogCard, ...] = (
    _geforce("GTX 1060 3GB", 3, 1152, 1708, (6, 1)),
    _geforce("GTX 1060 6GB", 6, 1280, 1708, (6, 1)),
    _geforce("GTX 1070", 8, 1920, 1683, (6, 1)),
    _geforce("GTX 1080", 8, 2560, 1733, (6, 1)),
    _geforce("GTX 1080 Ti", 11, 3584, 1582, (6, 1)),
    _geforce("GTX 1650", 4, 896, 1665, (7, 5)),  # with GDDR5; a later GDDR6 one has 192 GB/s and 1590 MHz
    _geforce("GTX 1660 Super", 6, 1408, 1785, (7, 5)),
    _geforce("GTX 1660 Ti", 6, 1536, 1770, (7, 5)),
    _geforce("RTX 2060 6GB", 6, 1920, 1680, (7, 5)),
    _geforce("RTX 2060 12GB", 12, 2176, 1650, (7, 5)),
    _geforce("RTX 2070", 8, 2304, 1620, (7, 5)),
    _geforce("RTX 2080", 8, 2944, 1710, (7, 5)),
    _geforce("RTX 2080 Ti", 11, 4352, 1545, (7, 5)),
    _geforce("RTX 3050 8GB", 8, 2560, 1777, (8, 6)),
    _geforce("RTX 3060 12GB", 12, 3584, 1777, (8, 6)),
    _geforce("RTX 3060 Ti", 8, 4864, 1665, (8, 6)),
    _geforce("RTX 3070", 8, 5888, 1725, (8, 6)),
    _geforce("RTX 3080 10GB", 10, 8704, 1710, (8, 6)),
    _geforce("RTX 3080 12GB", 12, 8960, 1710, (8, 6)),
    _geforce("RTX 3090", 24, 10496, 1695, (8, 6)),
    _geforce("RTX 4060", 8, 3072, 2460, (8, 9)),
    _geforce("RTX 4060 Ti 8GB", 8, 4352, 2535, (8, 9)),
    _geforce("RTX 4060 Ti 16GB", 16, 4352, 2535, (8, 9)),
    _geforce("RTX 4070", 12, 5888, 2475, (8, 9)),
    _geforce("RTX 4070 Ti Super", 16, 8448, 2610, (8, 9)),
    _geforce("RTX 4080", 16, 9728, 2505, (8, 9)),
    _geforce("RTX 4090", 24, 16384, 2520, (8, 9)),
    _geforce("RTX 5060 Ti 16GB", 16, 4608, 2572, (12, 0)),
    _geforce("RTX 5070", 12, 6144, 2512, (12, 0)),
    _geforce("RTX 5080", 16, 10752, 2617, (12, 0)),
    _geforce("RTX 5090", 32, 21760, 2407, (12, 0)),
    _data_center("P100 PCIe 16GB", 16, 9.3, (6, 0)),
    _data_center("V100 PCIe 16GB", 16, 14.0, (7, 0)),
    _data_center("V100 SXM 16GB", 16, 15.7, (7, 0)),
    _data_center("T4", 16, 8.1, (7, 5), ecc=True),
    _data_center("A10", 24, 31.2, (8, 6), ecc=True),
    _data_center("A100 40GB", 40, 19.5, (8, 0)),
    _data_center("A100 80GB", 80, 19.5, (8, 0)),  # SXM; the PCIe card has 1935 GB/s
    _data_center("L4", 24, 30.3, (8, 9), ecc=True),
    _data_center("L40S", 48, 91.6, (8, 9), ecc=True),
    _data_center("H100 PCIe", 80, 51.0, (9, 0)),
    _data_center("H100 SXM", 80, 67.0, (9, 0)),
    _data_center("H200", 141, 67.0, (9, 0)),
)


def _words(text: str) -> list[str]:
    """"NVIDIA GeForce GTX1060 6 GiB" to ["gtx", "1060", "6gb"]."""
    text = re.sub(r"\bsxm\d\b|\bhbm3\b", "sxm", text.lower())  # the driver calls the SXM card "H100 80GB HBM3"
    text = re.sub(r"(\d)\s*(?:gib|gb|g)\b", r"\1gb", text)
    text = re.sub(r"\b([gr]tx)(?=\d)", r"\1 ", text)
    text = re.sub(r"(\d)(ti|super)", r"\1 \2", text)
    text = re.sub(r"\bti(?=super)", "ti ", text)
    return [word for word in re.findall(r"\w+", text) if word not in VENDOR]


def _model(words: list[str]) -> str:
    """What must be said of a card: "1060", "4070 ti super"; series, form and memory may be left out."""
    return " ".join(w for w in words if w not in SERIES | FORMS and not re.fullmatch(r"\d+gb", w))


def find_card(text: str) -> CatalogCard:
    """The card that `text` names, as people or drivers write it: "3060", "gtx1060 6gb", "NVIDIA A100-SXM4-80GB". Its series,
    memory and form may be left out unless two cards differ by them. UserError, in one line, for no card or several."""
    asked = _words(text)

    def is_meant(card: CatalogCard) -> bool:
        words = {*_words(card.name), f"{card.memory_bytes // GIB}gb"}
        extra = set(asked) - words
        return _model(asked) == _model(_words(card.name)) and (not extra or (extra <= FORMS and not words & FORMS))

    meant = [card for card in CARDS if is_meant(card)]
    if len(meant) == 1:
        return meant[0]
    shown = repr(text if len(text) <= SHOWN else text[:SHOWN - 3] + "...")
    if meant:
        raise UserError(f"card {shown} may be {' or '.join(card.name for card in meant)}; name one of them")
    by_model: dict[str, list[str]] = {}
    for card in CARDS:
        by_model.setdefault(_model(_words(card.name)), []).append(card.name)
    near = difflib.get_close_matches(_model(asked)[:SHOWN], by_model, NEAREST, cutoff=0)
    nearest = [name for model in near for name in by_model[model]][:NEAREST]
    raise UserError(f"card {shown} is not among the {len(CARDS)} known on paper; the nearest are {', '.join(nearest)}")


def limits(card: CatalogCard) -> dict[str, int]:
    """What a process may claim of the card, its context included, in bytes, most first: "headless" is the memory less what
    the driver keeps (DRIVER_LEAVES), "with a desktop" less what Windows does (DESKTOP_BYTES). Neither is the cliff, which
    only a measurement finds. Above 25.6 GiB the driver's share is taken as the larger, and both are the same."""
    memory = card.memory_bytes * ECC_LEAVES if card.ecc else card.memory_bytes
    headless = int(memory * DRIVER_LEAVES)
    return {HEADLESS: headless, DESKTOP: min(headless, int(memory) - DESKTOP_BYTES)}


def tok_s(card: CatalogCard, model: ModelConfig, length: int, recompute: str = "none") -> float:
    """Tokens per second on paper: UTILISATION of the paper rate over the model's FLOPs per token, less what `recompute`
    costs. For a step that fills the card, and no better than its sources: on an H200 steps of 138M reached 1.04 and 1.24
    times this, and a GTX 1060 6GB's owner 0.99 times with 150M at 4 x 512. Small models and steps reach far less."""
    return card.fp32_flops_s * UTILISATION * RECOMPUTE_LEAVES[recompute] / model.flops_per_token(length)

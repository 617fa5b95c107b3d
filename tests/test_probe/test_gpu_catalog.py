"""Cards on paper: figures within what exists, names as people and drivers write them, and a table of what would fit."""

import re
import subprocess
import sys

import pytest
from helpers.made import ROOT

from probe.cell import Cell, grid
from probe.estimate import gpu_catalog
from probe.estimate.gpu_catalog import CARDS, DESKTOP, HEADLESS, find_card, limits, tok_s
from probe.estimate.peak import CardMemory, estimate
from probe.show.card_table import card_table
from spillcliff.errors import UserError
from trainer.config import RECOMPUTES, ModelConfig

CAPABILITIES = {(6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)}
BATCHES, LENGTHS = (1, 2, 4, 6, 8, 16), (256, 512, 1024, 2048)
NOT_MEASURED = "estimated for a card that was not measured"
ROW = re.compile(r" +\d+  [\d.+! -]+$")
FIGURE = re.compile(r"(\d+\.\d\d)([+!]?)(?=\s|$)")


def plane(model="150M", batches=BATCHES, lengths=LENGTHS, recompute="none", engine="eager"):
    return grid([model], {"batch": batches, "length": lengths, "engine": [engine], "recompute": [recompute]})


def signs(lines):
    """Every (figure, mark) of a table."""
    return [(float(figure), mark) for line in lines if ROW.match(line) for figure, mark in FIGURE.findall(line)]


@pytest.mark.parametrize("card", CARDS, ids=lambda c: c.name)
def test_figures_are_within_what_exists(card):
    assert 2e9 < card.memory_bytes < 300e9
    assert card.memory_bytes % 2**30 == 0
    assert 2e12 < card.fp32_flops_s < 110e12
    assert card.capability in CAPABILITIES
    stated = re.search(r"(\d+)GB", card.name)
    assert not stated or card.memory_bytes == int(stated[1]) * 2**30
    assert find_card(card.name) is card
    assert 0.7 * card.memory_bytes < limits(card)[DESKTOP] <= limits(card)[HEADLESS] < card.memory_bytes


def test_names_are_unique():
    assert len({card.name.lower() for card in CARDS}) == len(CARDS) >= 25


@pytest.mark.parametrize(("text", "name"), [
    ("RTX 3060 12GB", "RTX 3060 12GB"), ("3060", "RTX 3060 12GB"), ("nvidia geforce rtx 3060", "RTX 3060 12GB"),
    ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060 6GB"), ("gtx1060 6gb", "GTX 1060 6GB"), ("1060 6 GiB", "GTX 1060 6GB"),
    ("1080", "GTX 1080"), ("1080ti", "GTX 1080 Ti"), ("rtx4070tisuper", "RTX 4070 Ti Super"), ("4090 24GB", "RTX 4090"),
    ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA A100-PCIE-40GB", "A100 40GB"), ("Tesla T4", "T4"),
    ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"), ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"), ("NVIDIA H200", "H200"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("  l40s ", "L40S")])
def test_a_card_is_found_as_people_and_drivers_write_it(text, name):
    assert find_card(text).name == name


@pytest.mark.parametrize(("text", "names"), [
    ("1060", ["GTX 1060 3GB", "GTX 1060 6GB"]), ("gtx1060", ["GTX 1060 3GB", "GTX 1060 6GB"]),
    ("4060 ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]), ("H100", ["H100 PCIe", "H100 SXM"])])
def test_a_name_of_two_cards_is_refused_with_both(text, names):
    with pytest.raises(UserError) as refused:
        find_card(text)
    assert f"may be {' or '.join(names)};" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "near"), [
    ("3060 8GB", "RTX 3060 12GB"), ("gtx 3060", "RTX 3060 12GB"), ("RTX 2070 Super", "RTX 2070"), ("L40", "L40S"),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060"), ("", ""), ("nvidia", ""), ("6GB", ""), ("banana\nsplit", ""),
    ("x" * 5000, ""), ("P100 SXM2", "P100 PCIe 16GB")])
def test_an_unknown_name_is_refused_with_the_nearest(text, near):
    with pytest.raises(UserError) as refused:
        find_card(text)
    said = str(refused.value)
    assert near in said.partition("the nearest are ")[2]
    assert said.count(",") == gpu_catalog.NEAREST - 1
    assert "\n" not in said
    assert len(said) < 200


def test_limits_keep_the_drivers_and_the_desktops_share():
    six = limits(find_card("GTX 1060 6GB"))
    assert six == {HEADLESS: int(0.97 * 6 * 2**30), DESKTOP: 6 * 2**30 - 768 * 2**20}
    assert 4.04e9 < six[DESKTOP] < 5.67e9  # what its owner saw run, and spill
    assert limits(find_card("T4"))[HEADLESS] < 15_835_660_288  # what a T4 with ECC on shows
    assert limits(find_card("H200"))[HEADLESS] < 150_109_880_320  # what an H200 shows


def test_throughput_on_paper_is_near_what_was_measured():
    """Within a quarter of the owner's GTX 1060 and of an H200 at 138M, 4 x 512."""
    assert tok_s(find_card("1060 6GB"), ModelConfig.named("150M"), 512) == pytest.approx(2269, rel=0.25)
    assert tok_s(find_card("H200"), ModelConfig.named("138M"), 512) == pytest.approx(40_211, rel=0.25)
    rates = [tok_s(find_card("3090"), ModelConfig.named("150M"), 512, recompute) for recompute in RECOMPUTES]
    assert rates == sorted(rates, reverse=True)
    assert tok_s(find_card("3090"), ModelConfig.named("150M"), 2048) < rates[0]


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("name", ["GTX 1060 6GB", "RTX 3090", "RTX 5090", "T4"])
def test_the_marks_are_those_of_the_limits(name, recompute):
    card, cells = find_card(name), plane(recompute=recompute)
    memory, under = CardMemory.of({"kind": "cuda", "capability": card.capability}), limits(card)
    peaks = [estimate(c, memory).device_bytes for c in sorted(cells, key=lambda c: (c.batch, c.length))]
    assert signs(card_table(card, cells)) == [
        (round(peak / 1e9, 2), "" if peak <= under[DESKTOP] else "+" if peak <= under[HEADLESS] else "!") for peak in peaks]


def test_on_a_gtx_1060_four_by_512_fits_with_a_desktop_and_recompute_fits_more():
    card = find_card("GTX 1060 6GB")
    assert signs(card_table(card, [Cell.of("150M", 4, 512)]))[0][1] == ""
    assert [mark for _, mark in signs(card_table(card, [Cell.of("150M", 6, 512), Cell.of("150M", 8, 512)]))] == ["+", "!"]
    fitting = [sum(mark == "" for _, mark in signs(card_table(card, plane(recompute=r)))) for r in RECOMPUTES]
    assert fitting == sorted(fitting)
    assert len(set(fitting)) == len(fitting)


def test_the_legend_explains_the_marks_that_are_there_and_the_end_says_it_is_paper():
    lines = card_table(find_card("GTX 1060 6GB"), plane())
    text = " ".join(lines)
    assert lines[0] == "GTX 1060 6GB: 150M, eager, recompute none, accumulation 1"
    assert {"no mark: fits with a desktop, under 5.64 GB", "+ fits only headless, under 6.25 GB",
            "! does not fit under 6.25 GB", NOT_MEASURED} <= set(lines)
    assert lines.index(NOT_MEASURED) > lines.index("! does not fit under 6.25 GB")
    assert text.endswith("tok/s (paper figure, not measured; `plan` needs a measured card)")
    assert re.search(r"at lengths 256 to 2048 about [\d,]+ to [\d,]+ tok/s", text)
    one = card_table(find_card("H200"), [Cell.of("10M", 1, 256)])
    assert not [line for line in one if line.startswith(("+", "!"))]
    assert re.search(r"at length 256 about [\d,]+ tok/s", " ".join(one))


@pytest.mark.parametrize("width", [30, 40, 80, 132])
def test_no_line_is_too_wide_and_all_are_ascii(width):
    for card, cells in ((find_card("RTX 5090"), plane("1B", (1, 64, 4096), (128, 256, 512, 1024, 2048, 4096, 8192, 16384))),
                        (find_card("GTX 1060 3GB"), plane("10M", (1, 2), (64,), engine="graph"))):
        lines = card_table(card, cells, width)
        assert max(map(len, lines)) <= width
        assert all(line.isascii() and line == line.rstrip() for line in lines)
        assert len(signs(lines)) == len(cells)


def test_cells_that_are_not_asked_for_are_dashes():
    lines = card_table(find_card("GTX 1060 6GB"), [Cell.of("10M", 1, 512), Cell.of("10M", 2, 256)])
    rows = [line.split() for line in lines if ROW.match(line)]
    assert rows[0][1] == "-"
    assert rows[1][2] == "-"


@pytest.mark.parametrize(("cells", "why"), [
    ([], "no cell to estimate"), ([Cell.of("mine:make_step", 1, 64)], "only measured"),
    ([Cell.of("10M", 1, 64, engine="compile")], "capability 7.0 or more")])
def test_what_cannot_be_estimated_is_refused_in_one_line(cells, why):
    with pytest.raises(UserError, match=why) as refused:
        card_table(find_card("GTX 1080"), cells)
    assert "\n" not in str(refused.value)


def test_it_needs_neither_torch_nor_numpy_nor_click():
    done = subprocess.run([sys.executable, "-c", "import sys, probe.estimate.gpu_catalog; print(*sys.modules)"],
                          cwd=ROOT, text=True, capture_output=True, check=True)
    assert not {"torch", "numpy", "click"} & set(done.stdout.split())

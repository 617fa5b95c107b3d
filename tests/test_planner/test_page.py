"""The page: whole for any data, safe for any text, and in a real browser right on a desk, on a phone, in light and dark."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
from itertools import product

import pytest
from helpers.made import ROOT, make_plan, make_record
from helpers.page_data import (
    EMPTY,
    HOSTILE,
    estimate,
    gathered,
    make_soak,
    model_row,
    past_run,
    plan_of,
    spilling,
    with_series,
)

from planner.decide.inputs import PlanInputs
from planner.report.curve import usable
from planner.report.heatmap import SeriesMap
from planner.report.page import html_page
from planner.report.page_data import Corpus, PageData, page_data
from planner.report.text import bytes_text, count_text, hours_text, printable, ratio_text, step_s_text, tok_s_text
from probe.records import Record, load
from trainer.config import ModelConfig
from trainer.plan import Rejected, RunnerUp, Span

STYLE = ROOT / "planner" / "report" / "template" / "style.css"


class Reader(html.parser.HTMLParser):
    """Tags as they open, whether every one is closed, the text outside scripts and styles, the embedded data."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.embedded = ""
        self.feed(text)
        self.close()
        assert not self.open
        self.words = " ".join(self.texts)
        self.data = json.loads(self.embedded)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1:] == ["script"]:
            self.embedded = self.embedded or text
        elif self.open[-1:] != ["style"]:
            self.texts.append(text)


def ids(read: Reader) -> list[str]:
    return [value for _, name, value in read.attributes if name == "id"]


def test_the_page_holds_the_pick_its_figures_and_every_record():
    records = [r for r in load(ROOT / "results" / "nvidia-h200" / "records.jsonl") if r.cell.model == "150M"]
    text = html_page(gathered(records, 142_675_311_329, cliff_bytes=147_087_949_864))
    read = Reader(text)
    for words in ("The pick: B=32 L=1024", "42,855 tok/s", "34.6 GB", "24% of the 142.68 GB limit",
                  "the fastest that fits", "Runners-up"):
        assert words in read.words
    rows = text[text.index('class="data records"'):].split("<tr>")[2:]
    assert len(rows) == len(records) == len(read.data["records"])
    for row, r in zip(rows, records, strict=True):
        assert f"{r.tok_s:,.0f}" in row
        assert f">{r.cell.length}<" in row
    assert len(set(ids(read))) == len(ids(read))


def test_nothing_is_fetched_from_anywhere():
    text = html_page(spilling())
    assert not re.search(r"https?://|src=(?!data:)|@import|url\((?!data:)", text)
    assert "default-src 'none'" in text


def spoiled(page: PageData, text: str) -> PageData:
    """The page with `text` wherever a file can have any."""
    def record(r: Record) -> Record:
        return dataclasses.replace(r, why=text, at=text, device=text)

    records = [record(r) for r in page.records]
    plan = page.plan or make_plan()
    cell = plan.step.__dict__
    plan = dataclasses.replace(
        plan, at=text, device=text, why=[text, f"limit {text}"], rejected=[Rejected(cell, [text, text])],
        runners_up=[RunnerUp(cell, tok_s=1.0, peak_bytes=1.0, hours_ratio=1.0, saves_bytes=0.0, hours=1.0)])
    return dataclasses.replace(
        page, title=text, at=text, device=text, notes=[text], plan=plan, limit_from=text, records=records,
        maps=[SeriesMap.of(records, page.limit_bytes, page.cliff_bytes, records[0].cell)],
        corpora=[Corpus(text, 10**9, Span(1, 2, 3))], models=[model_row(text, 10**6, 1.0, 1.0, text) for _ in range(2)],
        past=[past_run(text, plan, tok_s=1.1), past_run(text)],
        soak=page.soak and dataclasses.replace(page.soak, at=text, device=text))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_can_be_anything_and_stays_text(text):
    data = spoiled(spilling(), text)
    page = html_page(data)
    read, plain = Reader(page), Reader(html_page(spoiled(spilling(), "harmless")))
    assert [r["why"] for r in read.data["records"]] == [text] * len(data.records)
    assert set(read.tags) == set(plain.tags)
    assert read.tags.count("script") == 2
    assert not any(name.startswith("on") or name == "src" for _, name, _ in read.attributes)
    assert printable(text) in read.words
    page.encode("utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_without_a_plan_text_can_be_anything_too(text):
    read = Reader(html_page(dataclasses.replace(spoiled(spilling(), text), plan=None, failure=text)))
    assert read.tags.count("script") == 2
    assert printable(text) in read.words


def test_the_script_is_the_one_that_may_run():
    page = html_page(spilling())
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{hashed}'" in page


def test_an_empty_plan_says_why_and_has_no_empty_sections():
    read = Reader(html_page(EMPTY))
    assert "No plan" in read.words
    assert "no cell fits" in read.words
    assert read.tags.count("section") == 1


def test_without_a_plan_the_failed_cells_and_their_reasons_are_there():
    failed = make_record(8, 512, peak=9e9, status="oom", why="no room", step_s=())
    data = gathered([make_record(4, 512, peak=6e9), failed], 5_000_000_000)
    read = Reader(html_page(data))
    assert "6.0 GB is over the 5.0 GB limit" in read.words
    assert "oom: no room" in read.words


def test_the_cliff_parts_what_fits_from_what_fails():
    records = [make_record(1), make_record(2), make_record(3, peak=6e9), make_record(4, status="spills")]
    drawn = html_page(with_series(records, pick=records[1], limit_bytes=5 * 10**9))
    cells = re.findall(r'<td class="([^"]*)" title', drawn)
    assert ["level" in c.split() for c in cells] == [False, False, True, False]
    assert "up" not in " ".join(cells).split()
    assert "pick" in cells[1].split()
    assert "over" in cells[2].split()
    assert "failed" in cells[3].split()
    assert ">over</span>" in drawn
    assert ">pick</span>" in drawn
    assert "its peak is over the 5.0 GB limit" in drawn


def test_estimates_lie_on_their_side_of_the_cliff():
    records = [make_record(1, 256), make_record(1, 512), make_record(2, 256), make_record(3, 512, status="oom")]
    estimates = {(1, 1): estimate(2, 512), (2, 0): estimate(3, 256, peak_bytes=6e9)}
    drawn = html_page(with_series(records, estimates=estimates, limit_bytes=5 * 10**9))
    cells = [c.split() for c in re.findall(r'<td class="([^"]*)" title', drawn)]
    assert [("level" in c, "estimated" in c, "over" in c) for c in cells] == [
        (False, False, False), (False, False, False), (False, False, False), (False, True, False),
        (True, True, True), (True, False, False)]
    assert "~1,000" in drawn
    assert "estimated, ~1,000 tok/s (1,000), peak ~4.0 GB" in drawn


def test_what_was_never_run_is_a_dot_and_said_so():
    drawn = html_page(with_series([make_record(1, 256), make_record(2, 512)]))
    assert drawn.count('class="none"') == 2
    assert "never run" in Reader(drawn).words


def test_one_cell_and_two_hundred():
    for records in ([make_record()], [make_record(b, n * 64, b * n) for b in range(1, 11) for n in range(1, 21)]):
        read = Reader(html_page(with_series(records)))
        kinds = [value.split()[0] for tag, name, value in read.attributes if (tag, name) == ("td", "class")]
        assert kinds == ["cell"] * len(records)


def test_all_maps_share_a_scale():
    """So that a colour means the same in each, and 5% don't look like all the difference there is."""
    text = html_page(with_series([make_record(1, tok_s=100), make_record(2, tok_s=1000)],
                                 [make_record(1, tok_s=950, engine="graph"), make_record(2, tok_s=1000, engine="graph")]))
    assert re.findall(r'<td class="cell fits (q\d)"', text) == ["q0", "q8", "q8", "q8"]


def of_models(names: list[str]) -> list[Record]:
    return [make_record(cell=dataclasses.replace(make_record().cell, model=name), model=ModelConfig.named(name))
            for name in names]


def test_many_maps_are_folded_and_the_picks_comes_first():
    records = of_models(["1M", "2M", "150M", "5M", "10M"])
    plan = dataclasses.replace(plan_of(records[2:3]), at="2027-01-01T00:00:00+00:00")
    text = html_page(page_data(plan, records, PlanInputs(), []))
    assert text.count("<details>") == 4
    assert text.index(">150M, eager") < text.index("<details>") < text.index(">1M, eager")
    assert "<details>" not in html_page(page_data(plan, records[:3], PlanInputs(), []))


@pytest.mark.parametrize(("at", "is_told"), [
    ("2026-06-01T12:00:00+00:00", False), ("2026-06-01T11:00:01-01:00", True), ("2026-06-01T11:59:59+00:00", False),
    ("2026-06-01T12:00:01+00:00", True), ("yesterday", False), ("2026-07-01", False)])
def test_cells_that_were_measured_since_the_plan_are_pointed_out(at, is_told):
    records = [make_record(), make_record(2)]
    plan = dataclasses.replace(plan_of(records), at="2026-06-01T12:00:00+00:00",
                               records_sha256="of another version")
    other = make_record(at="2027-01-01T00:00:00+00:00", cell=dataclasses.replace(records[0].cell, model="50M"),
                        model=ModelConfig.named("50M"))
    data = page_data(plan, [*records, other, make_record(1, at=at)], PlanInputs(), ["first"])
    assert data.notes == ["first"] + ["cells were measured since this plan was made: plan again to count them"] * is_told


@pytest.mark.parametrize("value", [None, 0, 1e-300, 1e-3, 1e17, 1e299, 10**400, float("inf"), float("nan"), True, "1"])
def test_figures_of_any_size_and_none_have_words(value):
    for text in (tok_s_text, bytes_text, count_text, hours_text, step_s_text, ratio_text):
        words = text(value)
        assert words
        assert len(words) < 40
        assert not {"nan", "inf", "None"} & set(re.findall("[A-Za-z]+", words))


@pytest.mark.parametrize("value", [None, 0, 1e-6, 1e16, 9e17])
def test_figures_of_any_size_and_none_are_drawn(value):
    whole, least = value and int(value), value or 1e-6
    records = [make_record(device_peak_bytes=whole, step_s=(least,)), make_record(8, device_peak_bytes=whole),
               make_record(9), make_record(32, device_peak_bytes=whole, status="oom", step_s=())]
    hours = Span(value or 0.0, value or 0.0, value or 0.0)
    row = dataclasses.replace(model_row("x", 1, None, None), parameters=value or 1, tok_s=value, peak_bytes=value,
                              hours=hours)
    plan = dataclasses.replace(make_plan(), limit_bytes=whole or 1)
    soak = make_soak(3, step_s=lambda i: least, temperature_c=lambda i: value)
    page = dataclasses.replace(
        with_series(records, pick=records[1], estimates={(2, 0): estimate(9, tok_s=least, peak_bytes=value)}), plan=plan,
        limit_bytes=whole, cliff_bytes=whole,
        curve=usable([(1e6, 0.1, 0.2, max(0.2, value or 0)), (1e7, 1, 2, max(3, value or 0))]),
        corpora=[Corpus("a corpus", whole or 1, hours)], models=[row, model_row("150M", 1, None, value)],
        past=[past_run("r", tok_s=value, peak_bytes=value, hours=value)], soak=soak, records=records)
    read = Reader(html_page(page))
    assert not {"nan", "inf"} & set(re.findall("[a-z]+", read.words))
    assert max(map(len, read.words.split())) < 40
    numbers = [value for tag, name, value in read.attributes if name in ("d", "transform", "x", "y", "data-x", "data-y")]
    assert numbers
    assert not [v for v in numbers if "nan" in v or "inf" in v]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme):
    """4.5 to 1 at least (WCAG 2.2, 1.4.3)."""
    style = STYLE.read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[("light", "dark").index(scheme)]))

    def light_of(name):
        parts = [int(colours[name][i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    pairs = [*product(("ink", "quiet"), ("back", "sheet", "soft")), ("ink", "warn-back"), ("ink", "stripe"),
             ("sheet", "warn"), ("sheet", "ink"), ("accent", "sheet"), ("cliff", "sheet")]
    pairs += [("on-q", f"q{i}") for i in range(9)]
    for words, behind in pairs:
        a, b = sorted((light_of(words), light_of(behind)))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (words, behind)

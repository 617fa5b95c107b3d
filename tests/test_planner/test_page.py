"""The page: whole for any data, safe for any text, and in a real browser right on a desk, on a phone, in light and dark."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
from itertools import product

import pytest
from helpers.made import ROOT, make_cliff, make_plan, make_record
from helpers.page_data import EMPTY, estimate, gathered, make_soak, model_row, past_run, with_series, written
from matplotlib.image import imread

from planner.decide.inputs import PlanInputs
from planner.report import charts, ticks
from planner.report.curve import hours_at, usable
from planner.report.drawing import COLOURS, NARROW, WIDE
from planner.report.heatmap import SeriesMap
from planner.report.page import html_page
from planner.report.page_data import Corpus, PageData, page_data
from planner.report.text import band_text, bytes_text, count_text, hours_text, printable, ratio_text, step_s_text, tok_s_text
from probe.records import Record, load
from trainer.config import ModelConfig
from trainer.plan import Rejected, RunnerUp, Span

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = ("</script><script>alert(1)</script>", "<!-- <script>", "'\"><img src=x onerror=alert(1)>", "{{data}} {{body}}",
           "{% if %} {# {{ 7 * 7 }}", "&lt; C:\\Users\\" + "x" * 400, "a\u2028b\u2029c\u0000d\ud800e",
           "\\1 \\g<0> $& %s {0}", "")
LONG = HOSTILE[5]
STYLE = ROOT / "planner" / "report" / "template" / "style.css"
GRID = list(product((1, 2, 3, 4, 6, 8), (256, 512, 1024)))


def spilling(why: str = "moved 340 MB to the system") -> PageData:
    """A GTX 1060's grid: fits, spills past 5.3 GB, fails past 7.5 GB, with a gap; and everything else that a page can
    hold."""
    records = []
    for batch, length in GRID:
        tokens = batch * length
        peak = 2.6e9 + tokens * 0.72e6
        status = "fits" if peak < 5.3e9 else "spills" if peak < 7.5e9 else "oom"
        speed = 2600 * tokens / (tokens + 280) * (1 if status == "fits" else 0.4)
        if (batch, length) != (2, 512):
            records.append(make_record(batch, length, speed, peak, status, why="" if status == "fits" else why))
    inputs = PlanInputs(cliff=make_cliff("collapse", 5.0e9, 5.1e9), soaks=(make_soak(),))
    return gathered(records, 5_000_000_000, inputs=inputs, notes=["planned with another driver"],
                    models=[model_row("60M", 62_000_000, 4900, 2.1e9), model_row("1B", 10**9, None, None, "nothing fits")],
                    past=[past_run("runs/first", tok_s=0.97, peak_bytes=1.01, hours=1.04), past_run("runs/second")])


class Reader(html.parser.HTMLParser):
    """Tags as they open, whether every one is closed, the text outside scripts and styles, the embedded data."""

    VOID = {"meta", "link", "input"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.words, self.attributes, self.embedded = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open
        self.words = " ".join(self.words)
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
            self.words.append(text)


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
        assert f"{r.tok_s:,.0f}" in row and f">{r.cell.length}<" in row
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
    assert set(read.tags) == set(plain.tags) and read.tags.count("script") == 2
    assert not any(name.startswith("on") or name == "src" for _, name, _ in read.attributes)
    assert printable(text) in read.words
    page.encode("utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_without_a_plan_text_can_be_anything_too(text):
    read = Reader(html_page(dataclasses.replace(spoiled(spilling(), text), plan=None, failure=text)))
    assert read.tags.count("script") == 2 and printable(text) in read.words


def test_the_script_is_the_one_that_may_run():
    page = html_page(spilling())
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{hashed}'" in page


def test_an_empty_plan_says_why_and_has_no_empty_sections():
    read = Reader(html_page(EMPTY))
    assert "No plan" in read.words and "no cell fits" in read.words and read.tags.count("section") == 1


def test_without_a_plan_the_failed_cells_and_their_reasons_are_there():
    failed = make_record(8, 512, peak=9e9, status="oom", why="no room", step_s=())
    data = gathered([make_record(4, 512, peak=6e9), failed], 5_000_000_000)
    read = Reader(html_page(data))
    assert "6.0 GB is over the 5.0 GB limit" in read.words and "oom: no room" in read.words


def test_the_cliff_parts_what_fits_from_what_fails():
    records = [make_record(1), make_record(2), make_record(3, peak=6e9), make_record(4, status="spills")]
    drawn = html_page(with_series(records, pick=records[1], limit_bytes=5 * 10**9))
    cells = re.findall(r'<td class="([^"]*)" title', drawn)
    assert ["level" in c.split() for c in cells] == [False, False, True, False] and "up" not in " ".join(cells).split()
    assert "pick" in cells[1].split() and "over" in cells[2].split() and "failed" in cells[3].split()
    assert ">over</span>" in drawn and ">pick</span>" in drawn and "its peak is over the 5.0 GB limit" in drawn


def test_estimates_lie_on_their_side_of_the_cliff():
    records = [make_record(1, 256), make_record(1, 512), make_record(2, 256), make_record(3, 512, status="oom")]
    estimates = {(1, 1): estimate(2, 512), (2, 0): estimate(3, 256, peak_bytes=6e9)}
    drawn = html_page(with_series(records, estimates=estimates, limit_bytes=5 * 10**9))
    cells = [c.split() for c in re.findall(r'<td class="([^"]*)" title', drawn)]
    assert [("level" in c, "estimated" in c, "over" in c) for c in cells] == [
        (False, False, False), (False, False, False), (False, False, False), (False, True, False),
        (True, True, True), (True, False, False)]
    assert "~1,000" in drawn and "estimated, ~1,000 tok/s (1,000), peak ~4.0 GB" in drawn


def test_what_was_never_run_is_a_dot_and_said_so():
    drawn = html_page(with_series([make_record(1, 256), make_record(2, 512)]))
    assert drawn.count('class="none"') == 2 and "never run" in Reader(drawn).words


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
    plan = dataclasses.replace(gathered(records[2:3], 5 * 10**9).plan, at="2027-01-01T00:00:00+00:00")
    text = html_page(page_data(plan, records, PlanInputs(), []))
    assert text.count("<details>") == 4 and text.index(">150M, eager") < text.index("<details>") < text.index(">1M, eager")
    assert "<details>" not in html_page(page_data(plan, records[:3], PlanInputs(), []))


@pytest.mark.parametrize(("at", "is_told"), [
    ("2026-06-01T12:00:00+00:00", False), ("2026-06-01T11:00:01-01:00", True), ("2026-06-01T11:59:59+00:00", False),
    ("2026-06-01T12:00:01+00:00", True), ("yesterday", False), ("2026-07-01", False)])
def test_cells_that_were_measured_since_the_plan_are_pointed_out(at, is_told):
    records = [make_record(), make_record(2)]
    plan = dataclasses.replace(gathered(records, 5 * 10**9).plan, at="2026-06-01T12:00:00+00:00",
                               records_sha256="of another version")
    other = make_record(at="2027-01-01T00:00:00+00:00", cell=dataclasses.replace(records[0].cell, model="50M"),
                        model=ModelConfig.named("50M"))
    data = page_data(plan, [*records, other, make_record(1, at=at)], PlanInputs(), ["first"])
    assert data.notes == ["first"] + ["cells were measured since this plan was made: plan again to count them"] * is_told


@pytest.mark.parametrize("value", [None, 0, 1e-300, 1e-3, 1e17, 1e299, 10**400, float("inf"), float("nan"), True, "1"])
def test_figures_of_any_size_and_none_have_words(value):
    for text in (tok_s_text, bytes_text, count_text, hours_text, step_s_text, ratio_text):
        words = text(value)
        assert words and len(words) < 40 and not {"nan", "inf", "None"} & set(re.findall("[A-Za-z]+", words))


@pytest.mark.parametrize("value", [None, 0, 1e-6, 1e16, 9e17])
def test_figures_of_any_size_and_none_are_drawn(value):
    whole, least = value and int(value), value or 1e-6
    records = [make_record(device_peak_bytes=whole, step_s=(least,)), make_record(8, device_peak_bytes=whole), make_record(9),
               make_record(32, device_peak_bytes=whole, status="oom", step_s=())]
    hours = Span(value or 0.0, value or 0.0, value or 0.0)
    row = dataclasses.replace(model_row("x", 1, None, None), parameters=value or 1, tok_s=value, peak_bytes=value, hours=hours)
    plan = dataclasses.replace(make_plan(), limit_bytes=whole or 1)
    soak = make_soak(3, step_s=lambda i: least, temperature_c=lambda i: value)
    page = dataclasses.replace(
        with_series(records, pick=records[1], estimates={(2, 0): estimate(9, tok_s=least, peak_bytes=value)}), plan=plan,
        limit_bytes=whole, cliff_bytes=whole, curve=usable([(1e6, 0.1, 0.2, max(0.2, value or 0)), (1e7, 1, 2, max(3, value or 0))]),
        corpora=[Corpus("a corpus", whole or 1, hours)], models=[row, model_row("150M", 1, None, value)],
        past=[past_run("r", tok_s=value, peak_bytes=value, hours=value)], soak=soak, records=records)
    read = Reader(html_page(page))
    assert not {"nan", "inf"} & set(re.findall("[a-z]+", read.words)) and max(map(len, read.words.split())) < 40
    numbers = [value for tag, name, value in read.attributes if name in ("d", "transform", "x", "y", "data-x", "data-y")]
    assert numbers and not [v for v in numbers if "nan" in v or "inf" in v]


def test_hours_between_and_beyond_the_points_of_a_curve():
    points = usable([(1e8, 100, 200, 400), (1e6, 1, 2, 4), (1e4, 0, 1, 1)])
    assert [p[0] for p in points] == [1e6, 1e8]
    for tokens in (1e5, 1e6, 1e7, 1e9):
        hours = hours_at(points, tokens)
        assert (hours.low, hours.mid, hours.high) == pytest.approx([tokens / 1e6 * v for v in (1, 2, 4)])


@pytest.mark.parametrize(("low", "high"), [(1e-3, 2e-3), (0.2, 900), (40, 4e7), (3600, 7300), (5, 9), (1e-6, 1e12)])
def test_marks_are_few_ordered_and_inside(low, high):
    for marks in (ticks.sizes(low, high, 6), ticks.counts(low, high, 7), ticks.durations(low, high, 7),
                  ticks.clock(low, high, 6)):
        values = [value for value, _ in marks]
        assert values == sorted(set(values)) and len(values) <= 7
        assert all(low - (high - low) * 1e-6 <= v <= high * 1.001 for v in values)
    assert [ticks.duration_label(v) for v in (0.1, 30, 600, 36000, 3.6e6)] == ["0.1 s", "30 s", "10 min", "10 h", "1,000 h"]


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


def test_charts_have_the_colours_of_the_page():
    light = re.search(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert COLOURS.items() <= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light)).items()
    drawn = "".join(re.findall(r"<svg.*?</svg>", html_page(spilling()), re.DOTALL))
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == COLOURS.keys() and "#0" not in re.sub('href="[^"]*"', "", drawn)


def test_marks_say_what_they_are_and_the_script_finds_the_one_that_it_moves():
    page = spilling()
    for size in (WIDE, NARROW):
        svg = charts.peaks(page, size).svg("peaks", size.name, "peaks")
        titles = re.findall("<title>(.*?)</title>", svg)
        assert len(titles) == len(GRID) + 1  # the pick has a ring too
        assert "150M B=8 L=1024: oom, 949 tok/s, peak 8.5 GB, over the limit; moved" not in titles
        svg = charts.hours(page, size).svg("hours", size.name, "hours")
        x, y = (list(map(float, re.search(f'data-{name}="(.*?)"', svg)[1].split())) for name in "xy")
        assert x[:2] == [1e6, 1e11] and 0 < x[2] < x[3] < size.width and size.height > y[2] > y[3] > 0
        at = [float(v) for v in re.search(r'class="marker" transform="translate\((\S+) (\S+)\)"', svg).groups()]
        share = (at[0] - x[2]) / (x[3] - x[2])
        assert share == pytest.approx(0.4, abs=0.001)  # 100M between 1M and 100B


def browse(folder, *arguments, target) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
         "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *arguments,
         (folder / target).as_uri()], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr and "Uncaught" not in done.stderr, done.stderr
    return done


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome")

# headless Chromium has no window below 500 pixels, so the page is opened in a frame of a phone's width
PROBE = """<body><iframe src="page.html" width="360" height="900" style="border:0"></iframe>
<iframe src="page.html" width="1100" height="900" style="border:0"></iframe>
<script>
for (const frame of document.querySelectorAll("iframe")) frame.addEventListener("load", () => {
  const out = {}, w = frame.contentWindow, d = w.document, $ = id => d.getElementById(id);
  const read = () => ["corpus-shown", "epochs-shown", "hours-seen", "hours-mid", "hours-band"].map(id => $(id).textContent);
  out.width = [d.documentElement.scrollWidth, w.innerWidth];
  out.marker = d.querySelector("svg.wide .marker").getAttribute("transform");
  out.first = read();
  out.moved = [];
  for (const [corpus, epochs] of [[0, 335], [1000, 335], [615, 700], [615, 0]]) {
    for (const [id, value] of [["corpus", corpus], ["epochs", epochs]]) {
      $(id).value = value;
      $(id).dispatchEvent(new w.Event("input"));
    }
    out.moved.push([corpus, epochs, read(), d.querySelector("svg.wide .marker").getAttribute("transform")]);
  }
  out.spoken = $("corpus").getAttribute("aria-valuetext");
  out.reachable = [...d.querySelectorAll("input, th button, #show-all, .scroll")].every(e => e.tabIndex >= 0);
  const seen = () => [...d.querySelectorAll(".records tbody tr")].filter(r => w.getComputedStyle(r).display !== "none");
  out.rows = [seen().length];
  const press = key => d.querySelector(`th[data-key=${key}] button`).click();
  const column = i => seen().slice(0, 5).map(r => r.cells[i].textContent);
  press("batch"); out.up = column(1);
  press("batch"); out.down = column(1); out.sorted = d.querySelector("th[data-key=batch]").getAttribute("aria-sort");
  press("tok_s"); out.slowest = column(5);
  $("show-all").click(); out.rows.push(seen().length);
  const pre = document.createElement("pre");
  pre.textContent = JSON.stringify(out);
  document.body.append(pre);
});
</script>"""


def many_records() -> PageData:
    page = spilling(LONG)
    records = [make_record(i + 1, 512, tok_s=1000 + (i * 37) % 601) for i in range(600)] + [
        make_record(1, 512, status="oom", step_s=(), why=LONG)]
    return dataclasses.replace(
        page, title=LONG, notes=list(HOSTILE), plan=dataclasses.replace(page.plan, why=[*page.plan.why, *HOSTILE]),
        past=[*page.past, *(past_run(text, tok_s=1.1) for text in HOSTILE)],
        corpora=[*page.corpora, Corpus(LONG, 10**9, Span(1, 2, 3))], records=records)


@needs_browser
def test_in_a_browser_sliders_sorting_and_folding_work_and_nothing_overflows(tmp_path):
    data = many_records()
    written(tmp_path, html_page(data))
    written(tmp_path, PROBE, "probe.html")
    done = browse(tmp_path, "--virtual-time-budget=2000", "--window-size=1200,1000", "--dump-dom", target="probe.html")
    found = [json.loads(text) for text in re.findall("<pre>(.*?)</pre>", done.stdout, re.DOTALL)]
    assert sorted(out["width"][1] for out in found) == [360, 1100]
    for out in found:
        assert out["width"][0] <= out["width"][1]
        the_page_answers(out, data.curve)


def the_page_answers(out: dict, points) -> None:
    """What the script wrote is what Python works out, for every place of the sliders; the rows come as asked for."""

    def expected(corpus, epochs):
        hours = hours_at(points, corpus * epochs)
        return [f"{count_text(corpus)} tokens", f"{epochs:g}", f"{count_text(corpus * epochs)} tokens seen",
                hours_text(hours.mid), band_text(hours, hours_text)]

    assert out["first"] == expected(1e8, 1)
    places = {out["marker"]}
    for corpus, epochs, shown, marker in out["moved"]:
        values = [float(f"{low * (high / low) ** (at / 1000):.2g}") for low, high, at in (
            (points[0][0], points[-1][0], corpus), (0.1, 100, epochs))]
        assert shown == expected(*values)
        places.add(marker)
    assert len(places) == 5
    assert out["spoken"] == f"{out['moved'][-1][2][0]}, {out['moved'][-1][2][3]}" and out["reachable"]
    assert out["rows"] == [500, 601] and out["sorted"] == "descending"
    assert out["up"] == ["1", "1", "2", "3", "4"] and out["down"] == ["600", "599", "598", "597", "596"]
    assert out["slowest"] == ["1,000", "1,001", "1,002", "1,003", "1,004"]


@needs_browser
def test_in_a_browser_light_and_dark_differ_and_neither_is_blank(tmp_path):
    written(tmp_path, html_page(spilling()))
    backs = []
    for name, scheme in (("dark", 0), ("light", 1)):
        browse(tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={tmp_path / name}.png",
               "--window-size=1000,3000", target="page.html")
        picture = (imread(tmp_path / f"{name}.png")[:, :, :3] * 255).round().astype(int)
        assert len({tuple(p) for p in picture[::5, ::5].reshape(-1, 3)}) > 40
        backs.append(picture[2, 2].mean())
    assert backs[0] < 60 and backs[1] > 200


def test_charts_that_have_nothing_to_show_are_left_out():
    page = dataclasses.replace(EMPTY, past=[past_run("r")], soak=make_soak(1))
    assert [draw(page, WIDE) for draw in (charts.peaks, charts.hours, charts.receipts, charts.soak, charts.models)] == [None] * 5

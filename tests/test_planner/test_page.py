"""The page: whole for any data, safe for any text, and in a real browser right on a desk, on a phone, in light and dark."""

import html.parser
import json
import re
import shutil
import subprocess
from itertools import product

import pytest
from helpers.made import ROOT, make_record
from helpers.page_data import EMPTY, cell, gathered, receipt, record_row, series, size_row, soak_windows, written
from matplotlib.image import imread

from planner.report import charts, ticks
from planner.report.curve import hours_at, usable
from planner.report.html import band_text, count_text, finite, hours_text
from planner.report.page import html_page
from probe.records import load

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = ("</script><script>alert(1)</script>", "<!-- <script>", "'\"><img src=x onerror=alert(1)>", "{{data}} {{body}}",
           "&lt; C:\\Users\\" + "x" * 400, "a\u2028b\u2029c\u0000d\ud800e", "\\1 \\g<0> $& %s {0}", "")
GRID = list(product((1, 2, 3, 4, 6, 8), (256, 512, 1024)))


def spilling(why="moved 340 MB to the system") -> dict:
    """A GTX 1060's grid: fits, spills past 5.3 GB, fails past 7.5 GB; with everything else that a page can hold."""
    records = []
    for batch, length in GRID:
        tokens = batch * length
        peak = 2.6e9 + tokens * 0.72e6
        status = "fits" if peak < 5.3e9 else "spills" if peak < 7.5e9 else "oom"
        speed = 2600 * tokens / (tokens + 280) * (1 if status == "fits" else 0.4)
        records.append(make_record(batch, length, speed, peak, status, why="" if status == "fits" else why))
    data = gathered(records, 5_000_000_000, cliff_bytes=5_300_000_000, notes=["planned with another driver"],
                    sizes=[size_row("60M", 62e6, 4900, 2.1e9), size_row("1B", 1e9, None, None, "nothing fits")],
                    receipts=[receipt("runs/first", tok_s=0.97, peak_bytes=1.01, hours=1.04), receipt("runs/second")],
                    soak={"windows": soak_windows(), "factor": 1.064, "settled": True, "at": "2026-01-01T00:00:00+00:00"})
    data["series"][0]["cells"].append(cell(1, 2048, estimated=True, status="estimated", tok_s=2006.0, peak_bytes=4.07e9))
    return data


class Reader(html.parser.HTMLParser):
    """Tags as they open, whether every one is closed, the text outside scripts and styles, the embedded data."""

    VOID = {"meta", "link", "input", "circle", "path", "line"}

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


@pytest.mark.parametrize("text", HOSTILE)
def test_text_can_be_anything_and_stays_text(text):
    def spoiled(value):
        if isinstance(value, dict):
            return {k: spoiled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(v) for v in value]
        return text if isinstance(value, str) and value not in ("fits", "spills", "oom", "estimated") else value

    plain, data = html_page(spilling()), spoiled(spilling())
    page = html_page(data)
    read = Reader(page)
    assert read.data == finite(data)
    assert set(read.tags) == set(Reader(plain).tags) and read.tags.count("script") == 2
    assert not any(name.startswith("on") or name == "src" for _, name, _ in read.attributes)
    shown = text.encode("utf-8", "replace").decode()
    assert shown.replace("\0", "\ufffd") in read.words.replace("\0", "\ufffd")
    page.encode("utf-8")


def test_an_empty_plan_says_why_and_has_no_empty_sections():
    read = Reader(html_page(EMPTY))
    assert "No plan" in read.words and "no cell fits" in read.words and read.tags.count("section") == 1


def test_without_a_plan_the_failed_cells_and_their_reasons_are_there():
    failed = make_record(8, 512, peak=9e9, status="oom", why="no room", step_s=())
    data = gathered([make_record(4, 512, peak=6e9), failed], 5_000_000_000)
    read = Reader(html_page(data))
    assert "6.0 GB is over the 5.0 GB limit" in read.words and "oom: no room" in read.words


def test_the_cliff_parts_what_fits_from_what_fails():
    drawn = html_page(EMPTY | {"series": [series(cell(1), cell(2, pick=True), cell(3, over=True, peak_bytes=6e9),
                                                 cell(4, status="spills"), cell(5, estimated=True, status="estimated"))]})
    cells = re.findall(r'<td class="([^"]*)" title', drawn)
    assert ["level" in c.split() for c in cells] == [False, False, True, False, True] and "up" not in " ".join(cells).split()
    assert "pick" in cells[1].split() and "over" in cells[2].split() and "failed" in cells[3].split()
    assert "estimated" in cells[4].split() and "~1,000" in drawn and ">over</span>" in drawn and ">pick</span>" in drawn


def test_one_cell_and_two_hundred():
    for cells in ([cell()], [cell(b, n * 64, tok_s=b * n) for b in range(1, 11) for n in range(1, 21)]):
        read = Reader(html_page(EMPTY | {"series": [series(*cells)]}))
        kinds = [value.split()[0] for tag, name, value in read.attributes if (tag, name) == ("td", "class")]
        assert kinds == ["cell"] * len(cells)


def test_all_maps_share_a_scale():
    """So that a colour means the same in each, and 5% don't look like all the difference there is."""
    text = html_page(EMPTY | {"series": [series(cell(1, tok_s=100.0), cell(2, tok_s=1000.0)),
                                         series(cell(1, tok_s=950.0), cell(2, tok_s=1000.0), engine="graph")]})
    assert re.findall(r'<td class="cell (q\d)"', text) == ["q0", "q8", "q8", "q8"]


def test_many_maps_are_folded_and_the_picks_comes_first():
    maps = [series(cell(), model=f"{i}M") for i in range(1, 6)]
    maps[3]["cells"][0]["pick"] = True
    text = html_page(EMPTY | {"series": maps})
    assert text.count("<details>") == 4 and text.index("4M, eager") < text.index("<details>") < text.index("1M, eager")
    assert "<details>" not in html_page(EMPTY | {"series": maps[:3]})


@pytest.mark.parametrize("value", [None, 0, 1e-300, 1e-3, 1e17, 1e299, 10**400, float("inf"), float("nan")])
def test_figures_of_any_size_and_none_are_drawn(value):
    figures = {"tok_s": value, "peak_bytes": value}
    row = record_row(make_record()) | figures | {"step_s": value}
    size = figures | {"model": "x", "parameters": value, "pick": None, "tokens_per_parameter": value, "note": None,
                      "hours": {"low": value, "mid": value, "high": value}}
    read = Reader(html_page(EMPTY | {
        "series": [series(cell(**figures), cell(8, **figures, pick=True), cell(9), cell(32, status="oom", **figures),
                          cell(16, estimated=True, status="estimated", **figures))],
        "limit_bytes": value, "cliff_bytes": value, "curve": [[value] * 4, [1e6, 0.1, 0.2, value], [1e7, 1, 2, 3]],
        "corpora": [["a corpus", value, value, value, value]],
        "sizes": [size_row("150M", 1.5e8, None, value), size],
        "receipts": [receipt("r") | {"ratio": figures | {"hours": value}, "at": None, "model": None}],
        "soak": {"windows": [{"at_s": i, "step_s": value, "temperature_c": value} for i in range(3)], "factor": value,
                 "settled": False, "at": None},
        "records": [row]}))
    words = read.words.split()
    assert not {"nan", "inf"} & set(re.findall("[a-z]+", read.words)) and max(map(len, words)) < 40
    numbers = [value for tag, name, value in read.attributes if name in ("d", "transform", "x1", "y1", "x", "y")]
    assert not [v for v in numbers if "nan" in v or "inf" in v]


def test_hours_between_and_beyond_the_points_of_a_curve():
    points = usable([[1e6, 1, 2, 4], [None, 1, 1, 1], [1e8, 100, 200, 400], [1e4, 0, 1, 1]])
    assert [p[0] for p in points] == [1e6, 1e8]
    for tokens in (1e5, 1e6, 1e7, 1e9):
        assert hours_at(points, tokens) == pytest.approx([tokens / 1e6 * v for v in (1, 2, 4)])
    assert hours_at(points[:1], 5e6) == pytest.approx((5, 10, 20))


@pytest.mark.parametrize(("low", "high"), [(1e-3, 2e-3), (0.2, 900), (40, 4e7), (3600, 7300), (5, 9), (1e-6, 1e12)])
def test_marks_are_few_ordered_and_inside(low, high):
    for found in (ticks.linear(low, high, 6), ticks.logarithmic(low, high, 7), ticks.durations(low, high, 7),
                  ticks.clock(low, high, 6)):
        assert found == sorted(set(found)) and len(found) <= 7
        assert all(low - (high - low) * 1e-6 <= v <= high * 1.001 for v in found)
    assert [ticks.duration_label(v) for v in (0.1, 30, 600, 36000, 3.6e6)] == ["0.1 s", "30 s", "10 min", "10 h", "1,000 h"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme):
    """4.5 to 1 at least (WCAG 2.2, 1.4.3)."""
    style = (ROOT / "planner" / "page.html").read_text(encoding="utf-8")
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


def many_records() -> dict:
    data = spilling(HOSTILE[4]) | {"title": HOSTILE[4], "notes": list(HOSTILE)}
    data["plan"]["why"] += HOSTILE
    data["receipts"] += [receipt(text, tok_s=1.1) for text in HOSTILE]
    data["corpora"].append([HOSTILE[4], 1e9, 1, 2, 3])
    data["records"] = [record_row(make_record(i + 1, 512, tok_s=1000 + (i * 37) % 601)) for i in range(600)] + [
        data["records"][0] | {"tok_s": None, "why": HOSTILE[4]}]
    return data


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
        the_page_answers(out, usable(data["curve"]))


def the_page_answers(out: dict, points) -> None:
    """What the script wrote is what Python works out, for every place of the sliders; the rows come as asked for."""

    def expected(corpus, epochs):
        low, mid, high = hours_at(points, corpus * epochs)
        return [f"{count_text(corpus)} tokens", f"{epochs:g}", f"{count_text(corpus * epochs)} tokens seen", hours_text(mid),
                band_text(low, mid, high, hours_text)]

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
    assert charts.peaks([], 5e9, None) == charts.ratios([receipt("r")]) == charts.soak(soak_windows(1)) == ""

"""The page in a real browser: right on a desk, on a phone, in light and dark."""

import dataclasses
import json
import re
import shutil
import subprocess

import pytest
from helpers.made import make_record
from helpers.page_data import HOSTILE, LONG, past_run, spilling, written
from matplotlib.image import imread

from planner.report.curve import hours_at
from planner.report.page import html_page
from planner.report.page_data import Corpus, PageData
from planner.report.text import band_text, count_text, hours_text
from trainer.plan import Span

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(folder, *arguments, target) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [BROWSER or "", "--headless=new",
         "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
         "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0", *arguments,
         (folder / target).as_uri()], capture_output=True, text=True, timeout=60)
    assert not re.search("CONSOLE|Uncaught", done.stderr), done.stderr
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
    assert page.plan
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
    frames = [json.loads(text) for text in re.findall("<pre>(.*?)</pre>", done.stdout, re.DOTALL)]
    assert sorted(out["width"][1] for out in frames) == [360, 1100]
    for out in frames:
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
    assert out["spoken"] == f"{out['moved'][-1][2][0]}, {out['moved'][-1][2][3]}"
    assert out["reachable"]
    assert out["rows"] == [500, 601]
    assert out["sorted"] == "descending"
    assert out["up"] == ["1", "1", "2", "3", "4"]
    assert out["down"] == ["600", "599", "598", "597", "596"]
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
    assert backs[0] < 60
    assert backs[1] > 200

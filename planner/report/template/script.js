"use strict";
(() => {
  const $ = id => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  document.documentElement.classList.add("js");

  // The words are those of spillcliff/units.py, the hours those of planner/report/curve.py.
  function count(value) {
    for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (value >= scale * 0.99995) return (value / scale).toFixed(1).replace(/\.0$/, "") + unit;
    }
    return value.toFixed(0);
  }
  function duration(hours) {
    const seconds = hours * 3600;
    if (seconds >= 5400) return hours.toFixed(1) + " h";
    return seconds >= 100 ? (seconds / 60).toFixed(1) + " min" : seconds.toFixed(0) + " s";
  }
  const curve = data.curve;
  function hoursAt(tokens) {
    let i = 1;
    while (i < curve.length - 1 && curve[i][0] < tokens) i++;
    const [a, b] = [curve[i - 1], curve[i]];
    const part = Math.log(tokens / a[0]) / Math.log(b[0] / a[0]);
    return [1, 2, 3].map(k => Math.exp(Math.log(a[k]) + part * Math.log(b[k] / a[k]))).sort((x, y) => x - y);
  }

  const sliders = ["corpus", "epochs"].map($).filter(Boolean);
  const values = {};
  function show() {
    const seen = values.corpus * values.epochs;
    const [low, mid, high] = hoursAt(seen);
    $("hours-mid").textContent = duration(mid);
    const band = [...new Set([low, high].map(duration))].join(" to ");
    $("hours-band").textContent = band === duration(mid) ? "" : band;
    $("hours-seen").textContent = count(seen) + " tokens seen";
    $("corpus-shown").textContent = count(values.corpus) + " tokens";
    $("epochs-shown").textContent = String(values.epochs);
    for (const slider of sliders) {
      slider.setAttribute("aria-valuetext", $(slider.id + "-shown").textContent + ", " + $("hours-mid").textContent);
    }
    for (const svg of document.querySelectorAll("svg[data-x]")) {
      const [x, y] = [[svg.dataset.x, seen], [svg.dataset.y, mid]].map(([ends, value]) => {
        const [from, to, start, end] = ends.split(" ").map(Number);
        const part = Math.log(value / from) / Math.log(to / from);
        return start + Math.min(1, Math.max(0, part)) * (end - start);
      });
      svg.querySelector(".marker").setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)})`);
    }
  }
  for (const slider of sliders) {
    const [low, high, value] = ["low", "high", "value"].map(name => Number(slider.dataset[name]));
    values[slider.id] = value;
    slider.value = high > low ? 1000 * Math.log(value / low) / Math.log(high / low) : 0;
    slider.addEventListener("input", () => {
      values[slider.id] = Number((low * (high / low) ** (slider.value / 1000)).toPrecision(2));
      show();
    });
  }
  if (sliders.length) show();

  const table = document.querySelector(".records");
  if (table) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, i) => ({row, record: data.records[i]}));
    const words = new Intl.Collator("en", {numeric: true});
    const heads = [...table.querySelectorAll("th[data-key]")];
    for (const head of heads) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const key = head.dataset.key;
        const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        rows.sort(({record: {[key]: a}}, {record: {[key]: b}}) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return sign * (typeof a === "number" && typeof b === "number" ? a - b : words.compare(a, b));
        });
        body.append(...rows.map(({row}) => row));
      });
    }
    const all = $("show-all");
    if (all) {
      table.classList.add("few");
      all.addEventListener("click", () => {
        table.classList.remove("few");
        all.hidden = true;
      });
    }
  }

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });
})();

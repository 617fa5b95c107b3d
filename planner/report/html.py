"""Pieces of the page's HTML: text that can hold anything, figures that can be missing, tables that scroll by themselves."""

import html
import math
from collections.abc import Callable, Iterable, Sequence

from spillcliff.units import format_bytes, format_count, format_duration

NONE = "–"
"""What is shown where nothing is known."""

Column = tuple[str, str]
"""Heading, and the class of its cells: "n" for figures, "t" for short text; "l" for labels and "w" for long text wrap."""


def esc(text: object) -> str:
    """Text for HTML, in attributes too; what UTF-8 can't write (half a surrogate pair, as of a file's name) becomes "?"."""
    return html.escape(str(text).encode("utf-8", "replace").decode())


def number(value: object) -> float | None:
    """A finite float, or None for whatever is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)


def figure(value: object, text: Callable[[float], str]) -> str:
    """`text` of a number; NONE where there is none, and an exponent where no card gets to."""
    known = number(value)
    if known is None:
        return NONE
    return text(known) if abs(known) < 1e17 else f"{known:.3g}"


def tok_s_text(value: object) -> str:
    return figure(value, lambda v: f"{v:,.0f}" if v >= 9.95 else f"{v:.1f}")


def bytes_text(value: object) -> str:
    return figure(value, format_bytes)


def count_text(value: object) -> str:
    return figure(value, format_count)


def hours_text(value: object) -> str:
    return figure(value, lambda v: format_duration(v * 3600))


def step_text(value: object) -> str:
    """Seconds of a step: `"47.8 ms"`, `"2.88 s"`."""
    return figure(value, lambda v: f"{v:,.2f} s" if v >= 1 else f"{v * 1000:.1f} ms")


def ratio_text(value: object) -> str:
    """A ratio as a difference: 1.164 to `"+16.4%"`."""
    return figure(value, lambda v: f"{(v - 1) * 100:+,.1f}%")


def span_text(low: object, high: object, text: Callable[[object], str]) -> str:
    """`"12.0 h to 12.4 h"`, or one of them where both read the same."""
    return " to ".join(dict.fromkeys(text(v) for v in (low, high)))


def band_text(low: object, mid: object, high: object, text: Callable[[object], str]) -> str:
    """The band around `mid`; nothing where it reads like that."""
    band = span_text(low, high, text)
    return "" if band == text(mid) else band


def under(main: str, more: str) -> str:
    """A figure with a smaller line below it, if there is one."""
    return main if not more else f"{main}<small>{more}</small>"


def time_text(at: object) -> str:
    """An ISO time to the second: `"2026-01-01 00:00:00"`."""
    return NONE if at is None else esc(str(at).replace("T", " ", 1)[:19])


def table(name: str, head: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table in a container that scrolls by itself, named for screen readers; the first cell of a row is its heading.
    Cells are HTML. Nothing if there are no rows."""
    rows = list(rows)
    if not rows:
        return ""
    kinds = [kind for _, kind in head]
    heads = "".join(f'<th scope="col" class="{kind}">{label}</th>' for label, kind in head)
    body = "\n".join(
        "<tr>" + f'<th scope="row" class="{kinds[0]}">{first}</th>'
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds[1:], rest, strict=True)) + "</tr>"
        for first, *rest in rows)
    return scroller(name, f'<table class="data"><thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table>')


def scroller(name: str, content: str) -> str:
    """Something wide that the keyboard can scroll."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(name)}">{content}</div>'


def bar(value: object, largest: float, text: str) -> str:
    """A figure above a bar of its share of the largest."""
    share = (number(value) or 0) / largest if largest > 0 else 0
    return f'<span class="bar" style="--share:{min(1.0, max(0.0, share)):.4f}">{text}</span>'


def cell_name(cell: dict) -> str:
    """`"B=4 L=512 accum=2 graph/none"` of a cell or a step in JSON; what is usual is left out."""
    extra = [f"accum={cell.get('accum')}"] * (cell.get("accum", 1) != 1)
    if (cell.get("engine", "eager"), cell.get("recompute", "none")) != ("eager", "none"):
        extra.append(f"{cell.get('engine')}/{cell.get('recompute')}")
    extra += ["update=backward"] * (cell.get("update") == "backward")
    return " ".join([f"B={cell['batch']} L={cell['length']}", *extra])


def finite(value: object) -> object:
    """The same with what JSON has no word for (infinities, NaN) as None."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Figures in words, for the page, its pictures and the terminal; a figure may be missing."""

import re
from collections.abc import Callable

from spillcliff.schema import is_number
from spillcliff.units import format_bytes, format_count, format_duration
from trainer.plan import Span

NONE = "\N{EN DASH}"
"""What is shown where nothing is known."""
MOST_SHOWN = 1e17
"""From here on a figure is shown with an exponent: no card gets there."""

Text = Callable[[object], str]


def number_text(value: object, text: Callable[[float], str]) -> str:
    """`text` of a finite number, NONE of anything else."""
    if not is_number(value, -1e300, 1e300):
        return NONE
    return text(value) if abs(value) < MOST_SHOWN else f"{float(value):.3g}"


def tok_s_text(value: object) -> str:
    return number_text(value, lambda v: f"{v:,.0f}" if v >= 9.95 else f"{v:.1f}")


def bytes_text(value: object) -> str:
    return number_text(value, format_bytes)


def count_text(value: object) -> str:
    return number_text(value, format_count)


def hours_text(value: object) -> str:
    return number_text(value, lambda v: format_duration(v * 3600))


def step_s_text(value: object) -> str:
    """Seconds of a step: `"47.8 ms"`, `"2.88 s"`."""
    return number_text(value, lambda v: f"{v:,.2f} s" if v >= 1 else f"{v * 1000:.1f} ms")


def ratio_text(value: object) -> str:
    """A ratio as a difference: 1.164 to `"+16.4%"`."""
    return number_text(value, lambda v: f"{(v - 1) * 100:+,.1f}%")


def range_text(low: object, high: object, text: Text) -> str:
    """`"12.0 h to 12.4 h"`, or one of them where both read the same."""
    return " to ".join(dict.fromkeys(text(v) for v in (low, high)))


def band_text(span: Span, text: Text) -> str:
    """The band around the middle; nothing where it reads like that."""
    band = range_text(span.low, span.high, text)
    return "" if band == text(span.mid) else band


def time_text(at: object) -> str:
    """An ISO time to the second: `"2026-01-01 00:00:00"`."""
    return str(at).replace("T", " ", 1)[:19]


def printable(text: object) -> str:
    """Text that UTF-8 and XML can write: half a surrogate pair, as in a file's name, and control characters become "?"."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "?", str(text).encode("utf-8", "replace").decode())


def end_of(text: str, most: int) -> str:
    """The end of a long text, in one line: that is where paths differ."""
    text = " ".join(printable(text).splitlines())
    return text if len(text) <= most else "..." + text[3 - most:]

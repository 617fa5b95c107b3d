"""Sizes, counts and durations as people write them, to numbers and back.

Sizes shown to people are decimal (1 GB = 1e9 bytes); binary suffixes (GiB) are read too.
"""

import re

from spillcliff.errors import UserError
from spillcliff.schema import MOST

_COUNT = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {"": 1, "b": 1, "k": 1e3, "kb": 1e3, "m": 1e6, "mb": 1e6, "g": 1e9, "gb": 1e9, "t": 1e12, "tb": 1e12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_HOURS = {"": 1.0, "h": 1.0, "m": 1 / 60, "min": 1 / 60, "s": 1 / 3600, "d": 24.0}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)(?:e([0-9]+))?\s*([a-zA-Z]*)\s*$")


def _parse(text: str, scale: dict, thing: str, example: str) -> float:
    match = _NUMBER.match(str(text))
    if not match or match[3].lower() not in scale:
        raise UserError(f"{thing} {text!r:.60} is not understood; write it like {example}")
    value = float(f"{match[1].replace('_', '')}e{match[2] or 0}") * scale[match[3].lower()]
    if not 0 < value < MOST:
        raise UserError(f"{thing} {text!r:.60} must be above zero and of a size that exists; write it like {example}")
    return value


def parse_count(text: str, thing: str = "count") -> int:
    """`"150M"`, `"1.5B"`, `"32k"`, `"32000"` to a whole number; UserError names `thing`."""
    return max(1, round(_parse(text, _COUNT, thing, "100M, 1.5B or 32000")))


def parse_bytes(text: str, thing: str = "size") -> int:
    """`"5GB"` (1e9), `"6GiB"` (2**30) or plain bytes to bytes."""
    return max(1, round(_parse(text, _BYTES, thing, "5GB, 6GiB or 800MB")))


def parse_hours(text: str, thing: str = "duration") -> float:
    """`"12"`, `"12h"`, `"90m"`, `"45s"`, `"2d"` to hours."""
    return _parse(text, _HOURS, thing, "12h, 90m or 2d")


def parse_ints(text: str, thing: str) -> tuple[int, ...]:
    """`"1,2,4"` to (1, 2, 4): positive whole numbers, in the order given, without repeats."""
    values = []
    for part in str(text).split(","):
        if not re.fullmatch(r"0*[1-9][0-9]{0,9}", part.strip(), re.ASCII) or int(part) > 2**31 - 1:
            raise UserError(f"{thing} {text!r:.60}: {part.strip()!r:.20} is not a positive whole number; "
                            f"write it like 1,2,4")
        values.append(int(part))
    return tuple(dict.fromkeys(values))


def format_count(value: float) -> str:
    """137850624 to `"137.9M"`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.99995:
            return f"{value / scale:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"


def format_bytes(value: float | None) -> str:
    """4040000000 to `"4.04 GB"`, 5e9 to `"5.0 GB"`; None to `"-"`."""
    if value is None:
        return "-"
    number, unit = (value / 1e9, "GB") if value >= 0.1e9 else (value / 1e6, "MB")
    return f"{number:.2f}".removesuffix("0") + " " + unit


def format_duration(seconds: float) -> str:
    """43920 to `"12.2 h"`, 200 to `"3.3 min"`, 12 to `"12 s"`."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 100 else f"{seconds:.0f} s"

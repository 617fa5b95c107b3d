"""JSON that was damaged: by structure, so that deep checks are reached, or by its bytes."""

import copy
import json

from hypothesis import strategies as st

DEEP, TWICE = "@deep", "@twice-"
"""Stand for what a Python object can't hold: brackets by the thousand, a key that is there twice."""
TEXTS = ["", "a", "a\nb", "a\u2028b\x1b[0m\r", "\ud800", "\x00", "../../a", "-1", "NaN", "[", "[[[[[[[[", "9" * 30,
         "x" * 5000, "1M", "mine:step", "none", "eager", "backward", DEEP + "40", DEEP + "900", DEEP + "100000"]
NUMBERS = [0, 1, -1, 2, 3, 7, 65_537, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 10**30, 10**400, -10**400, 0.5, -0.0, 1.5, 1e-9,
           1e-30, 5e-324, 1e17, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]
ODD: list = [None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], [None], [1, "a"], [{}], {"": None}, {"a": {"b": [1]}}]


def places(value, found=None) -> list[tuple]:
    """(container, key) of everything in it."""
    found = [] if found is None else found
    for key in (value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
        found.append((value, key))
        places(value[key], found)
    return found


def _tweaked(value, draw):
    """Something near it: of another sign, size or type."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        if not abs(value) < 1e30:
            return str(value)[:4000]
        return draw(st.sampled_from([-value, value + 1, value - 1, value / 2, value * 1000, value * 10**9, str(value),
                                     bool(value), [value], float(value)]))
    if isinstance(value, str):
        return draw(st.sampled_from([value + "\n", value * 2, value[1:], value.upper(), [value], {value: value}]))
    if isinstance(value, dict):
        return draw(st.sampled_from([list(value.values()), list(value), [value], dict(list(value.items())[1:])]))
    if isinstance(value, list):
        return draw(st.sampled_from([dict(enumerate(value)), value * 2, value[1:], value[::-1], [value], value[:1] * 40]))
    return draw(st.sampled_from(ODD))


@st.composite
def restructured(draw, value):
    """The text of a JSON value of which up to three places are not what they were."""
    value = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        there = places(value)[draw(st.sampled_from((0, 1, 1, 1, 1, 1))):]
        if not there:
            break
        holder, key = draw(st.sampled_from(there))
        how = draw(st.sampled_from(("odd", "odd", "odd", "tweak", "tweak", "remove", "rename", "twice", "swap")))
        if how == "odd":
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif how == "tweak":
            holder[key] = copy.deepcopy(_tweaked(holder[key], draw))
        elif how == "swap":
            other, its = draw(st.sampled_from(there))
            holder[key] = copy.deepcopy(other[its])
        elif isinstance(holder, list):
            if holder is value:
                continue
            if how == "remove":
                del holder[key]
            else:
                holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "twice":
            holder[TWICE + str(key)] = copy.deepcopy(draw(st.sampled_from(ODD)))
        else:
            kept = holder.pop(key)
            if how == "rename":
                holder[draw(st.sampled_from((str(key) + "_", str(key).upper(), "", "schema", "batch")))] = kept
    text = json.dumps(value[0]).replace(TWICE, "")
    for depth in (100_000, 900, 40):
        text = text.replace(f'"{DEEP}{depth}"', "[" * depth + "]" * depth)
    return text


@st.composite
def mangled(draw, data: bytes) -> bytes:
    """Bytes of which some are not what they were."""
    at = draw(st.integers(0, len(data)))
    how = draw(st.sampled_from(("cut", "flip", "zero", "insert", "bom", "crlf", "empty", "twice", "utf-16", "vast", "drop")))
    if how == "flip":
        out = bytearray(data)
        for bit in draw(st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=3)):
            out[bit // 8] ^= 1 << bit % 8
        return bytes(out)
    if how == "insert":
        piece = draw(st.sampled_from((b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\n", b"\\ud800", b"9" * 5000, b"-", b".",
                                      b"e9", b"{", b'"', b"[" * 5000, b"NaN", b",", b"\x1b")))
        return data[:at] + piece + data[at:]
    zeros = bytes(min(64, len(data) - at))
    return {"cut": data[:at], "zero": data[:at] + zeros + data[at + 64:], "bom": b"\xef\xbb\xbf" + data,
            "crlf": data.replace(b"\n", b"\r\n"), "empty": b"", "twice": data + data, "drop": data[:at] + data[at + 1:],
            "utf-16": data.decode("latin-1").encode("utf-16"), "vast": data[:at] + b" " * 200_000 + data[at:]}[how]


def damaged(value, before: bytes = b"", after: bytes = b""):
    """Damaged bytes of a file that holds the JSON `value` between other lines."""
    whole = before + json.dumps(value).encode() + after
    of_structure = restructured(value).map(lambda text: before + text.encode() + after)
    return st.one_of(of_structure, of_structure, of_structure, mangled(whole))

"""Sizes as people write them are read right, and nonsense is refused by name."""

import pytest

from spillcliff.errors import UserError
from spillcliff.units import format_bytes, format_count, format_duration, parse_bytes, parse_count, parse_hours, parse_ints


@pytest.mark.parametrize(("text", "value"), [
    ("150M", 150_000_000), ("1.5B", 1_500_000_000), ("32k", 32_000), ("32000", 32_000), ("1e8", 100_000_000),
    ("100_000", 100_000), (" 5 m ", 5_000_000)])
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("5GB", 5_000_000_000), ("6GiB", 6 * 2**30), ("800MB", 800_000_000),
    ("5000000000", 5_000_000_000), ("5.5g", 5_500_000_000)])
def test_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("12h", 12), ("90m", 1.5), ("36s", 0.01), ("2d", 48)])
def test_hours(text, value):
    assert parse_hours(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-5M", "five", "5X", "0", "1e400", "nan", "inf", "5 GB GB", "1e30", "9" * 5000])
def test_nonsense_is_refused_by_name(text):
    for parse in (parse_count, parse_bytes, parse_hours):
        with pytest.raises(UserError, match="the thing"):
            parse(text, "the thing")


def test_lists_of_whole_numbers():
    assert parse_ints("1, 2,4,2", "--batch") == (1, 2, 4)
    for text in ("", "1,,2", "0", "-1", "1.5", "a", "\u00b2", "99999999999", "9" * 5000):
        with pytest.raises(UserError, match="--batch"):
            parse_ints(text, "--batch")


def test_shown_sizes_are_decimal_and_short():
    assert [format_bytes(v) for v in (4_040_000_000, 5e9, 5.67e9, 12_000_000, None)] == [
        "4.04 GB", "5.0 GB", "5.67 GB", "12.0 MB", "-"]
    assert [format_count(v) for v in (137_850_624, 100_000_000, 999_999, 512, 2e9)] == ["137.9M", "100M", "1M", "512", "2B"]
    assert [format_duration(v) for v in (43_920, 200, 12)] == ["12.2 h", "3.3 min", "12 s"]

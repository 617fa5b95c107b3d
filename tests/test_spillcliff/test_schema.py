"""What a file's fields may hold is what their annotations say, and what they may not is told in one line."""

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from spillcliff import schema
from spillcliff.errors import UserError
from spillcliff.schema import Number

LONGEST = 10**4299
"""The whole number of the most digits that Python reads."""


class Status(enum.StrEnum):
    FITS = "fits"
    OOM = "oom"


@dataclass(frozen=True)
class Inner:
    low: int
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UserError(f"low {self.low} is above high {self.high}")


@dataclass(frozen=True)
class Everything:
    """A field for each kind of annotation."""

    whole: int = 0
    number: float = 0.0
    text: str = ""
    flag: bool = False
    bounded: Annotated[int, Number(1, 10)] = 1
    above: Annotated[float, Number(above=True)] = 1.0
    optional: Annotated[float | None, Number(0, 1)] = None
    maybe_text: str | None = None
    choice: Literal["a", "b"] = "a"
    status: Status = Status.FITS
    inner: Inner = Inner(1)
    maybe_inner: Inner | None = None
    many: tuple[Annotated[float, Number()], ...] = ()
    pair: tuple[int, int] = (0, 0)
    lines: list[str] = field(default_factory=list)
    inners: list[Inner] = field(default_factory=list)
    anything: list = field(default_factory=list)
    mapping: dict = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)
    free: Any = None
    made: int = field(default=7, init=False)


NOT_NUMBERS = [True, "1", None, [], {}, math.nan, math.inf, -math.inf, 10**400, -10**400, LONGEST, 1e300]
CASES: dict[str, tuple[list, list]] = {
    "whole": ([0, -3, 2**53 + 1, 4.04e9], [1.5, *NOT_NUMBERS]),
    "number": ([0, -1.5, 1e17], NOT_NUMBERS),
    "text": (["", "é\n"], [None, 1, True, ["a"], {}]),
    "flag": ([True, False], [0, 1, "true", None]),
    "bounded": ([1, 9, 9.0], [0, 10, 9.5, -1, *NOT_NUMBERS]),
    "above": ([1e-30, 5], [0, 0.0, -1, *NOT_NUMBERS]),
    "optional": ([None, 0, 0.99], [1, -0.1, True, "0", math.nan, math.inf, 10**400]),
    "maybe_text": ([None, "x"], [1, False, []]),
    "choice": (["a", "b"], ["c", "", None, 1, ["a"], {}]),
    "status": (["fits", "oom", Status.OOM], ["Fits", "", None, 3, [], {}]),
    "inner": ([{"low": 1}, {"low": 2, "high": 3.0}, Inner(1, 2)], [None, 3, [], "low", {}, {"high": 3}, {"low": "1"}]),
    "maybe_inner": ([None, {"low": 1}], [3, [], {"low": 10}]),
    "many": ([[], [1, 2.5], (1.0,)], [None, 3, "12", {}, [1, -1], [True], [math.nan], [10**400]]),
    "pair": ([[1, 2], (3, 4)], [[], [1], [1, 2, 3], ["1", 2], None]),
    "lines": ([[], ["a", "b"]], ["ab", [1], [None], {}, None]),
    "inners": ([[], [{"low": 1}]], [[{}], [1], {"low": 1}, None]),
    "anything": ([[], [1, "a", None]], ["", {}, None]),
    "mapping": ([{}, {"a": [1]}], [[], None, "a", 1]),
    "names": ([{}, {"torch": "2.10", "driver": None}], [{"torch": 2}, [], None]),
    "free": ([None, 1, "x", [], {}], []),
}
GOOD = [(name, value) for name, (good, _) in CASES.items() for value in good]
BAD = [(name, value) for name, (_, bad) in CASES.items() for value in bad]


def named(value: object) -> str:
    """In a test's name."""
    return value if isinstance(value, str) and value in CASES else repr(value)[:12]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=named)
def test_what_an_annotation_allows_is_taken(name, value):
    taken = getattr(schema.read(Everything, {name: value}), name)
    if name in ("inner", "maybe_inner"):
        assert taken is None if value is None else isinstance(taken, Inner)
    elif name == "inners":
        assert taken == [Inner(**one) for one in value]
    elif isinstance(value, (list, tuple)) and name in ("many", "pair"):
        assert taken == tuple(value)
    else:
        assert taken == value


@pytest.mark.parametrize(("name", "value"), BAD, ids=named)
def test_what_it_does_not_allow_is_refused_in_a_short_line_that_names_the_field(name, value):
    for thing in ("", "record"):
        with pytest.raises(UserError, match=f"^{thing and f'{thing}: '}{name}") as refused:
            schema.read(Everything, {name: value}, thing)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 200


def test_every_kind_of_annotation_is_tried():
    assert CASES.keys() == {name for name, f in Everything.__dataclass_fields__.items() if f.init}


def test_types_are_those_of_the_field_and_not_of_the_file():
    read = schema.read(Everything, {"whole": 4.0, "number": 4, "status": "oom", "many": [1], "lines": ("a",)})
    assert type(read.whole) is int
    assert read.number == 4
    assert read.status is Status.OOM
    assert read.many == (1,)
    assert read.lines == ["a"]


def test_missing_fields_are_named_all_at_once_and_unknown_ones_ignored():
    @dataclass
    class Three:
        first: int
        second: str
        third: int = 3

    with pytest.raises(UserError, match=r"^plan: it lacks first, second$"):
        schema.read(Three, {"third": 1, "fourth": 2}, "plan")
    assert schema.read(Three, {"first": 1, "second": "", "fourth": math.nan, "made": 3}) == Three(1, "")


@pytest.mark.parametrize("value", [None, [], [1], "text", 3, math.nan, True, LONGEST], ids=named)
def test_what_is_no_object_is_told(value):
    for thing, words in (("", "^it must be a JSON object"), ("record", "^record must be a JSON object")):
        with pytest.raises(UserError, match=words) as refused:
            schema.read(Inner, value, thing)
        assert len(str(refused.value)) < 200


def test_an_inner_failure_is_told_by_the_path_to_it():
    for values, words in (({"inner": {"low": "x"}}, "^record: inner: low is 'x'; it must be a whole number$"),
                          ({"inner": {"low": 10}}, "^record: inner: low 10 is above high 9$"),
                          ({"inners": [{"low": 1}, {}]}, "^record: inners: it lacks low$")):
        with pytest.raises(UserError, match=words):
            schema.read(Everything, values, "record")


@pytest.mark.parametrize(("name", "value", "words"), [
    ("bounded", 0, "a whole number of 1 or more and below 10"), ("above", 0, "a number above 0"),
    ("optional", 2, "a number of 0 or more and below 1, or null"), ("whole", 1.5, "a whole number"),
    ("choice", "c", "one of a, b"), ("status", "c", "one of fits, oom"), ("many", 3, "a list of a number of 0 or more"),
    ("pair", [1], "2 values, each a whole number"), ("lines", 1, "a list of text"), ("anything", 1, "a list"),
    ("flag", 1, "true or false"), ("mapping", 1, "a JSON object"), ("names", 1, "a JSON object of text, or null"),
    ("inner", 1, "a JSON object")])
def test_what_would_be_right_is_said(name, value, words):
    with pytest.raises(UserError, match=f"it must be {words}$"):
        schema.read(Everything, {name: value})


@pytest.mark.parametrize("value", ["x" * 5000, "a\nb", "\ud800", [1] * 5000, {"a": "\n"}])
def test_a_line_stays_short_and_one_whatever_it_quotes(value):
    with pytest.raises(UserError) as refused:
        schema.read(Everything, {"whole": value}, "record")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 120
    str(refused.value).encode()


def test_an_instance_that_was_made_in_the_program_is_checked_too():
    schema.check(Everything(), "step")
    schema.check(Everything(whole=3, inner=Inner(2), many=(1.0,)), "step")
    for changes in ({"whole": 1.5}, {"number": math.nan}, {"bounded": LONGEST}, {"flag": 1}, {"choice": "c"},
                    {"many": (-1.0,)}, {"inner": 3}):
        (name,) = changes
        with pytest.raises(UserError, match=f"^step: {name}"):
            schema.check(Everything(**changes), "step")


def test_bounds_are_told_apart():
    assert [Number(1, 3).holds(value) for value in (0, 1, 2.9, 3, math.nan)] == [False, True, True, False, False]
    assert [Number(1, 3, above=True).holds(value) for value in (1, 1.1, 3)] == [False, True, False]
    assert Number(0, 1e40).holds(1e39)
    assert schema.is_number(0.5)
    assert not any(map(schema.is_number, (True, "1", math.nan, math.inf, -1, 10**400, schema.MOST)))
    assert schema.is_whole(5, 5)
    assert not any(map(schema.is_whole, (5.0, True, -1, 10**400)))


def test_a_number_may_be_larger_than_anything_real_where_its_bounds_say_so():
    @dataclass
    class File:
        mtime_ns: Annotated[int, Number(-2**63, 2**63)]

    assert schema.read(File, {"mtime_ns": 1_796_301_978_000_000_000}).mtime_ns == 1_796_301_978_000_000_000


@pytest.mark.parametrize(("value", "words"), [
    (2, "newer than this version reads"), (0, "reads 1. Make it again"), (None, "reads 1"), ("1", "reads 1"),
    (LONGEST, "newer"), ([1], "reads 1")], ids=named)
def test_too_new_and_too_old_are_different_errors(value, words):
    schema.check_version({"schema": 1}, 1)
    with pytest.raises(UserError, match=words) as refused:
        schema.check_version({"schema": value}, 1, ". Make it again")
    assert len(str(refused.value)) < 200

"""What the fields of a JSON file must hold: one reader for all of them, made of a dataclass's own annotations.

A field's annotation says what it is: `int`, `float`, `str`, `bool`, `X | None`, `tuple[X, ...]`, `list[X]`, `dict[str, X]`,
a Literal or an enum of strings, or another such dataclass. `Annotated[float, Number(low=1)]` bounds a number. What can't be
said so (two fields that must agree) a dataclass checks in its `__post_init__`. """

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from spillcliff.errors import UserError

T = TypeVar("T")

MOST = 1e18
"""From here on no size, count or duration exists: a hundred times the bytes and tokens of all books and web pages."""


@dataclass(frozen=True)
class Number:
    """The bounds of a number: `low` or more (`above` it, if so said) and below `high`."""

    low: float = 0.0
    high: float = MOST
    above: bool = False

    def holds(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value < self.high

    @property
    def words(self) -> str:
        """`" of 0 or more"`, `" above 0 and below 10"`."""
        low = f" above {self.low:g}" if self.above else f" of {self.low:g} or more"
        return low if self.high > 1e6 else f"{low} and below {self.high:g}"


ANY = Number(-MOST)


def is_number(value: object, low: float = 0.0, high: float = MOST) -> TypeGuard[float]:
    """Whether a value that was read is a number (no truth value, no NaN) of `low` or more and below `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value < high


def is_whole(value: object, low: int = 0, high: float = MOST) -> TypeGuard[int]:
    """Whether a value that was read is a whole number of `low` or more and below `high`."""
    return isinstance(value, int) and is_number(value, low, high)


def check_version(values: dict, version: int, remedy: str = "") -> None:
    """UserError unless the file's `schema` is `version`: too new and too old are different errors; `remedy` is what to do
    about one that is too old."""
    written = values.get("schema")
    if isinstance(written, int) and written > version:
        raise UserError(f"schema {written!r:.40} is newer than this version reads ({version}); update spillcliff")
    if written != version:
        raise UserError(f"schema is {written!r:.40}; this version reads {version}{remedy}")


def read(cls: type[T], values: object, thing: str = "") -> T:
    """Builds the dataclass `cls` from a JSON object; fields it does not know are ignored.

    UserError naming `thing` (if any) and the field for one that is missing, of another type, or out of its bounds.
    """
    try:
        return _build(cls, values)
    except ValueError:
        raise UserError(f"{thing or 'it'} must be a JSON object, not {values!r:.60}") from None
    except UserError as e:
        raise UserError(f"{thing}: {e}" if thing else str(e)) from None


def check(instance: object, thing: str) -> None:
    """UserError naming `thing` if a field of a dataclass that was made in the program does not hold what its annotation
    says: for those that are made of a command's options."""
    for field in _fields(type(instance)):  # type: ignore[arg-type]
        try:
            field.read(getattr(instance, field.name))
        except UserError as e:
            raise UserError(f"{thing}: {e}") from None


Reader = Callable[[Any], Any]
"""Takes a value from JSON to the field's own; ValueError if it is not what it must be, UserError from one level below."""


@dataclass(frozen=True)
class _Field:
    name: str
    is_required: bool
    reader: Reader
    words: str

    def read(self, value: object) -> Any:
        try:
            return self.reader(value)
        except ValueError:
            raise UserError(f"{self.name} is {value!r:.40}; it must be {self.words}") from None
        except UserError as e:
            raise UserError(f"{self.name}: {e}") from None


@functools.cache
def _fields(cls: Any) -> tuple[_Field, ...]:
    """Made once a class, since 100,000 records are read."""
    hints = typing.get_type_hints(cls, include_extras=True)
    made = []
    for f in dataclasses.fields(cls):
        if f.init:
            is_required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            made.append(_Field(f.name, is_required, *_reader(hints[f.name])))
    return tuple(made)


def _reader(hint: Any) -> tuple[Reader, str]:
    """(reader, what it takes in words) of an annotation."""
    bounds = None
    if typing.get_origin(hint) is typing.Annotated:
        hint, bounds = typing.get_args(hint)[:2]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(next(a for a in arguments if a is not type(None)), bounds)
    if origin is typing.Literal:
        return _literal(arguments), f"one of {', '.join(arguments)}"
    if hint in (int, float):
        return _number(hint is int, bounds or ANY)
    if origin in (list, tuple):
        return _sequence(origin, arguments)
    if hint is dict or origin is dict:
        return _mapping(arguments[1] if arguments else Any)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint, "one of " + ", ".join(str(member.value) for member in hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(_build, hint), "a JSON object"
    words = {str: "text", bool: "true or false", list: "a list"}
    return (_instance(hint), words[hint]) if hint in words else (lambda value: value, "anything")


def _optional(hint: Any, bounds: Number | None) -> tuple[Reader, str]:
    reader, words = _reader(typing.Annotated[hint, bounds] if bounds else hint)
    return lambda value: None if value is None else reader(value), f"{words}, or null"


def _number(is_int: bool, bounds: Number) -> tuple[Reader, str]:
    words = ("a whole number" if is_int else "a number") + ("" if bounds == ANY else bounds.words)

    def reader(value: object) -> object:
        if not is_number(value, -math.inf, math.inf) or not bounds.holds(value) or (is_int and value != int(value)):
            raise ValueError
        return int(value) if is_int else value  # other writers have 4.04e9 bytes
    return reader, words


def _literal(choices: tuple[str, ...]) -> Reader:
    def reader(value: object) -> object:
        if value in choices:
            return value
        raise ValueError
    return reader


def _sequence(origin: type, arguments: tuple) -> tuple[Reader, str]:
    """A list, or a tuple of any number (`tuple[X, ...]`) or of so many (`tuple[X, X]`)."""
    element, words = _reader(arguments[0]) if arguments else (lambda value: value, "anything")
    count = None if origin is list or arguments[-1] is ... else len(arguments)

    def reader(value: object) -> object:
        if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
            raise ValueError
        return origin(map(element, value))
    return reader, f"a list of {words}" if count is None else f"{count} values, each {words}"


def _mapping(value_hint: Any) -> tuple[Reader, str]:
    element, words = _reader(value_hint)

    def reader(value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError
        return {name: element(inner) for name, inner in value.items()}
    return reader, "a JSON object" if value_hint is Any else f"a JSON object of {words}"


def _build(cls: type[T], value: object) -> T:
    """ValueError if `value` is no object, UserError for a field."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, dict):
        raise ValueError
    fields = _fields(cls)  # type: ignore[arg-type]
    if missing := [f.name for f in fields if f.is_required and f.name not in value]:
        raise UserError(f"it lacks {', '.join(missing)}")
    return cls(**{f.name: f.read(value[f.name]) for f in fields if f.name in value})


def _instance(kind: type) -> Reader:
    def reader(value: object) -> object:
        if isinstance(value, kind):
            return value
        raise ValueError
    return reader

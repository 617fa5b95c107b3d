"""JSONL of prompts and answers, or of chats, to turns, and turns to the text that a model sees."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spillcliff.errors import UserError
from trainer.tokenize.source import Source

PAIRS = (("prompt", "answer"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
"""Fields of a prompt and its answer; `instruction` may have an `input` beside it (Alpaca)."""
CHATS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Fields of a chat, and of each of its messages: OpenAI's and ShareGPT's."""
FORMS = ("{prompt, answer}, {prompt, completion}, {instruction, input, output}, {question, answer}, "
         "{messages: [{role, content}]} or {conversations: [{from, value}]}")
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "model": "assistant", "tool": "tool", "function": "tool"}
START, END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Turn:
    """What one side says; `role` is system, user, assistant or tool."""

    role: str
    text: str


@dataclass(frozen=True)
class Segment:
    """Text to be encoded by itself, or the one token of that name; `is_learned` says that the loss is on it."""

    text: str
    is_token: bool = False
    is_learned: bool = False


def form_of(value: object) -> tuple[str, ...] | None:
    """The fields by which an object is a pair or a chat; None if it is neither."""
    if isinstance(value, dict):
        forms = (*((field,) for field in CHATS), *PAIRS)
        return next((form for form in forms if all(field in value for field in form)), None)
    return None


def turns_of(value: object, form: tuple[str, ...]) -> list[Turn]:
    """The turns in the JSON value of a line, which must be of that form; ValueError says what is wrong with it."""
    if not isinstance(value, dict):
        raise ValueError("is not an object")
    if missing := [field for field in form if field not in value]:
        raise ValueError(f"has no {missing[0]}, which the lines before have")
    if len(form) == 2:
        prompt, answer = (_text(value, field) for field in form)
        if form[0] == "instruction" and value.get("input"):
            prompt += "\n\n" + _text(value, "input")
        return [Turn("user", prompt), Turn("assistant", answer)]
    messages, (who, what) = value[form[0]], CHATS[form[0]]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"{form[0]} is not a list of objects")
    turns = []
    for message in messages:
        role = message.get(who)
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise ValueError(f"{who} is {role!r:.40}, not one of {', '.join(ROLES)}")
        turns.append(Turn(ROLES[role.lower()], _text(message, what)))
    if not any(turn.role == "assistant" for turn in turns):
        raise ValueError("has no assistant's turn")
    return turns


def _text(value: dict, field: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        raise ValueError(f"{field} is not text")
    if not text.isascii():
        text.encode()  # half of a surrogate pair is no character: UnicodeEncodeError, a ValueError
    return text


def read(path: Path) -> Iterator[list[Turn]]:
    """The turns of each line of a JSONL file, compressed or not, whose first line says which form all of them have; blank
    lines are skipped. After a damaged line no more turns come, and at the file's end a UserError names the first of them and
    how many there are."""
    form, damaged, first = None, 0, ""
    with Source(path) as source:
        for number, line in enumerate(source.stream, 1):
            if not line.strip():
                continue
            if form is None and not damaged and line.lstrip().startswith(b"["):
                raise UserError(f"{path}: line {number} begins a list; write one object a line (jq -c '.[]' does)")
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if form is None and (form := form_of(value)) is None:
                    fields = ", ".join(list(value)[:6]) if isinstance(value, dict) else type(value).__name__
                    raise UserError(f"{path}: line {number} is neither a pair nor a chat (it has {fields or 'no fields'})"
                                    f"; its lines must be {FORMS}")
                turns = turns_of(value, form)
            except (ValueError, RecursionError) as e:
                damaged += 1
                first = first or f"line {number} {_reason(e)}"
            else:
                if not damaged:
                    yield turns
    if damaged:
        raise UserError(f"{path}: {first}; {damaged} damaged {'line' if damaged == 1 else 'lines'} in all: correct or "
                        f"remove {'it' if damaged == 1 else 'them'}")
    if form is None:
        raise UserError(f"{path} is empty; its lines must be {FORMS}")


def _reason(e: Exception) -> str:
    if isinstance(e, UnicodeError):
        return "is not UTF-8"
    if isinstance(e, (json.JSONDecodeError, RecursionError)):
        return "is not JSON"
    return str(e)


def plain(turns: list[Turn], end: str) -> list[Segment]:
    """Roles as text: "### User:\\n...\\n\\n### Assistant:\\n", the answer, and the token `end` after every answer."""
    segments, before = [], ""
    for turn in turns:
        if turn.role == "assistant":
            segments += [Segment(f"{before}### Assistant:\n"), Segment(turn.text, is_learned=True),
                         Segment(end, is_token=True, is_learned=True)]
            before = ""
        else:
            before += f"### {turn.role.capitalize()}:\n{turn.text}\n\n"
    return segments


def chatml(turns: list[Turn], end: str | None) -> list[Segment]:
    """Roles between <|im_start|> and <|im_end|>; `end`, if the tokenizer has it, after the last answer."""
    last = max(i for i, turn in enumerate(turns) if turn.role == "assistant")
    segments: list[Segment] = []
    for turn in turns[:last + 1]:
        is_answer = turn.role == "assistant"
        if is_answer:
            said = [Segment(f"{turn.role}\n"), Segment(turn.text, is_learned=True)]
        else:
            said = [Segment(f"{turn.role}\n{turn.text}")]
        segments += [Segment(START, is_token=True), *said, Segment(END, is_token=True, is_learned=is_answer), Segment("\n")]
    segments.pop()  # nothing comes after the last answer's end
    if end is not None:
        segments.append(Segment(end, is_token=True, is_learned=True))
    return segments

"""`AnswerReader`: splits an answer's text, as it comes, into reasoning, text, and calls of tools."""

import json
import re
import secrets
from collections.abc import Iterable
from typing import Literal, NamedTuple

from longctx.serving.server.tool_calls import PARSE, PYTHON_TAG, Call, ToolFormat

Kind = Literal["reasoning", "text", "tool_call"]
THINK, END_OF_THOUGHT = "<think>", "</think>"


class Part(NamedTuple):
    """Part of an answer.

    Attributes:
      text: of reasoning or of the answer; of a call, a piece of its arguments, JSON.
      number: of the call, from 0.
      name, call_id: of the tool and the call, in the call's first part.
    """

    kind: Kind
    text: str
    number: int = 0
    name: str | None = None
    call_id: str | None = None


class AnswerFormat(NamedTuple):
    """Parts that an answer may have besides text.

    Attributes:
      tools: form of calls; None: it has none.
      names: of tools; a call of another is text.
      thinks: whether it may begin with reasoning. is_thinking: whether the prompt has begun that.
    """

    tools: ToolFormat | None = None
    names: frozenset[str] = frozenset()
    thinks: bool = False
    is_thinking: bool = False


def joined_parts(parts: Iterable[Part]) -> list[Part]:
    """Join parts that follow each other and are of one kind, and of one call."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is None or last.kind != part.kind or part.name is not None:
            joined.append(part)
        else:
            joined[-1] = last._replace(text=last.text + part.text)
    return joined


class AnswerReader:
    """Splits the text of one completion. Pieces of it may be of any length; what is no call turns out to be text.

    Args:
      form: what the answer may have.

    Attributes:
      num_calls: that have come. is_cut: one has no end, as a stop string came before it.

    Examples:
      >>> from longctx.serving.server.answer_parts import AnswerFormat, AnswerReader
      >>> from longctx.serving.server.tool_calls import FORMATS
      >>> reader = AnswerReader(AnswerFormat(FORMATS["hermes"], frozenset({"add"})))
      >>> parts = reader.push('Well: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
      >>> [(part.kind, part.text, part.name) for part in parts]
      [('text', 'Well: ', None), ('tool_call', '', 'add'), ('tool_call', '{"a": 1}', None)]
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._form, self._tools = form, form.tools
        self._state: Literal["start", "reasoning", "text", "call", "whole"] = "start"
        if form.is_thinking:
            self._state = "reasoning"
        self._held = ""
        self._call: _CallReader | None = None
        self._skips_space = False
        self.num_calls, self.is_cut = 0, False

    @property
    def calls_tools(self) -> bool:
        """Whether there are calls, and all are whole."""
        return self.num_calls > 0 and not self.is_cut

    def push(self, text: str) -> list[Part]:
        """Return the parts that a piece of text makes certain."""
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back."""
        return self._read(is_end=True)

    def _read(self, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            before = self._state, self._held
            getattr(self, f"_read_{self._state}")(parts, is_end)
            if (self._state, self._held) == before:
                return [part for part in parts if part.text or part.name is not None]

    def _read_start(self, parts: list[Part], is_end: bool) -> None:
        """An answer may begin with reasoning, or be a call as a whole."""
        text = self._held.lstrip()
        self._held = text if self._skips_space else self._held
        if self._form.thinks and text.startswith(THINK):
            self._state, self._held = "reasoning", text.removeprefix(THINK)
        elif self._form.thinks and THINK.startswith(text) and not is_end:
            return
        elif self._tools is None or self._tools.begin:
            self._state = "text"
        elif PYTHON_TAG.startswith(text) and not is_end:
            return
        else:
            text = text.removeprefix(PYTHON_TAG).lstrip()
            opening = "[" if self._tools.family == "pythonic" else "{"
            if text or is_end:
                self._state = "whole" if text.startswith(opening) else "text"

    def _read_reasoning(self, parts: list[Part], is_end: bool) -> None:
        at = self._held.find(END_OF_THOUGHT)
        if at < 0:
            certain = len(self._held) - (0 if is_end else _overlap(self._held, END_OF_THOUGHT))
            parts.append(Part("reasoning", self._held[:certain]))
            self._held = self._held[certain:]
            return
        parts.append(Part("reasoning", self._held[:at]))
        self._held, self._state = self._held[at + len(END_OF_THOUGHT) :], "text"
        self._skips_space = True
        if self._tools is not None and not self._tools.begin:
            self._state, self._form = "start", self._form._replace(thinks=False)

    def _read_text(self, parts: list[Part], is_end: bool) -> None:
        begin = "" if self._tools is None else self._tools.begin
        at = self._held.find(begin) if begin else -1
        certain = at
        if at < 0:
            certain = len(self._held) - (0 if is_end or not begin else _overlap(self._held, begin))
        text = self._held[:certain]
        if self._skips_space:
            text = text.lstrip()
            if not text and at < 0 and not is_end:
                return  # white space after a call or a thought may be all that there is
            self._skips_space = not text
        parts.append(Part("text", text))
        self._held = self._held[certain:]
        if at >= 0:
            self._state = "call"

    def _read_call(self, parts: list[Part], is_end: bool) -> None:
        """Read a call between its marks, or all after its mark."""
        assert self._tools is not None
        begin, end = self._tools.begin, self._tools.end
        at = self._held.find(end, len(begin)) if end else -1
        while at >= 0 and _ends_in_text(self._held[len(begin) : at]):
            at = self._held.find(end, at + 1)
        if end and at >= 0:
            body, rest = self._held[len(begin) : at], self._held[at + len(end) :]
        elif not is_end:
            if end:
                self._stream(parts, self._held[len(begin) : len(self._held) - _overlap(self._held, end)])
            return
        else:
            body, rest = self._held[len(begin) :], ""
        if self._stream(parts, body, is_end=True) or self._take(parts, body):
            self._skips_space = True
        else:
            parts.append(Part("text", self._held[: len(self._held) - len(rest)]))
        self._held, self._state = rest, "text"

    def _read_whole(self, parts: list[Part], is_end: bool) -> None:
        """Read an answer that is a call, or several, from its first character to its last."""
        assert self._tools is not None
        if self._tools.family != "pythonic" and not _may_begin_call(self._held):
            self._state = "text"
            self._tools = None
        elif is_end:
            body = self._held.lstrip().removeprefix(PYTHON_TAG)
            if not self._take(parts, body):
                parts.append(Part("text", self._held))
            self._held, self._state = "", "text"

    def _stream(self, parts: list[Part], body: str, is_end: bool = False) -> bool:
        """Give pieces of the arguments of a call that is still coming; whether it is a whole one, at the end."""
        assert self._tools is not None
        if self._call is None:
            head = _HEAD.match(body)
            name = None if head is None else _unescaped(head[1])
            if head is None or name is None or name not in self._form.names:
                return False
            self._call = _CallReader(head.end())
            parts.append(self._begin(name))
        piece = self._call.read(body)
        if piece:
            parts.append(Part("tool_call", piece, self.num_calls - 1))
        if is_end:
            self.is_cut |= not self._call.is_over
            self._call = None
        return True

    def _take(self, parts: list[Part], body: str) -> bool:
        """Give the calls of a text that is there as a whole; False: it is none."""
        assert self._tools is not None
        try:
            calls: list[Call] = PARSE[self._tools.family](body)
        except ValueError:
            return False
        if not all(call.name in self._form.names for call in calls):
            return False
        for call in calls:
            parts += [self._begin(call.name), Part("tool_call", call.arguments, self.num_calls - 1)]
        return True

    def _begin(self, name: str) -> Part:
        is_mistral = self._tools is not None and self._tools.family == "mistral"
        call_id = (
            secrets.token_hex(5)[:9] if is_mistral else f"call_{secrets.token_hex(12)}"
        )  # as its template asks for
        self.num_calls += 1
        return Part("tool_call", "", self.num_calls - 1, name, call_id)


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.){1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BEGINNINGS = '{"name":"', '{"type":"function","name":"'


def _unescaped(text: str) -> str | None:
    """Return a text that stands in JSON; None: it can't."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return None


def _ends_in_text(body: str) -> bool:
    """Return whether the beginning of a call ends within a text of its arguments, where no mark counts."""
    head = _HEAD.match(body)
    if head is None:
        return False
    reader = _CallReader(head.end())
    reader.read(body)
    return reader.is_in_text


def _may_begin_call(text: str) -> bool:
    text = re.sub(r"\s", "", text.lstrip().removeprefix(PYTHON_TAG)[:200])
    return any(text.startswith(each) or each.startswith(text) for each in _BEGINNINGS)


class _CallReader:
    """Reads the arguments of a call, an object of JSON that begins at a place of the call's text."""

    def __init__(self, start: int) -> None:
        self._at, self._depth = start, 0
        self.is_in_text = self._is_escaped = self.is_over = False

    def read(self, body: str) -> str:
        """Return what of the object is new in a text that has grown."""
        start = self._at
        while self._at < len(body) and not self.is_over:
            letter = body[self._at]
            self._at += 1
            if self.is_in_text:
                self.is_in_text = self._is_escaped or letter != '"'
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self.is_in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                self.is_over = self._depth == 0
        return body[start : self._at]


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)

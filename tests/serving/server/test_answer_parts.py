"""Answers split into reasoning, text and calls of tools, however their texts are cut into pieces; grammars of calls."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.models import load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving.request.grammar import Grammars
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.request.token_mask import TokenMask, mask_words
from longctx.serving.server.answer_parts import AnswerFormat, AnswerReader, Part, joined_parts
from longctx.serving.server.chat_schemas import Function
from longctx.serving.server.tool_calls import (
    FORMATS,
    PARSE,
    PYTHON_TAG,
    ToolFormat,
    find_format,
    forced_grammar,
    offered_grammar,
)

Wanted = list[tuple[str, ...]]
"""(kind, text), or ("tool_call", name, arguments)."""


def wanted(parts: list[Part]) -> Wanted:
    return [
        (part.kind, part.name or "", part.text) if part.kind == "tool_call" else (part.kind, part.text)
        for part in joined_parts(parts)
    ]


def call(arguments: str, name: str = "add") -> tuple[str, ...]:
    return "tool_call", name, arguments


CASES: list[tuple[str, str, Wanted]] = [
    ("hermes", "a < b, and <tool is no call", [("text", "a < b, and <tool is no call")]),
    (
        "hermes",
        'Hi <tool_call>\n{"name": "add", "arguments": {"a": "}</x \\" {"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1]}, "name": "add"}</tool_call> bye',
        [("text", "Hi "), call('{"a": "}</x \\" {"}'), call('{"b": [1]}'), ("text", "bye")],
    ),
    ("hermes", "x <tool_call> nonsense </tool_call> y", [("text", "x <tool_call> nonsense </tool_call> y")]),
    (
        "hermes",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        [("text", '<tool_call>{"name": "other", "arguments": {}}</tool_call>')],
    ),
    ("hermes", 'x <tool_call>{"name": "add", "arguments": {"a": 1', [("text", "x "), call('{"a": 1')]),
    ("hermes", "x <tool_call>{", [("text", "x <tool_call>{")]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]',
        [call('{"a": 1}'), call('{"a": 2}')],
    ),
    (
        "mistral",
        'text [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}',
        [("text", "text "), call('{"a": 1}'), call('{"a": 2}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> \\"</tool_call>"}}</tool_call>x',
        [call('{"a": "</tool_call> \\"</tool_call>"}'), ("text", "x")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>x',
        [call('{"a": 1'), ("text", "x")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "a\\xd", "arguments": {}}</tool_call>',
        [("text", '<tool_call>{"name": "a\\xd", "arguments": {}}</tool_call>')],
    ),
    ("mistral", "[TOOL_CALLS] none", [("text", "[TOOL_CALLS] none")]),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
        [call('{"a": 1}'), call("{}")],
    ),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', [call("{}")]),
    ("llama3_json", '{"answer": 5}', [("text", '{"answer": 5}')]),
    ("llama3_json", 'It is {"name": "add"}', [("text", 'It is {"name": "add"}')]),
    ("pythonic", '[add(a=1, b="x"), add()]', [call('{"a": 1, "b": "x"}'), call("{}")]),
    ("pythonic", "[1, 2]", [("text", "[1, 2]")]),
    ("pythonic", "[add(__import__('os').system('x'))]", [("text", "[add(__import__('os').system('x'))]")]),
    ("pythonic", "[add(a=open('x'))]", [("text", "[add(a=open('x'))]")]),
]


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize(("family", "text", "parts"), CASES, ids=[f"{case[0]} {case[1][:30]}" for case in CASES])
@given(data=st.data())
@settings(max_examples=25)
def test_parts_do_not_depend_on_pieces(
    family: str, text: str, parts: Wanted, is_thinking: bool, data: st.DataObject
) -> None:
    if is_thinking:
        text, parts = f"So it is.</think>\n\n{text}", [("reasoning", "So it is."), *parts]
    reader = AnswerReader(AnswerFormat(FORMATS[family], frozenset({"add"}), is_thinking, is_thinking))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    assert wanted(found) == parts
    calls = [part for part in found if part.name is not None]
    assert reader.num_calls == len(calls)
    assert len({part.call_id for part in calls}) == len(calls)
    assert all(part.number < reader.num_calls for part in found if part.kind == "tool_call")


@given(
    st.text(alphabet='<>/tool_cal[TOOL_CALLS]{}"name:argumets,think\n \\'),
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
)
@settings(max_examples=200)
def test_nothing_is_lost_of_any_text(text: str, family: str, thinks: bool) -> None:
    """Without a call of a known tool all of an answer is text or reasoning."""
    reader = AnswerReader(AnswerFormat(FORMATS[family], frozenset(), thinks))
    found = [part for letter in text for part in reader.push(letter)] + reader.finish()
    assert reader.num_calls == 0
    given_text = "".join(part.text for part in found)
    plain = text.replace("<think>", "").replace("</think>", "") if thinks else text
    assert "".join(given_text.split()) == "".join(plain.split()) or thinks


def test_a_thought_may_come_without_tools() -> None:
    reader = AnswerReader(AnswerFormat(thinks=True))
    found = [part for letter in "\n<think>Why?\n</think>\n\nYes <think>" for part in reader.push(letter)]
    assert wanted(found + reader.finish()) == [("reasoning", "Why?\n"), ("text", "Yes <think>")]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (None, "hermes"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{"name": f, "parameters": p} <|python_tag|>', "llama3_json"),
    ],
)
def test_the_template_says_which_form_calls_have(template: str | None, family: str) -> None:
    assert find_format("auto", template).family == family
    assert find_format("pythonic", template).family == "pythonic"


TOOLS = [
    Function(
        name="add",
        parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    ),
    Function(name="now"),
]


def drawn(grammar: str, seed: int, most: int = 300) -> str:
    """A text of random tokens that the grammar allows, which ends where it may."""
    tokenizer, draw = load_tokenizer(TINY), np.random.default_rng(seed)
    stops = tuple(tokenizer.eos_ids)
    matcher = Grammars(tokenizer, tokenizer.vocab_size, stops).matcher(grammar)
    mask = TokenMask(SamplingParams(max_tokens=most, grammar=grammar), tokenizer.vocab_size, stops, matcher)
    tokens, row = list[int](), np.zeros(mask_words(tokenizer.vocab_size), np.int32)
    while not mask.is_complete and len(tokens) < most:
        mask.fill(row, len(tokens))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if set(stops) & set(allowed.tolist()):
            break
        tokens.append(int(draw.choice(allowed)))
        mask.push(tokens[-1])
    assert mask.problem is None
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_calls_that_have_to_come_are_calls(family: str, is_parallel: bool) -> None:
    form: ToolFormat = FORMATS[family]
    seen = set()
    for seed in range(12):
        text = drawn(forced_grammar(form, TOOLS, is_parallel, None), seed)
        reader = AnswerReader(AnswerFormat(form, frozenset({"add", "now"})))
        parts = joined_parts([*reader.push(text), *reader.finish()])
        assert all(part.kind == "tool_call" for part in parts), text
        assert reader.num_calls >= 1
        assert is_parallel or reader.num_calls == 1
        for part in parts:
            arguments = json.loads(part.text)
            assert isinstance(arguments, dict)
            assert (set(arguments), part.name) in [({"a"}, "add"), (set(), "now")]
            seen.add(part.name)
    assert seen == {"add", "now"}


CALL = '{"name": "add", "arguments": {"a": 5}}'
LLAMA = CALL.replace("arguments", "parameters")
WRONG = '"5"'
# Texts with no call, with one and with two, by family.
ACCEPTED = {
    "hermes": [
        "just a text",
        f"Well: <tool_call>\n{CALL}\n</tool_call>",
        *[f"<tool_call>\n{CALL}\n</tool_call> so " * 2],
    ],
    "mistral": ["a [list]", f"Well: [TOOL_CALLS][{CALL}]", f"[TOOL_CALLS] [{CALL}, {CALL}]"],
    "llama3_json": ["a {b}", f"{PYTHON_TAG}{LLAMA}", f"{LLAMA}; {LLAMA}"],
}


def accepts(grammar: str | None) -> Callable[[str], bool]:
    assert grammar is not None
    tokenizer = load_tokenizer(TINY)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)

    def accepted(text: str) -> bool:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        matcher: Any = grammars.matcher(grammar)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepted


@pytest.mark.parametrize("family", sorted(ACCEPTED))
def test_strict_tools_are_called_by_their_schemas_in_the_middle_of_a_text(family: str) -> None:
    form, strict = FORMATS[family], [TOOLS[0].model_copy(update={"strict": True}), TOOLS[1]]
    assert offered_grammar(form, TOOLS, True, None) is None
    accepted = accepts(offered_grammar(form, strict, True, None))
    none, one, two = ACCEPTED[family]
    for text in ("", none, one, two):
        assert accepted(text)
    assert not accepted(one.replace("5", WRONG))
    assert not accepted(one.replace("add", "sub"))
    assert not accepted(two.replace("5", WRONG))
    assert accepted(one.replace("add", "now").replace("5", WRONG)), "one that is not strict takes any arguments"


@pytest.mark.parametrize("family", sorted(ACCEPTED))
def test_calls_come_one_at_a_time_where_that_is_asked_for(family: str) -> None:
    accepted = accepts(offered_grammar(FORMATS[family], TOOLS, False, None))
    none, one, two = ACCEPTED[family]
    assert accepted(none)
    assert accepted(one)
    assert not accepted(two)


def test_a_call_that_is_cut_calls_nothing() -> None:
    whole = f"<tool_call>\n{CALL}\n</tool_call>"
    for text, calls in ((whole, True), (whole[:-12], True), (whole[:-16], False), ("no call", False)):
        reader = AnswerReader(AnswerFormat(FORMATS["hermes"], frozenset({"add"})))
        parts = [*reader.push(text), *reader.finish()]
        assert reader.calls_tools is calls, text
        assert all(part.kind == "tool_call" for part in parts) is (text != "no call")


def test_calls_in_pythons_form_are_held_to_nothing_in_silence() -> None:
    strict = [TOOLS[0].model_copy(update={"strict": True})]
    for tools, is_parallel, named in ((strict, True, "add: strict"), (TOOLS, False, "parallel_tool_calls: false")):
        with pytest.raises(ValueError, match=f"^tools: {named} needs tool_choice required"):
            offered_grammar(FORMATS["pythonic"], tools, is_parallel, None)


@pytest.mark.parametrize("family", sorted(PARSE))
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"name": 5}',
        "[[[]]]",
        "null",
        '[{"name": "a"}, 5]',
        "a(b=",
        "{" * 5000,
        'add{"a":' + "[" * 100_000,
    ],
)
def test_hostile_texts_are_no_calls(family: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        PARSE[family](text)  # type: ignore[index]

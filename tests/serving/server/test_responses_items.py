"""Items of `/v1/responses`: messages of a chat that are made of them, parts that become them, and the store."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from longctx.serving.server.answer_parts import Part
from longctx.serving.server.errors import ApiError
from longctx.serving.server.responses_body import (
    History,
    Item,
    ResponsesBody,
    chat_messages,
    describe,
    in_names_of_responses,
    read_items,
)
from longctx.serving.server.responses_store import ResponseStore
from longctx.serving.server.responses_writer import OutputItems

CALL = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate_json(msgspec.json.encode({"input": "hello"} | fields))


def items(*given: dict[str, Any]) -> list[Item]:
    return read_items(msgspec.json.encode(given))


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "I run it."}]}
    other = CALL | {"call_id": "c2"}
    messages = chat_messages(items({"role": "user", "content": "go"}, reasoning, answer, CALL, other, OUTPUT))
    function = {"name": "run", "arguments": '{"x": 1}'}
    assert messages == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I run it.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]


def test_answers_that_follow_each_other_are_messages_of_their_own() -> None:
    said = {"role": "assistant", "content": "a"}
    assert [m["content"] for m in chat_messages(items(said, said))] == ["a", "a"]
    after_output = chat_messages(items(CALL, OUTPUT, CALL, OUTPUT))
    assert [m["role"] for m in after_output] == ["assistant", "tool", "assistant", "tool"]
    # What is said after a call is another message: a template writes a message's calls behind its text.
    assert [m["content"] for m in chat_messages(items(CALL, said))] == [None, "a"]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        CALL,
        OUTPUT,
        OUTPUT | {"output": [{"type": "input_text", "text": "2"}]},
    ],
)
def test_items_are_shown_in_the_form_of_the_client(item: dict[str, Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    (given,) = items(item)
    shown = given.shown("item_7_0")
    assert adapter.validate_python(shown).id == "item_7_0"
    # Nothing is there that the client did not send, or its types do not have.
    assert "refusal" in str(item) or "refusal" not in str(shown)
    assert chat_messages(items(shown)) == chat_messages([given])


def test_errors_about_a_chat_have_the_names_of_responses() -> None:
    error = in_names_of_responses(ApiError(400, "response_format: it must be an object", "response_format", "c"))
    assert isinstance(error, ApiError)
    assert (error.message, error.param, error.code) == ("text.format: it must be an object", "text.format", "c")
    renamed = in_names_of_responses(ValueError("max_completion_tokens must be at least 1"))
    assert str(renamed) == "max_output_tokens must be at least 1"
    for other in (ApiError(400, "seed must be less", "seed"), TypeError("seed must be less")):
        assert in_names_of_responses(other) is other


def test_tools_and_formats_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    fields = body(
        tools=[{"type": "function", "name": "run", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "run"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "none"},
        seed=5,
        chat_template_kwargs={"enable_thinking": True},
    )
    chat = fields.to_chat(History((), None, {}), "session")
    assert chat["tools"] == [{"type": "function", "function": {"name": "run", "parameters": schema, "strict": True}}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "run"}}
    assert chat["parallel_tool_calls"] is False
    json_schema = {"name": "n", "schema": schema, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": json_schema}
    # A variable that is given has precedence.
    assert chat["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": True}
    assert (chat["seed"], chat["prompt_cache_key"]) == (5, "session")
    shown = describe(fields, {})
    assert shown["tools"] == [{"type": "function", "name": "run", "parameters": schema, "strict": True}]
    assert shown["text"]["format"] == {"type": "json_schema"} | json_schema
    assert shown["tool_choice"] == {"type": "function", "name": "run"}


PARTS = [
    Part("reasoning", "h"),
    Part("reasoning", "m"),
    Part("text", "\n"),
    Part("text", "I run"),
    Part("text", " both."),
    Part("text", "\n"),
    Part("tool_call", "", 0, "run", "c1"),
    Part("tool_call", '{"x":', 0),
    Part("tool_call", " 1}", 0),
    Part("text", "\n"),
    Part("tool_call", "{}", 1, "stop", "c2"),
]


def test_parts_become_items_in_their_order() -> None:
    made = OutputItems("resp_7")
    events = [event for part in PARTS for event in made.add(part)] + list(made.close())
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        adapter.validate_python(event | {"sequence_number": number})
    reasoning, message, first, second = made.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "\nI run both.\n"
    assert (first["name"], first["call_id"], first["arguments"]) == ("run", "c1", '{"x": 1}')
    assert (second["name"], second["call_id"], second["arguments"]) == ("stop", "c2", "{}")
    assert all(item["status"] == "completed" for item in made.items)
    assert len({item["id"] for item in made.items}) == 4
    assert made.num_reasoning_bytes == 2
    of_calls = [event["type"] for event in events if event["output_index"] == 2]
    assert of_calls == [
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    of_reasoning = [event["type"] for event in events if event["output_index"] == 0]
    assert of_reasoning == [
        "response.output_item.added",
        "response.content_part.added",
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    # The client's own type reads it, and what it sends back is a chat's message again.
    own = {"id": "resp_7", "object": "response", "created_at": 1, "model": "m", "output": made.items}
    Response.model_validate(describe(body(), own | {"temperature": 1.0, "top_p": 1.0}))
    (again,) = chat_messages(items(*made.items))
    assert (again["reasoning_content"], len(again["tool_calls"])) == ("hm", 2)


@given(st.lists(st.tuples(st.sampled_from(["reasoning", "text", "tool_call"]), st.text(max_size=3)), max_size=12))
def test_deltas_join_to_their_items(given: list[tuple[Any, str]]) -> None:
    made, number, parts = OutputItems("resp_1"), -1, []
    for kind, text in given:
        number += kind == "tool_call"
        named = ("f", f"c{number}") if kind == "tool_call" else (None, None)
        parts.append(Part(kind, text, max(number, 0), *named))
    events = [event for part in parts for event in made.add(part)] + list(made.close())
    for index, item in enumerate(made.items):
        deltas = [e["delta"] for e in events if e["output_index"] == index and e["type"].endswith(".delta")]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text
    for kind in ("reasoning", "tool_call"):
        of_kind = [item for item in made.items if item["type"] == {"tool_call": "function_call"}.get(kind, kind)]
        shown = "".join(item["arguments"] if kind == "tool_call" else item["content"][0]["text"] for item in of_kind)
        assert shown == "".join(part.text for part in parts if part.kind == kind)


def stored(store: ResponseStore, name: str, previous: str | None = None, tenant: str = "", text: str = "hi") -> None:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    fields = body(input=text, previous_response_id=previous)
    store.add(tenant, fields, {"id": name, "output": output}, "session")


def test_a_conversation_outlives_the_responses_before_its_last() -> None:
    store = ResponseStore()
    stored(store, "a", text="1")
    stored(store, "b", "a", text="2")
    alone = store.num_bytes
    stored(store, "c", "a", text="3")
    store.delete("", "c")
    assert store.num_bytes == alone
    store.delete("", "a")
    history = store.history("", "b")
    assert [message["content"] for turn in history.turns for message in chat_messages(read_items(turn))] == [
        *("1", "1", "2", "2")
    ]
    assert history.session == "session"
    store.delete("", "b")
    assert (store.num_bytes, store.num_responses) == (0, 0)


def test_the_response_used_longest_ago_gives_way() -> None:
    store = ResponseStore(max_responses=2)
    for name in ("a", "b"):
        stored(store, name)
    store.get("", "a")
    stored(store, "c")
    with pytest.raises(ApiError, match="'b'"):
        store.get("", "b")
    store.get("", "a")


def test_the_tenant_with_the_most_bytes_gives_way() -> None:
    store = ResponseStore(max_bytes=10_000)
    stored(store, "small", tenant="ann")
    for number in range(20):
        stored(store, f"large-{number}", tenant="bob", text="x" * 1000)
    assert store.num_bytes <= 10_000
    store.get("ann", "small")
    store.get("bob", "large-19")
    with pytest.raises(ApiError):
        store.get("bob", "large-0")


def test_a_response_expires_after_its_last_use() -> None:
    now = [0.0]
    store = ResponseStore(life=10, clock=lambda: now[0])
    stored(store, "a")
    stored(store, "b")
    now[0] = 6.0
    store.get("", "a")
    now[0] = 12.0
    store.get("", "a")
    with pytest.raises(ApiError, match="expired"):
        store.get("", "b")
    now[0] = 30.0
    with pytest.raises(ApiError):
        store.get("", "a")
    assert store.num_bytes == 0


def test_a_response_whose_beginning_was_deleted_meanwhile_is_not_kept() -> None:
    store = ResponseStore()
    stored(store, "b", "a")
    assert store.num_responses == 0

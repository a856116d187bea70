"""Tools, JSON, `/v1/responses` and `/v1/messages` by official clients, against the built-in model.

Its texts mean nothing; their forms are those that grammars and APIs ask for.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest
from served import Served, served

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.models.chat_template import ChatTemplate
from longctx.serving import Engine, EngineConfig
from longctx.serving.server.settings import ApiKey, ServerSettings

CONFIG = EngineConfig(
    max_length=2048, num_pages=400, page_size=16, max_running=6, token_budget=64, buckets=(64,), hash_key=bytes(16)
)
TEMPLATE = ChatTemplate(
    Path("agents.jinja"),
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments.city }}{% endfor %}"
    "{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>\n{% endif %}{% endif %}",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": SCHEMA}}
ASKED: Any = [{"role": "user", "content": "Weather in Rome?"}]
KEYS = (ApiKey("ann", "the-key-of-ann"), ApiKey("bob", "the-key-of-bob"))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    model, params = load_checkpoint(TINY)
    engine = Engine(model, params, CONFIG, tokenizer=load_tokenizer(TINY))
    settings = ServerSettings(prepare_processes=0, api_keys=KEYS)
    with served(engine, settings, names=("tiny",), chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture
def ours(tiny: Served) -> openai.OpenAI:
    return tiny.openai(KEYS[0].key)


@pytest.fixture
def theirs(tiny: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny.url, api_key=KEYS[0].key, max_retries=0) as client:
        yield client


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=99)


def check_call(name: str | None, arguments: str) -> None:
    assert name == "weather"
    assert set(json.loads(arguments)) == {"city"}


# Chats.


def test_a_chat_is_parsed(ours: openai.OpenAI) -> None:
    answer = ours.chat.completions.parse(model="tiny", messages=ASKED, response_format=Person, max_tokens=120, n=2)
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
    plain = ours.chat.completions.create(
        model="tiny", messages=ASKED, response_format={"type": "json_object"}, max_tokens=300, temperature=0
    )
    assert plain.choices[0].finish_reason == "length" or json.loads(plain.choices[0].message.content or "") is not None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called(ours: openai.OpenAI, choice: Any) -> None:
    sent: Any = {"model": "tiny", "messages": ASKED, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    sent |= {"parallel_tool_calls": False, "temperature": 0, "logprobs": True}
    whole = ours.chat.completions.create(**sent)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    [call] = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)
    arguments, names, logprobs = "", [], 0
    for chunk in ours.chat.completions.create(**sent, stream=True):
        assert not chunk.choices[0].delta.content
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.index == 0
            assert piece.function is not None
            names += [piece.function.name] if piece.function.name else []
            arguments += piece.function.arguments or ""
        logprobs += len((chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ())
    assert (names, arguments) == (["weather"], call.function.arguments)
    assert whole.usage is not None
    assert logprobs == whole.usage.completion_tokens


def test_a_history_with_calls_and_thoughts_is_rendered(tiny: Served) -> None:
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    with tiny.http_client(headers={"authorization": f"Bearer {KEYS[0].key}"}) as client:
        body = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
        text = client.post("/v1/chat/completions/render", json=body).json()["prompt"]
        assert '"name": "weather"' in text
        assert "assistant: <think>Hm.</think>weather=Rome\ntool: sunny\nassistant: <think>" in text
        body = {"messages": [*ASKED, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
        assert client.post("/v1/chat/completions/render", json=body).json()["prompt"].endswith("assistant: It is")


def test_a_thought_is_apart(ours: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ours.chat.completions.create(model="tiny", messages=ASKED, max_tokens=12, temperature=0, extra_body=extra)
    message: Any = answer.choices[0].message
    assert message.reasoning_content
    assert not message.content  # it has not ended its thought
    grammar = {"guided_regex": "so it is</think>\n\nyes", **extra}
    answer = ours.chat.completions.create(model="tiny", messages=ASKED, max_tokens=40, extra_body=grammar)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("so it is", "yes")


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (
            {"guided_choice": ["yes", "no"]},
            (
                "yes",
                "no",
            ),
        ),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            (
                "yes",
                "no",
            ),
        ),
        ({"guided_regex": "ab{2}"}, ("abb",)),
        ({"regex": "ab{2}"}, ("abb",)),
        (
            {"guided_grammar": 'root ::= "x" | "y"'},
            (
                "x",
                "y",
            ),
        ),
        (
            {"grammar": 'root ::= "x" | "y"'},
            (
                "x",
                "y",
            ),
        ),
        (
            {"ebnf": 'root ::= "x" | "y"'},
            (
                "x",
                "y",
            ),
        ),
        ({"grammar": {"type": "regex", "value": "ab{2}"}}, ("abb",)),
        ({"grammar": {"type": "json", "value": {"const": 5}}}, ("5",)),
        ({"json_schema": {"const": 5}}, ("5",)),
        ({"json_schema": '{"const": 5}'}, ("5",)),
        ({"guided_json": {"const": 5}}, ("5",)),
        ({"response_format": {"type": "json_object", "schema": {"const": 5}}}, ("5",)),
        ({"stop": ["b"], "include_stop_str_in_output": True, "guided_regex": "abc"}, ("ab",)),
        ({"n_predict": 2, "guided_regex": "abc"}, ("ab",)),
    ],
    ids=str,
)
def test_forms_of_texts_under_all_names(ours: openai.OpenAI, fields: dict[str, Any], texts: tuple[str, ...]) -> None:
    extra = {"max_tokens": None, **fields} if "n_predict" in fields else fields
    answer = ours.completions.create(model="tiny", prompt="So", max_tokens=20, extra_body=extra)
    assert answer.choices[0].text in texts


def test_a_keyword_that_can_t_be_enforced_is_named_unless_strict_is_false(ours: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"const": 5}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=r"response_format.*uniqueItems"):
        ours.chat.completions.create(model="tiny", messages=ASKED, response_format=form)
    form["json_schema"]["strict"] = False
    answer = ours.chat.completions.create(model="tiny", messages=ASKED, response_format=form, max_tokens=100)
    assert json.loads(answer.choices[0].message.content or "") in ([5], [5, 5])


def test_unknown_fields_are_named(ours: openai.OpenAI) -> None:
    extra = {"made_up": 1, "x" * 100: 2, "cache_prompt": True, "typical_p": 1.0}
    raw = ours.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1, extra_body=extra)
    assert raw.headers["x-longctx-ignored-fields"] == f"made_up, {'x' * 60}"
    raw = ours.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
    assert "x-longctx-ignored-fields" not in raw.headers


def test_tools_and_variables_count_for_a_chat_that_is_tokenized(tiny: Served) -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]}
    with tiny.http_client(headers={"authorization": f"Bearer {KEYS[0].key}"}) as client:
        counts = [client.post("/tokenize", json=each).json()["count"] for each in ({**chat, "tools": []}, chat)]
        usage = client.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()["usage"]
    assert counts[0] < counts[1] == usage["prompt_tokens"]


# Responses.


def test_responses_go_on_after_each_other(ours: openai.OpenAI, tiny: Served) -> None:
    first = ours.responses.create(model="tiny", input="One " * 40, instructions="Be short.", max_output_tokens=16)
    assert first.status in ("incomplete", "completed")
    assert first.instructions == "Be short."
    second = ours.responses.create(
        model="tiny", input="Two", instructions="Be short.", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= 160 // 16 * 16
    assert second.previous_response_id == first.id
    again = ours.responses.retrieve(second.id)
    assert again.output_text == second.output_text
    item = ours.responses.input_items.list(second.id).data[0]
    assert item.type == "message"
    bob = tiny.openai(KEYS[1].key)
    for ask in (bob.responses.retrieve, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(second.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        bob.responses.create(model="tiny", input="x", previous_response_id=second.id)
    ours.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        ours.responses.retrieve(second.id)
    unkept = ours.responses.create(model="tiny", input="x", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        ours.responses.retrieve(unkept.id)


FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


def test_responses_call_tools(ours: openai.OpenAI) -> None:
    sent: Any = {"model": "tiny", "input": "Weather?", "tools": [FUNCTION], "tool_choice": "required"}
    sent |= {"parallel_tool_calls": False, "temperature": 0, "max_output_tokens": 200}
    whole = ours.responses.create(**sent)
    [call] = whole.output
    assert call.type == "function_call"
    check_call(call.name, call.arguments)
    with ours.responses.stream(**sent) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [streamed] = final.output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    after = ours.responses.create(
        model="tiny", input=result, previous_response_id=whole.id, tools=[FUNCTION], max_output_tokens=4
    )
    assert after.output_text


def test_responses_are_parsed_and_streamed(ours: openai.OpenAI) -> None:
    parsed = ours.responses.parse(model="tiny", input="x", text_format=Person, max_output_tokens=120)
    assert isinstance(parsed.output_parsed, Person)
    sent: Any = {"model": "tiny", "input": "x", "temperature": 0, "max_output_tokens": 60}
    sent["text"] = {
        "format": {"type": "json_schema", "name": "n", "schema": {"enum": ["some text", "some other text"]}}
    }
    whole = ours.responses.create(**sent)
    with ours.responses.stream(**sent) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "nonsense"}}}, "text"),
    ],
    ids=str,
)
def test_responses_refuse_by_name(ours: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ours.responses.create(**{"model": "tiny", "input": "x"} | fields)
    assert caught.value.param == param


# Messages.


def message(client: anthropic.Anthropic, **fields: Any) -> Any:
    given: Any = {"model": "tiny", "max_tokens": 200, "messages": ASKED, "extra_body": {"temperature": 0}}
    return client.messages.create(**given | fields)


def test_messages_are_answered(theirs: anthropic.Anthropic) -> None:
    answer = message(theirs, max_tokens=8, system=[{"type": "text", "text": "Be short."}])
    assert answer.content[0].type == "text"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 8)
    text = "The grass is green. " * 12
    marked: Any = [
        {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}
    ]
    first = message(theirs, messages=marked, max_tokens=4)
    second = message(theirs, messages=marked, max_tokens=4)
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens > 100
    total = theirs.messages.count_tokens(model="tiny", messages=marked).input_tokens
    for usage in (first.usage, second.usage):
        assert usage.cache_creation_input_tokens is not None
        assert usage.cache_read_input_tokens is not None
        assert total == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert (first.usage.input_tokens, first.usage.cache_creation_input_tokens) == (0, total)


def test_messages_say_which_text_has_stopped_them(theirs: anthropic.Anthropic) -> None:
    whole = message(theirs, max_tokens=30).content[0].text
    stop = whole[8:10]
    answer = message(theirs, max_tokens=30, stop_sequences=["never there", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == whole[: whole.index(stop)]
    sent: Any = {"model": "tiny", "max_tokens": 30, "messages": ASKED, "stop_sequences": [stop]}
    with theirs.messages.stream(**sent, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
        assert stream.get_final_message().stop_sequence == stop


def test_messages_go_on_with_the_last_answer(tiny: Served, theirs: anthropic.Anthropic) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    body = {"messages": begun, "continue_final_message": True, "max_tokens": 8, "temperature": 0}
    with tiny.http_client(headers={"authorization": f"Bearer {KEYS[0].key}"}) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    told = message(theirs, messages=begun, max_tokens=8)
    assert told.content[0].text == answer["choices"][0]["message"]["content"]
    count = theirs.messages.count_tokens(model="tiny", messages=begun).input_tokens
    assert count == answer["usage"]["prompt_tokens"]


def test_messages_use_tools(theirs: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "weather", "description": "Weather.", "input_schema": SCHEMA}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = message(theirs, tools=tools, tool_choice=choice)
    [block] = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city"}
    sent: Any = {"model": "tiny", "max_tokens": 200, "messages": ASKED, "tools": tools, "tool_choice": choice}
    with theirs.messages.stream(**sent, extra_body={"temperature": 0}) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use"
    assert final.content[0].input == block.input
    result = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]
    turns = [*ASKED, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": result}]
    assert message(theirs, messages=turns, tools=tools, tool_choice={"type": "none"}, max_tokens=4).content


def test_messages_think(theirs: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = message(theirs, thinking=thinking, max_tokens=8)
    assert answer.content[0].type == "thinking"
    sent: Any = {"model": "tiny", "max_tokens": 8, "messages": ASKED, "thinking": thinking}
    with theirs.messages.stream(**sent, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_message().content[0].type == "thinking"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
            "role assistant",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tool runs on this server"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice must have a name"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences.1: "),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not there"),
    ],
    ids=str,
)
def test_messages_refuse_in_their_form(theirs: anthropic.Anthropic, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(theirs, **fields)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert text in body["error"]["message"]


def test_a_wrong_key_and_an_unknown_model_are_told_in_their_form(tiny: Served, theirs: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        message(theirs, model="other")
    wrong = httpx.post(f"{tiny.url}/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


def test_an_agents_turns_are_found_in_the_cache(theirs: anthropic.Anthropic) -> None:
    """A log of a coding agent: each turn repeats all before it, and its tools; all but the last page is cached."""
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    turns: list[Any] = [{"role": "user", "content": "List the files of the project, and read the first one."}]
    before = 0
    for turn in range(6):
        answer = message(theirs, messages=turns, tools=tools, max_tokens=24, tool_choice={"type": "auto"})
        usage = answer.usage
        total = usage.input_tokens + usage.cache_read_input_tokens
        assert usage.cache_read_input_tokens >= before // 16 * 16
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "weather", "input": {"city": f"file-{turn}"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"line {turn} " * 10}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        before = total - len("assistant: ")  # the template's end, which the next turn does not begin with

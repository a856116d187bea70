"""`/v1/chat/completions` with the official client: what differs from `/v1/completions`."""

from pathlib import Path
from typing import Any

import openai
import pytest
from fake_device import expected_tokens
from letter_tokenizer import LetterTokenizer
from served import NAME, Served, fake_engine, served

from longctx.models.chat_template import ChatTemplate
from longctx.serving import SamplingParams

TEXT = LetterTokenizer()
MESSAGES: list[Any] = [{"role": "user", "content": "ABC"}]
# Without a chat template a chat is written as questions and answers.
IDS = TEXT.encode("\nQ: ABC\nA: ")


def greedy(count: int = 6, prompt: list[int] = IDS, n: int = 1) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=count, ignore_eos=True))


def ask(letters: Served, messages: list[Any] = MESSAGES, **options: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True} | options.pop("extra_body", {})
    options = {"temperature": 0, "max_completion_tokens": 6} | options
    return letters.openai().chat.completions.create(model=NAME, messages=messages, extra_body=extra, **options)


def test_an_answer_is_a_message(letters: Served) -> None:
    answer = ask(letters)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT.decode(greedy()))
    assert choice.token_ids == greedy()
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_deltas_joins_to_the_answer(letters: Served, n: int) -> None:
    chunks = list(ask(letters, n=n, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6 * n
    for index in range(n):
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == TEXT.decode(greedy())
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_client_s_own_stream_helper_understands_it(letters: Served) -> None:
    stop = TEXT.decode(greedy())[4]
    options: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 6, "stop": stop}
    with letters.openai().chat.completions.stream(**options, extra_body={"ignore_eos": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT.decode(greedy()).partition(stop)[0]


def test_content_may_be_parts_of_text(letters: Served) -> None:
    parts = [{"type": "text", "text": "AB"}, {"type": "text", "text": "CD"}]
    (choice,) = ask(letters, [{"role": "user", "content": parts}]).choices
    assert choice.token_ids == greedy(prompt=TEXT.encode("\nQ: AB\nCD\nA: "))


def test_all_turns_are_read(letters: Served) -> None:
    turns = [("system", "11"), ("user", "22"), ("assistant", "33"), ("user", "44")]
    (choice,) = ask(letters, [{"role": role, "content": content} for role, content in turns]).choices
    assert choice.token_ids == greedy(prompt=TEXT.encode("11\nQ: 22\nA: 33\nQ: 44\nA: "))


def test_without_max_tokens_an_answer_has_the_room_that_there_is(letters: Served) -> None:
    answer = ask(letters, max_completion_tokens=None)
    assert answer.usage.total_tokens == letters.server.engine.max_length
    assert ask(letters, max_completion_tokens=None, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_bytes_of_each_token(letters: Served, stream: bool) -> None:
    answer = ask(letters, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [x for chunk in answer for c in chunk.choices if c.logprobs for x in c.logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == TEXT.decode(greedy())
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    plain = ask(letters, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)


def test_no_logprobs_unless_asked_for(letters: Served) -> None:
    assert ask(letters).choices[0].logprobs is None


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 6}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": None, "max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3}, None),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ],
)
def test_what_is_not_there_is_refused_by_name(letters: Served, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(letters, **options)
    assert caught.value.param == param
    assert (param or "") in caught.value.message


def test_empty_tools_and_a_plain_format_are_nothing(letters: Served) -> None:
    answer = ask(letters, tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"])
    assert answer.choices[0].token_ids == greedy()


def test_a_chat_template_renders_messages_and_its_variables() -> None:
    template = ChatTemplate(
        Path("t.jinja"),
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ extra }}"
        "{% if add_generation_prompt %}!{% endif %}"
        "{% if messages[0].content == 'X' %}{{ raise_exception('no X') }}{% endif %}",
    )
    with served(fake_engine(), chat_template=template) as running:
        messages = [{"role": "developer", "content": "AB"}, {"role": "user", "content": "CD"}]
        variables = {"chat_template_kwargs": {"extra": "99"}}
        (choice,) = ask(running, messages, extra_body=variables).choices
        assert choice.token_ids == greedy(prompt=TEXT.encode("sABuCD99!"))
        with pytest.raises(openai.BadRequestError, match="no X"):
            ask(running, [{"role": "user", "content": "X"}])
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            ask(running, extra_body={"chat_template_kwargs": {"messages": []}})
        with running.http_client() as client:
            body = {"messages": messages, "add_generation_prompt": False}
            assert client.post("/tokenize", json=body).json()["tokens"] == TEXT.encode("sABuCD")
            rendered = client.post("/v1/chat/completions/render", json={"messages": messages} | variables).json()
            assert rendered["token_ids"] == TEXT.encode("sABuCD99!")
            assert rendered["sampling_params"]["temperature"] == 1.0

"""`/v1/responses` with the official client: items, streams, stored conversations, and what is refused."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_device import expected_tokens
from letter_tokenizer import LetterTokenizer
from served import NAME, Served, fake_engine, served

from longctx.serving import SamplingParams
from longctx.serving.server.settings import ApiKey, ServerSettings

TEXT = LetterTokenizer()
FIELDS: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 6}
EXTRA: dict[str, Any] = {"ignore_eos": True}


def ask(letters: Served, input: Any = "ABC", **options: Any) -> Any:
    extra = EXTRA | options.pop("extra_body", {})
    return letters.openai().responses.create(input=input, extra_body=extra, **(FIELDS | options))


def answer_to(chat: str, count: int = 6) -> str:
    """The answer to a chat as it is written without a template."""
    return TEXT.decode(expected_tokens(TEXT.encode(chat), SamplingParams(max_tokens=count, ignore_eos=True)))


def test_a_response_has_a_message(letters: Served) -> None:
    answer = ask(letters, metadata={"run": "7"}, user="me", instructions="11")
    assert answer.output_text == answer_to("11\nQ: ABC\nA: ")
    assert (answer.object, answer.model, answer.metadata, answer.user) == ("response", NAME, {"run": "7"}, "me")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.temperature, answer.tools, answer.tool_choice) == ("11", 0, [], "auto")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(TEXT.encode("11\nQ: ABC\nA: ")), 6)
    assert usage.total_tokens == usage.input_tokens + 6
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_stop_text_completes_a_response(letters: Served) -> None:
    stop = answer_to("\nQ: ABC\nA: ")[4]
    answer = ask(letters, extra_body={"stop": stop})
    assert answer.output_text == answer_to("\nQ: ABC\nA: ").partition(stop)[0]
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.completed_at >= answer.created_at


def test_items_are_the_messages_of_a_chat(letters: Served) -> None:
    items = [
        {"role": "developer", "content": "11"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "22"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "55"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "33", "annotations": []}]},
        {"role": "user", "content": "44"},
    ]
    assert ask(letters, items).output_text == answer_to("11\nQ: 22\nA: 33\nQ: 44\nA: ")


def test_a_stream_has_the_events_of_the_official_client(letters: Served) -> None:
    whole = answer_to("\nQ: ABC\nA: ")
    stop = whole[4]
    events = list(ask(letters, stream=True, extra_body={"stop": stop}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = whole.partition(stop)[0]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    final = events[-1].response
    assert (final.output_text, final.id, final.status) == (text, events[0].response.id, "completed")
    assert events[-2].item == final.output[0]
    assert letters.openai().responses.retrieve(final.id) == final


def test_the_client_s_stream_helper_accumulates_it(letters: Served) -> None:
    stop = answer_to("\nQ: ABC\nA: ")[4]
    client = letters.openai()
    with client.responses.stream(input="ABC", extra_body=EXTRA | {"stop": stop}, **FIELDS) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == answer_to("\nQ: ABC\nA: ").partition(stop)[0]
    with client.responses.stream(input="ABC", extra_body=EXTRA, **FIELDS) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_the_raw_stream_names_its_events_and_ends_with_the_last(letters: Served) -> None:
    with letters.http_client() as client:
        body = {"input": "ABC", "stream": True, **FIELDS, **EXTRA}
        lines = client.post("/v1/responses", json=body).text.strip().split("\n\n")
    assert lines[0].startswith("event: response.created\ndata: {")
    assert lines[-1].startswith("event: response.incomplete\ndata: {")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_all_tokens(letters: Served, stream: bool) -> None:
    answer = ask(letters, include=["message.output_text.logprobs"], top_logprobs=2, stream=stream)
    if stream:
        events = list(answer)
        deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        answer = events[-1].response
        assert "".join(entry.token for entry in deltas) == answer.output_text
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert ask(letters).output[0].content[0].logprobs == []


def test_a_response_is_continued_by_its_id(letters: Served) -> None:
    client = letters.openai()
    first = ask(letters, "22", instructions="11")
    second = ask(letters, "44", previous_response_id=first.id)
    # Instructions are of one response alone.
    chat = f"\nQ: 22\nA: {first.output_text}\nQ: 44\nA: "
    assert second.output_text == answer_to(chat)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(letters, "55", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
    # A later turn does not need the response before it, but its items.
    third = ask(letters, "66", previous_response_id=second.id)
    assert third.output_text == answer_to(f"{chat}{second.output_text}\nQ: 66\nA: ")
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["22", first.output_text, "44", second.output_text, "66"]
    assert len({item.id for item in items}) == 5
    newest = client.responses.input_items.list(third.id, limit=1)
    assert (newest.data[0].content[0].text, newest.has_more) == ("66", True)


def test_input_may_refer_to_items_that_are_kept(letters: Served) -> None:
    """As Vercel's AI SDK sends what it was answered."""
    first = ask(letters, "22", extra_headers={"x-request-id": "my_own/id?"})
    assert letters.openai().responses.retrieve(first.id) == first
    (own,) = letters.openai().responses.input_items.list(first.id)
    references = [{"type": "item_reference", "id": item.id} for item in (own, first.output[0])]
    second = ask(letters, [*references, {"role": "user", "content": "44"}])
    chat = f"\nQ: 22\nA: {first.output_text}\nQ: 44\nA: "
    assert second.output_text == answer_to(chat)
    # The item itself is kept with the second response.
    letters.openai().responses.delete(first.id)
    third = ask(letters, "66", previous_response_id=second.id)
    assert third.output_text == answer_to(f"{chat}{second.output_text}\nQ: 66\nA: ")


def test_what_is_not_stored_is_not_found(letters: Served) -> None:
    answer = ask(letters, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        letters.openai().responses.retrieve(answer.id)


def test_metrics_count_what_is_kept(letters: Served) -> None:
    def kept() -> dict[str, float]:
        with letters.http_client() as client:
            lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("longctx:stored_response")]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in found}

    store, answer = letters.server.responses, ask(letters)
    shown = ("longctx:stored_responses", "longctx:stored_response_bytes")
    for is_deleted in (False, True):
        if is_deleted:
            letters.openai().responses.delete(answer.id)
        expected = dict(zip(shown, map(float, (store.num_responses, store.num_bytes)), strict=True))
        # Metrics are written anew once a second.
        letters.wait_until("the metrics are those of the store", lambda expected=expected: kept() == expected)


def test_input_tokens_are_counted_without_an_answer(letters: Served) -> None:
    first = ask(letters, "22")
    counted = letters.openai().responses.input_tokens.count(model=NAME, input="44", previous_response_id=first.id)
    assert counted.input_tokens == len(TEXT.encode(f"\nQ: 22\nA: {first.output_text}\nQ: 44\nA: "))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, None),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": "A" * 100_000}, "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"model": "another"}, "model"),
        ({"extra_body": {"max_tokens": 3}}, None),
        ({"extra_body": {"n": 2}}, None),
        ({"extra_body": {"return_token_ids": True}}, None),
        ({"extra_body": {"seed": "x"}}, "seed"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ],
)
def test_what_is_not_there_is_refused_by_name(letters: Served, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        ask(letters, **options)
    assert caught.value.param == param
    assert (param or next(iter(options.get("extra_body", options)))) in caught.value.message


def test_a_response_cannot_be_cancelled_once_it_is_there(letters: Served) -> None:
    client, answer = letters.openai(), ask(letters)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client.responses.retrieve(answer.id, stream=True))


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/images/generations", "/v1/files", "/v1/assistants"])
def test_a_path_that_is_not_there_says_what_is(letters: Served, path: str) -> None:
    with letters.http_client() as client:
        answer = client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert path in error["message"]
    assert "/v1/responses" in error["message"]
    assert error["code"] == "unknown_url"


def test_fields_that_no_api_has_are_named_in_a_header(letters: Served) -> None:
    with letters.http_client() as client:
        answer = client.post("/v1/responses", json={"input": "ABC", "foo": 1, "seed": 2, **FIELDS, **EXTRA})
    assert answer.status_code == 200
    assert answer.headers["x-longctx-ignored-fields"] == "foo"


def test_a_method_that_a_path_does_not_take_is_named(letters: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="/v1/responses/compact takes no POST") as caught:
        letters.openai().responses.compact(model=NAME, input="ABC")
    assert caught.value.status_code == 405


def test_a_response_that_is_aborted_is_cancelled() -> None:
    with served(fake_engine()) as running:
        running.executor.pause = 0.05
        stream = ask(running, stream=True, max_output_tokens=100)
        first = next(iter(stream))
        with running.http_client() as client:
            client.post("/abort_requests", json={"request_ids": [first.response.id]}).raise_for_status()
        last = list(stream)[-1]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")
        assert last.response.output[0].status == "incomplete"


@pytest.fixture(scope="module")
def tenants() -> Iterator[Served]:
    keys = tuple(ApiKey(name, f"secret-of-{name}") for name in ("ann", "bob"))
    with served(fake_engine(), ServerSettings(prepare_processes=0, api_keys=keys)) as running:
        yield running


def test_a_tenant_has_no_access_to_the_responses_of_another(tenants: Served) -> None:
    ann, bob = (tenants.openai(f"secret-of-{name}") for name in ("ann", "bob"))
    made = ann.responses.create(input="ABC", extra_body=EXTRA, **FIELDS)
    assert ann.responses.retrieve(made.id).output_text == made.output_text
    for attempt in (
        lambda: bob.responses.retrieve(made.id),
        lambda: bob.responses.delete(made.id),
        lambda: bob.responses.input_items.list(made.id),
        lambda: bob.responses.create(
            input=[{"type": "item_reference", "id": made.output[0].id}], extra_body=EXTRA, **FIELDS
        ),
        lambda: bob.responses.create(input="D", previous_response_id=made.id, extra_body=EXTRA, **FIELDS),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()


def test_an_engine_that_fails_ends_a_stream_with_its_error() -> None:
    with served(fake_engine()) as running:
        running.executor.fail = True
        events = list(ask(running, stream=True))
        assert [event.type for event in events][-2:] == ["error", "response.failed"]
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.status == "failed"
        running.executor.fail = False

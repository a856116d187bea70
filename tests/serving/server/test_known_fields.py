"""Fields that other servers have: none is without an effect and without a word."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import NAME, Served

from longctx.serving.server.chat_schemas import CacheBody, ChatBody, TokenizeBody
from longctx.serving.server.errors import ApiError
from longctx.serving.server.known_fields import PASSED_OVER, REFUSED, Refused
from longctx.serving.server.schemas import CompletionBody, OpenBody

BODIES: list[tuple[type[OpenBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "x"}),
    (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
    (TokenizeBody, {"prompt": "x"}),
    (CacheBody, {"prompt": "x"}),
]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(), st.integers(-3, 3), st.floats(-3, 3), st.sampled_from(["auto", "none", "x"]), st.just([1])
)
EMPTY: st.SearchStrategy[Any] = st.sampled_from([None, "", [], {}])
# Of TGI, SGLang, llama.cpp and vLLM: each changes the text or the form of an answer of its own server.
CHANGING = [
    {"do_sample": False},
    {"repeat_last_n": 64},
    {"penalize_nl": False},
    {"min_keep": 5},
    {"thinking_forced_open": True},
    {"return_full_text": True},
    {"return_logprob": True},
    {"details": True},
    {"return_tokens_as_token_ids": True},
    {"post_sampling_probs": True},
    {"include_reasoning": False},
    {"separate_reasoning": False},
    {"inputs": "x"},
    {"max_new_tokens": 5},
    {"sampling_params": {"temperature": 0}},
]


def changes(refused: Refused, value: Any) -> bool:
    same_kind = [each for each in refused.neutral if isinstance(each, bool) == isinstance(value, bool)]
    return value not in same_kind and not (value is False and not refused.neutral)


@given(st.sampled_from(BODIES), st.sampled_from(sorted(REFUSED)), VALUES, EMPTY)
def test_what_would_change_the_answer_is_refused(
    body: tuple[type[OpenBody], dict[str, Any]], name: str, value: Any, empty: Any
) -> None:
    model, fields = body
    if name in model.model_fields:
        return
    assert not model.model_validate(fields | {name: empty}).ignored
    if changes(REFUSED[name], value):
        with pytest.raises(ApiError, match=f"^{name} is not there: ") as caught:
            model.model_validate(fields | {name: value})
        assert caught.value.param == name
    else:
        assert not model.model_validate(fields | {name: value}).ignored


@given(st.sampled_from(BODIES), st.text(min_size=1), VALUES)
def test_what_nobody_knows_is_named(body: tuple[type[OpenBody], dict[str, Any]], name: str, value: Any) -> None:
    model, fields = body
    if name not in model.model_fields and name not in REFUSED:
        named = model.model_validate(fields | {name: value}).ignored
        assert named == (() if name in PASSED_OVER else (name,))


@pytest.mark.parametrize("fields", CHANGING, ids=str)
@pytest.mark.parametrize("kind", ["completions", "chat/completions", "responses"])
def test_settings_of_other_servers_get_no_unaffected_answer(letters: Served, kind: str, fields: dict[str, Any]) -> None:
    prompts = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}
    prompt: Any = [{"role": "user", "content": "x"}] if kind.startswith("chat") else "x"
    with letters.http_client() as client:
        answer = client.post(f"/v1/{kind}", json={prompts[kind]: prompt} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    "path",
    [
        *("completions", "completions/render", "chat/completions", "chat/completions/render"),
        *("responses", "embeddings", "messages", "messages/count_tokens"),
    ],
)
def test_every_answer_names_fields_that_nobody_knows(letters: Served, path: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    chat = {"model": NAME, "messages": messages, "max_tokens": 2}
    body = {"completions": {"prompt": "x"}, "responses": {"input": "x"}, "embeddings": {"input": "x"}}
    fields = body.get(path.removesuffix("/render"), chat if "count" not in path else {**chat, "max_tokens": None})
    with letters.http_client() as client:
        answer = client.post(f"/v1/{path}", json=fields | {"input_type": "query"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-longctx-ignored-fields"] == "input_type"


def test_tokenize_names_fields_that_nobody_knows(letters: Served) -> None:
    with letters.http_client() as client:
        answer = client.post("/tokenize", json={"prompt": "x", "with_pieces": True})
    assert answer.headers["x-longctx-ignored-fields"] == "with_pieces"


@pytest.mark.parametrize(
    "option", [{"whitespace_pattern": " "}, {"disable_any_whitespace": True}, {"disable_additional_properties": True}]
)
def test_options_of_structured_outputs_are_refused_by_name(letters: Served, option: dict[str, Any]) -> None:
    with letters.http_client() as client:
        body = {"prompt": "x", "structured_outputs": {"json": {"type": "object"}, **option}}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"structured_outputs.{next(iter(option))}: ")

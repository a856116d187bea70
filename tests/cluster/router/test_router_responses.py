"""Responses through a cluster's router, which keeps them: conversations are answered as one engine answers chats."""

from typing import Any

import openai
import pytest
from disaggregated import NAME, post
from routed import TEXT, Routed, members_of, routed
from served import Served


@pytest.fixture(scope="module")
def router(three: list[Served]) -> Any:
    with routed(members_of(three, "pdd")) as running:
        yield running


def chat(server: Served, messages: list[dict[str, str]]) -> str:
    sent = {"messages": messages, "temperature": 0, "max_tokens": 8, "cache_salt": "alone"}
    answer: str = post(server, sent, path="chat/completions").json()["choices"][0]["message"]["content"]
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_that_of_one_engine(router: Routed, three: list[Served], stream: bool) -> None:
    client = router.openai()
    messages: list[dict[str, str]] = []
    previous: Any = None
    for question in (f"{stream} {TEXT * 4}", "What is the pass key of lemon?", "And what crossed the field?"):
        messages.append({"role": "user", "content": question})
        answer: Any = client.responses.create(
            model=NAME,
            input=question,
            temperature=0,
            max_output_tokens=8,
            stream=stream,
            previous_response_id=None if previous is None else previous.id,
        )
        if stream:
            answer = list(answer)[-1].response
        if previous is not None:
            assert answer.usage.input_tokens_details.cached_tokens > 0
        previous = answer
        assert previous.output_text == chat(three[0], messages)
        messages.append({"role": "assistant", "content": previous.output_text})
    items = list(client.responses.input_items.list(previous.id, order="asc"))
    assert [item.content[0].text for item in items] == [message["content"] for message in messages[:-1]]
    client.responses.delete(previous.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(previous.id)
    router.wait_idle()

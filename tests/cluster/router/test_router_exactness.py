"""A cluster answers as one engine does."""

from typing import Any

import pytest
from disaggregated import body, post
from routed import TEXT, Routed, members_of, routed
from served import Served

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": 2},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {"17": 3.0}, "stop": ["e"], "ignore_eos": False},
    {"echo": True, "logprobs": 1},
    {"prompt": [TEXT * 2, "abc " + TEXT], "temperature": 1.0, "seed": 5},
]


@pytest.fixture(scope="module")
def router(three: list[Served]) -> Any:
    with routed(members_of(three, "pdd")) as running:
        yield running


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer["choices"]
    return found


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_whole_answers_are_those_of_one_engine(router: Routed, three: list[Served], number: int) -> None:
    sent = body(**{"prompt": f"{number} {TEXT * 8}"} | OPTIONS[number])
    expected = choices(post(three[0], sent | {"cache_salt": "alone"}).json())
    answer = router.client().post("/v1/completions", json=sent)
    assert answer.status_code == 200, answer.text
    found = choices(answer.json())
    for one, other in zip(found, expected, strict=True):
        assert (one["text"], one["finish_reason"], one["token_ids"]) == (
            other["text"],
            other["finish_reason"],
            other["token_ids"],
        )
        if one["logprobs"] is not None:
            for a, b in zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True):
                assert a == pytest.approx(b, abs=1e-4)
    router.wait_idle()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_one_engine(router: Routed, three: list[Served], pooling: str) -> None:
    sent = {"input": [f"{pooling} {TEXT * 8}", "abc"], "pooling": pooling}
    expected = post(three[0], sent | {"cache_salt": "alone"}, path="embeddings").json()
    answer = router.client().post("/v1/embeddings", json=sent)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == expected["usage"]
    for one, other in zip(answer.json()["data"], expected["data"], strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
    router.wait_idle()

"""`/v1/embeddings` with the official client: embeddings are the engine's, and what can't be is refused by name."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from served import NAME, Served, served

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig
from longctx.serving.server.settings import ServerSettings

INPUTS = ["The pass key of lemon is 5312.", "caf\u00e9 " * 40]  # the second one takes several steps
CONFIG = EngineConfig(max_length=256, num_pages=128, page_size=16, max_running=8, token_budget=64, buckets=(64,))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    model, params = load_checkpoint(TINY)
    engine = Engine(model, params, CONFIG, tokenizer=load_tokenizer(TINY))
    with served(engine, ServerSettings(prepare_processes=0, max_prompts=8)) as running:
        yield running


def expected(tokens: list[int], pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    """The embedding by a dense computation."""
    model, params = load_checkpoint(TINY)
    size = model.config.hidden_size
    rows = np.asarray(model(params | {"lm_head": np.eye(size, dtype=np.float32)}, np.array(tokens)), np.float64)
    pooled = (rows.mean(0) if pooling == "mean" else rows[-1])[:dimensions]
    return pooled / np.linalg.norm(pooled)


def ask(tiny: Served, given: Any = INPUTS, **options: Any) -> Any:
    return tiny.openai().embeddings.create(model=NAME, input=given, **options)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_embeddings_are_those_of_the_model(tiny: Served, pooling: str, options: dict[str, Any]) -> None:
    tokens = [tiny.server.tokenizer.encode(text) for text in INPUTS]
    assert len(tokens[1]) > CONFIG.token_budget
    for given in (INPUTS, tokens):
        answer = ask(tiny, given, extra_body={"pooling": pooling}, **options)
        assert [each.index for each in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
        assert answer.model == NAME
        for each, ids in zip(answer.data, tokens, strict=True):
            values = each.embedding
            if isinstance(values, str):
                values = np.frombuffer(base64.b64decode(values), "<f4")
            np.testing.assert_allclose(values, expected(ids, pooling), atol=2e-5)


@pytest.mark.parametrize("given", [INPUTS[0], [65, 66, 67]])
def test_one_input_needs_no_list(tiny: Served, given: Any) -> None:
    (found,) = ask(tiny, given).data
    ids = tiny.server.tokenizer.encode(given) if isinstance(given, str) else given
    np.testing.assert_allclose(found.embedding, expected(ids), atol=2e-5)
    (raw,) = ask(tiny, given, extra_body={"normalize": False}).data
    assert np.linalg.norm(raw.embedding) > 1.5
    np.testing.assert_allclose(np.array(raw.embedding) / np.linalg.norm(raw.embedding), found.embedding, atol=1e-5)


def test_fewer_dimensions_are_asked_for_twice(tiny: Served) -> None:
    ids = tiny.server.tokenizer.encode(INPUTS[0])
    size = len(ask(tiny, INPUTS[0]).data[0].embedding)
    (found,) = ask(tiny, INPUTS[0], dimensions=8, extra_body={"truncate_dimensions": True}).data
    np.testing.assert_allclose(found.embedding, expected(ids, dimensions=8), atol=2e-5)
    assert len(ask(tiny, INPUTS[0], dimensions=size).data[0].embedding) == size
    with pytest.raises(openai.BadRequestError, match=f"dimensions must be {size}"):
        ask(tiny, INPUTS[0], dimensions=8)
    with pytest.raises(openai.BadRequestError, match=f"dimensions must be at most {size}"):
        ask(tiny, INPUTS[0], dimensions=size + 1, extra_body={"truncate_dimensions": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [2**31 - 1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": "a" * 300}, "input"),
        ({"input": [1] * 256}, "input"),
        ({}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "model": "another"}, "model"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny: Served, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{tiny.url}/v1/embeddings", json=fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("field", ["temperature", "stream", "n", "stop"])
def test_fields_of_generations_are_refused_by_name(tiny: Served, field: str) -> None:
    value = {"stream": True, "stop": "x"}.get(field, 1)
    answer = httpx.post(f"{tiny.url}/v1/embeddings", json={"input": "a", field: value})
    assert answer.status_code == 400
    assert f"{field} must not be there" in answer.json()["error"]["message"]


def test_generation_goes_on_beside_embeddings(tiny: Served) -> None:
    prompt = [*range(20, 60)]
    alone = tiny.server.tokenizer.decode(generated(tiny, prompt))
    client = tiny.openai()
    stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=60, temperature=0, stream=True)
    pieces = []
    for number, chunk in enumerate(stream):
        pieces.append(chunk.choices[0].text)
        if number % 10 == 0:
            ask(tiny)
    assert alone.startswith("".join(pieces))
    assert len(pieces) > 3


def generated(tiny: Served, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=30)
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_a_client_that_leaves_ends_its_embeddings(letters: Served) -> None:
    letters.executor.go.clear()
    body = {"input": ["Z" * 200] * 3, "pooling": "mean"}
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{letters.url}/v1/embeddings", json=body, timeout=httpx.Timeout(20, read=0.3))
        letters.wait_until("the call has ended", lambda: not letters.server.calls)
    finally:
        letters.executor.go.set()
    letters.wait_until("the pages are back", lambda: letters.pages_held() == 0)

"""The built-in model behind HTTP: tokens are those of `Engine.generate`, and each option does what it does there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from served import Served, served

from longctx.models import load_checkpoint, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, Output, SamplingParams
from longctx.serving.server.settings import ServerSettings

NAME = "tiny"
TEXT = "The pass key of lemon is 5312. caf\u00e9 \u4f60\u597d. " * 3
CONFIG = EngineConfig(
    max_length=1024,
    num_pages=256,
    page_size=16,
    max_running=8,
    token_budget=64,
    buckets=(64,),
    max_logprobs=5,
    hash_key=bytes(16),
)


def make_engine() -> Engine:
    model, params = load_checkpoint(TINY)
    return Engine(model, params, CONFIG, tokenizer=load_tokenizer(TINY))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with served(make_engine(), ServerSettings(prepare_processes=0), names=(NAME, "another-name")) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Another engine of the same model, to compare with."""
    return make_engine()


def ask(tiny: Served, prompt: Any = TEXT, max_tokens: int = 12, **options: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True} | options.pop("extra_body", {})
    given = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
    return tiny.openai().completions.create(extra_body=extra, **given)


def expect(engine: Engine, prompt: Any = TEXT, **params: Any) -> list[Output]:
    return engine.generate(prompt, SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | params))


def test_many_clients_get_the_tokens_of_generate(tiny: Served, engine: Engine) -> None:
    """24 requests, half of them streams, greedy and sampled, of other lengths each."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(1, 200)).tolist() for _ in range(24)]
    params = [
        SamplingParams(max_tokens=5 + i % 7, temperature=0.8 * (i % 3 > 0), seed=i, ignore_eos=True) for i in range(24)
    ]

    def one(i: int) -> list[int]:
        options: dict[str, Any] = {"temperature": params[i].temperature, "seed": i, "stream": i % 2 == 1}
        answer = ask(tiny, prompts[i], params[i].max_tokens, **options)
        if i % 2 == 0:
            return answer.choices[0].token_ids
        return [token for chunk in answer for choice in chunk.choices for token in choice.token_ids]

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(one, range(24)))
    assert got == [output.token_ids for output in engine.generate(prompts, params)]
    tiny.wait_idle()


def test_text_of_streams_joins_where_characters_are_spread_over_tokens(tiny: Served, engine: Engine) -> None:
    """Sampled bytes: many are no characters, some are parts of one."""
    params = {"temperature": 3.0, "seed": 11, "max_tokens": 80}
    (expected,) = expect(engine, **params)
    chunks = list(ask(tiny, stream=True, **params))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.text
    assert "\ufffd" in expected.text
    assert ask(tiny, **params).choices[0].text == expected.text


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"logit_bias": {"65": 100}},
        {"temperature": 1.0, "seed": 4, "top_k": 2},
        {"temperature": 1.0, "seed": 4, "min_p": 0.5},
    ],
)
def test_options_do_what_they_do_in_the_engine(tiny: Served, engine: Engine, options: dict[str, Any]) -> None:
    biases = tuple((int(token), bias) for token, bias in options.get("logit_bias", {}).items())
    (expected,) = expect(engine, **options | ({"logit_bias": biases} if biases else {}))
    extra = {name: options[name] for name in ("repetition_penalty", "top_k", "min_p") if name in options}
    official = {name: value for name, value in options.items() if name not in extra}
    answer = ask(tiny, extra_body=extra, **official)
    assert answer.choices[0].token_ids == expected.token_ids
    (plain,) = expect(engine)
    assert "seed" in options or expected.token_ids != plain.token_ids


def test_logprobs_are_the_engine_s_with_bytes_and_text(tiny: Served, engine: Engine) -> None:
    (expected,) = expect(engine, logprobs=3, prompt_logprobs=3)
    answer = ask(tiny, logprobs=3, echo=True).choices[0].logprobs
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    entries = [*expected.prompt_logprobs, *expected.logprobs]
    np.testing.assert_allclose(answer.token_logprobs[1:], [entry.logprob for entry in entries], rtol=1e-4, atol=1e-4)
    assert answer.token_logprobs[0] is None
    chat = tiny.openai().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=20,
        logprobs=True,
        top_logprobs=5,
        temperature=2.5,
        seed=3,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    content = chat.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes) == bytes(
        token for token in chat.choices[0].token_ids if token < 256
    )
    assert all(len(entry.top_logprobs) == 5 for entry in content)
    # The most likely first.
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_a_model_without_a_template_answers_questions(tiny: Served) -> None:
    """As `longctx chat` asks them: a document from the system, then a question."""
    document = passkey.make_document(800, 2, seed=1)
    for name, key in document.facts.items():
        answer = tiny.openai().chat.completions.create(
            model="another-name",
            messages=[
                {"role": "system", "content": document.text},
                {"role": "user", "content": passkey.question(name)},
            ],
            max_tokens=20,
            temperature=0,
        )
        assert answer.choices[0].message.content == key
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model == NAME


def test_nothing_is_compiled_for_requests(tiny: Served) -> None:
    from compilations import count_compilations

    with count_compilations() as compiled:
        ask(tiny, temperature=0.7, seed=1, n=2, logprobs=2, frequency_penalty=0.5, logit_bias={"5": 1})
    assert compiled == []

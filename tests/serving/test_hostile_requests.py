"""Requests with fields far beyond their range get a clear error or an answer, and their neighbours go on."""

import dataclasses
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from fake_device import VOCAB, FakeExecutor, expected_tokens, make_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.models import ByteTokenizer
from longctx.serving import Engine, Request, SamplingParams

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
FLOATS = [0.0, -0.0, 1e-320, 5e-324, 1e-50, 1e-38, 1e-9, 0.5, 1.0, 1.5, 2.0, 1e9, 3e38, 1e300, float("inf")]
NUMBERS = st.one_of(
    st.sampled_from([*FLOATS, *(-x for x in FLOATS), float("nan")]),
    st.sampled_from([2**k + i for k in (0, 7, 8, 15, 16, 31, 32, 63, 64, 200, 20_000) for i in (-1, 0, 1)]),
    st.sampled_from([-(2**k) for k in (0, 31, 63, 64, 20_000)]),
    st.integers(-3, 12),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        [np.int8(3), np.uint64(2**64 - 1), np.int64(2), np.float16("inf"), np.float32(0.5), np.float64(1e-60)]
    ),
    st.sampled_from([Fraction(1, 3), Fraction(10**400, 3), Decimal("0.5"), 1j, np.array(3), np.bool_(True)]),
)
TEXTS = st.sampled_from(["", "a", "ab" * 50_000, "\ud800", "\x00", "\u202e", "é\n", b"bytes"])
ODD = st.sampled_from([None, True, False, [], (), {}, object(), int, b"", float, "1", [None], [[1]], {1: 2}])
ANY = st.one_of(NUMBERS, TEXTS, ODD)
PAIRS = st.lists(st.tuples(st.one_of(st.integers(0, VOCAB), ODD), st.one_of(NUMBERS, ODD)), max_size=4)
TOKENS = st.one_of(st.lists(st.one_of(NUMBERS, ODD), max_size=4), PAIRS, st.just([(i, 1) for i in range(400)]))
PROMPTS = st.one_of(
    ANY,
    TOKENS,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    st.sampled_from([np.array([1, 2], np.uint8), np.zeros((2, 2), int), np.array([1.0]), np.array([], int), iter([1])]),
)
VALID_SAMPLING = {
    "max_tokens": st.integers(1, 9),
    "temperature": st.floats(0.5, 2),
    "top_k": st.one_of(st.integers(1, 60), st.none()),
    "top_p": st.floats(0.1, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=3),
    "seed": st.integers(0, 9),
    "n": st.integers(1, 3),
    "stop": st.just(()),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
    "ignore_eos": st.booleans(),
    "include_stop": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "grammar": st.none(),
    "allowed_token_ids": st.one_of(st.none(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)),
    "bad_words": st.just(()),
    "min_tokens": st.integers(0, 1),
    "logprobs": st.none(),
    "prompt_logprobs": st.none(),
    "pooling": st.none(),
}
VALID_REQUEST = {
    "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    "request_id": st.none(),
    "session_id": st.none(),
    "tenant": st.sampled_from(["", "a"]),
    "cache_salt": st.sampled_from(["", "a"]),
    "ttft_deadline": st.one_of(st.none(), st.floats(1e-3, 10)),
    "tpot_target": st.one_of(st.none(), st.floats(1e-3, 10)),
    "priority": st.integers(0, 3),
    "lease": st.one_of(st.none(), st.sampled_from(["a", "b"])),
    "stream_id": st.one_of(st.none(), st.sampled_from(["a", "b"])),
    "retain": st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), max_size=3),
}


def hostile(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Valid fields, of which one or two are anything; so that what is drawn gets past one check to the next."""
    odd = st.dictionaries(st.sampled_from(sorted(valid)), st.one_of(ANY, PROMPTS), max_size=2)
    return st.builds(lambda fields, odd: fields | odd, st.fixed_dictionaries(valid), odd)


def test_all_fields_are_drawn() -> None:
    assert set(VALID_SAMPLING) == {x.name for x in dataclasses.fields(SamplingParams)}
    assert set(VALID_REQUEST) == {x.name for x in dataclasses.fields(Request)} - {"sampling"}


@settings(max_examples=80)
@given(sampling=hostile(VALID_SAMPLING), request=hostile(VALID_REQUEST))
@example(sampling={"temperature": 1, "top_k": 2**31}, request={"prompt": [1]})
def test_hostile_requests_are_refused_or_answered(sampling: dict, request: dict) -> None:
    for engine in ENGINES:
        neighbour = engine.stream([1, 2, 3], FOUR)
        tokens = list(next(neighbour).token_ids)
        try:
            outputs = engine.generate(Request(sampling=SamplingParams(**sampling), **request))
        except (TypeError, ValueError) as error:
            assert 0 < len(str(error)) < 1000  # noqa: PT017
        else:
            assert outputs
            assert {x.finish_reason for x in outputs} <= {"stop", "length"}
        assert tokens + [t for event in neighbour for t in event.token_ids] == expected_tokens([1, 2, 3], FOUR)
        assert not engine.has_work


def text_engine() -> Engine:
    engine = make_engine()
    executor = FakeExecutor(engine.config, engine.plan, engine.num_pages)
    return Engine(
        engine.model, None, engine.config, tokenizer=SmallTokenizer(), executor=executor, clock=executor.clock
    )


class SmallTokenizer(ByteTokenizer):
    """Bytes, folded into the vocabulary of the device on paper."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [token % VOCAB for token in super().encode(text, add_special_tokens)]


ENGINES = [make_engine(), text_engine()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1, "top_k": 2**31}, r"top_k must be an integer of 1 to 2147483647, got 2147483648"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be finite and 0.001 to 1000"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be finite and 0.001 to 1000"),
        ({"temperature": 10**400}, "temperature must be finite"),
        ({"temperature": 1, "top_p": 1e-50}, "top_p must be finite and 1e-06 to 1"),
        ({"max_tokens": 2**31}, "max_tokens must be an integer of 1 to"),
        ({"max_tokens": 10**20_000}, "max_tokens must be an integer of 1 to"),
        ({"stop": ("x" * 10**6, 3)}, "stop must be strings"),
    ],
)
def test_numbers_are_checked_in_the_types_of_the_device(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**options)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["ttft_deadline", "tpot_target"])
def test_deadlines_are_numbers_to_count_with(name: str) -> None:
    for value in (5e-324, 1e300):
        with pytest.raises(ValueError, match=f"{name} must be finite and 1e-06 to 1e\\+09"):
            Request([1], **{name: value})

"""Mutated requests are refused with TypeError or ValueError, or answered; the engine goes on in either case."""

import dataclasses
import random

from fuzz.mutate import NUM_INPUTS, mutate_json
from serving.fake_device import expected_tokens, make_engine

from longctx.serving import Request, SamplingParams

SAMPLING = {
    **{"max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1},
    **{"frequency_penalty": 0.5, "logit_bias": [[3, 1.5], [4, -100]]},
    **{"presence_penalty": 0.5, "seed": 1, "n": 2, "stop": [], "stop_token_ids": [9], "ignore_eos": True},
    **{"logprobs": 1, "prompt_logprobs": 1},
}
REQUEST = {
    **{"prompt": list(range(20)), "request_id": "mine", "session_id": None, "tenant": "t"},
    **{"cache_salt": "s", "ttft_deadline": 5.0, "tpot_target": 0.5, "priority": 1},
}
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


def test_all_fields_are_mutated() -> None:
    assert set(SAMPLING) == {x.name for x in dataclasses.fields(SamplingParams)}
    outlives = {"lease"}  # keeps pages for others
    assert set(REQUEST) == {x.name for x in dataclasses.fields(Request)} - {"sampling"} - outlives


@NUM_INPUTS
def test_mutated_requests_are_refused_or_answered(num_inputs: int) -> None:
    rng, engine = random.Random(0), make_engine(40)
    answered = 0
    for _ in range(num_inputs):
        sampling, request = mutate_json(rng, SAMPLING), mutate_json(rng, REQUEST)
        if not (isinstance(sampling, dict) and isinstance(request, dict)):
            continue  # no keyword arguments
        try:
            outputs = engine.generate(Request(sampling=SamplingParams(**sampling), **request))
        except (TypeError, ValueError) as error:
            assert 0 < len(str(error)) < 1_000  # noqa: PT017
        else:
            answered += 1
            assert {x.finish_reason for x in outputs} <= {"stop", "length"}
        assert not engine.has_work
    assert answered > num_inputs // 30
    assert engine.stats().pages_held == 0
    assert engine.generate([3, 4], FOUR)[0].token_ids == expected_tokens([3, 4], FOUR)

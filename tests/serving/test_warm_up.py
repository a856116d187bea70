"""Nothing is compiled after `warm_up`."""

import pytest
from compilations import count_compilations
from dense_oracle import VOCAB, make_engine

from longctx.serving import Engine, ParallelPlan, SamplingParams


def serve(engine: Engine) -> None:
    """Chunks and decodes of all shapes in changing order, at all levels of sampling."""
    plain = SamplingParams(max_tokens=4, ignore_eos=True)
    drawn = SamplingParams(max_tokens=4, temperature=1.0, presence_penalty=0.5, ignore_eos=True)
    changed = SamplingParams(max_tokens=4, frequency_penalty=1.0, logit_bias=((3, 2.0), (4, -1)), ignore_eos=True)
    random = SamplingParams(max_tokens=4, temperature=0.7, ignore_eos=True)
    told = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    for i, (length, params) in enumerate(
        [(100, plain), (5, random), (40, drawn), (12, plain), (70, random), (1, told), (9, changed), (70, told)]
    ):
        engine.generate([[(7 * j + i) % VOCAB for j in range(length)]] * (1 + i % 2), params)


@pytest.mark.parametrize(
    "plan",
    [None, pytest.param(ParallelPlan(2, 2, 1, exchange="kvp", rank_tokens=16), marks=pytest.mark.slow)],
    ids=["one device", "stages and context"],
)
def test_nothing_is_compiled_after_warm_up(plan: ParallelPlan | None) -> None:
    engine = make_engine(plan=plan)
    engine.warm_up()
    with count_compilations() as compiled:
        serve(engine)
    assert not compiled

"""Engines on meshes of CPU devices: every plan gives the tokens of one device, in float32."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_workload import (
    ALL,
    STRATEGIES,
    UNEVEN,
    ChunkRecorder,
    check_tokens,
    make_mesh_engine,
    oracle_of,
    run_workload,
)

from longctx.serving import ParallelPlan, Request, SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), ALL, ids=str)
def test_tokens_equal_those_of_one_device_on_every_mesh(sizes: tuple[int, int, int], strategy: tuple[str, str]) -> None:
    """Prompts and decodes mixed, sessions, shared prefixes, several completions, cancels."""
    check_tokens(sizes, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), UNEVEN, ids=str)
def test_tokens_with_uneven_stages_equal_those_of_one_device(
    sizes: tuple[int, int, int], strategy: tuple[str, str]
) -> None:
    check_tokens(sizes, strategy, layers=5)


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in STRATEGIES[1:])],
    ids=str,
)
@settings(max_examples=1)
@given(
    seed=st.integers(0, 2**20),
    run_ahead=st.integers(1, 4),
    admission=st.sampled_from(["reserve", "optimistic"]),
    policy=st.sampled_from(["fcfs", "ilrs"]),
    rank_tokens=st.sampled_from([8, 16, 40]),
)
def test_random_workloads_on_all_three_axes(
    strategy: tuple[str, str], seed: int, run_ahead: int, admission: str, policy: str, rank_tokens: int
) -> None:
    plan = ParallelPlan(2, 2, 2, exchange=strategy[1], placement=strategy[0], rank_tokens=rank_tokens)  # type: ignore[arg-type]
    engine = make_mesh_engine(plan, run_ahead=run_ahead, admission=admission, policy=policy)
    run_workload(engine, seed, 30)


@pytest.mark.parametrize(
    ("sizes", "exchange"),
    [
        ((1, 3, 1), "algorithm_1"),
        *(
            pytest.param(sizes, exchange, marks=pytest.mark.slow)
            for sizes in ((1, 2, 1), (1, 5, 1), (1, 8, 1), (1, 2, 2), (2, 2, 1))
            for exchange in ("algorithm_1", "pass_kv", "auto")
        ),
    ],
    ids=str,
)
def test_decodes_beside_a_prompt_whose_keys_travel(sizes: tuple[int, int, int], exchange: str) -> None:
    """Decodes are replicated in steps by pass-KV, and sharded in those by pass-Q; a prompt's last token too."""
    plan = ParallelPlan(*sizes, exchange=exchange, placement="interleave")
    engine, oracle = make_mesh_engine(plan, max_running=8), oracle_of(sizes[0], sizes[2])
    recorded, params = ChunkRecorder(engine), SamplingParams(max_tokens=6, ignore_eos=True)
    lengths = (5, 3, 16 * sizes[1] + 1, 100, 1)
    prompts = [[(7 * i + number) % 50 for i in range(length)] for number, length in enumerate(lengths)]
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert output.token_ids == oracle.expected_tokens(prompt, params)
    decodes = [chunk for chunk in recorded.chunks if chunk.decodes]
    assert {chunk.sharded for chunk in decodes} == {False, True}


def test_four_turns_of_a_session_find_their_pages() -> None:
    """A session's pages stay where they are between turns, and each turn's prompt finds them."""
    plan = ParallelPlan(1, 2, 1, exchange="auto", rank_tokens=12)
    engine, oracle = make_mesh_engine(plan), oracle_of(1, 1)
    recorded, params = ChunkRecorder(engine), SamplingParams(max_tokens=7, ignore_eos=True)
    conversation: list[int] = []
    for turn, length in enumerate((40, 3, 30, 1)):
        conversation += [(7 * i + turn) % 50 for i in range(length)]
        (output,) = engine.generate([Request(list(conversation), params, session_id="s")])
        assert output.token_ids == oracle.expected_tokens(conversation, params)
        # The last token of a turn was never an input; everything else is found in the cache.
        assert output.metrics.cached_tokens == (len(conversation) - length - 1 if turn else 0)
        conversation += output.token_ids
    assert {chunk.sharded for chunk in recorded.chunks} == {False, True}

"""Which programs steps are compiled for, and which of them a step takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.executor.step_shapes import NOTHING_CACHED, Message, StepShapes, choose_message, make_messages
from longctx.serving.runner.step_inputs import Shape

MODEL = LlamaConfig.preset("llama-3-8b")
PAGE_BYTES = 2 * 64 * MODEL.num_kv_heads * MODEL.head_dim * 2  # 256 KiB
FULL = (512, 0, 8)


def make_shapes(plan: ParallelPlan, most_bytes: int = 1 << 30) -> StepShapes:
    """For 131,072 tokens in pages of 64."""
    return StepShapes(MODEL, EngineConfig(token_budget=512), plan, 4096, 2048, 2, most_bytes)


def sent(shape: Shape) -> tuple[str, int]:
    return shape.exchange, shape.message


@given(
    pages=st.integers(1, 10**6),
    num_pages=st.integers(1, 10**6),
    entries=st.integers(1, 10**6),
    most_bytes=st.integers(1, 1 << 34),
)
def test_any_number_of_pages_is_sent_within_the_limit(
    pages: int, num_pages: int, entries: int, most_bytes: int
) -> None:
    pages = min(pages, num_pages)
    messages = make_messages(num_pages, entries, PAGE_BYTES, most_bytes)
    message = choose_message(messages, pages)
    rounds = message.rounds_for(pages)
    assert message in messages
    assert rounds <= message.rounds
    assert message.pages * PAGE_BYTES <= max(most_bytes, PAGE_BYTES)
    # Less than half is padding, but for the shortest message.
    assert rounds * message.pages < max(2 * pages, messages[0].pages + 1)
    assert len(messages) <= 10


def test_long_messages_go_in_several() -> None:
    """A message of 128 MiB holds 512 pages of 256 KiB; 2,000 pages don't become pass-Q for that."""
    plan = ParallelPlan(context=8, exchange="pass_kv")
    assert sent(make_shapes(plan).of_step(FULL, "pass_kv", 2000)) == ("pass_kv", 1024)
    shape = make_shapes(plan, 128 << 20).of_step(FULL, "pass_kv", 2000)
    assert sent(shape) == ("pass_kv", 256)
    assert Message(shape.message, shape.rounds).rounds_for(2000) == 8 <= shape.rounds


@pytest.mark.parametrize("exchange", ["auto", "pass_q", "pass_kv", "all_gather", "algorithm_1"])
@pytest.mark.parametrize("placement", ["grow", "interleave"])
@given(
    sharded=st.integers(1, 512),
    others=st.tuples(st.integers(0, 512), st.integers(0, 512)),
    chosen=st.sampled_from(["pass_q", "pass_kv", "all_gather"]),
    pages=st.integers(0, 4096),
)
def test_every_step_has_a_program_that_was_compiled(
    placement: str, exchange: str, sharded: int, others: tuple[int, int], chosen: str, pages: int
) -> None:
    shapes = make_shapes(ParallelPlan(stage=2, context=2, exchange=exchange, placement=placement))  # type: ignore[arg-type]
    if placement == "interleave":  # all ranks have pages of all sequences, single rows of which may be replicated
        most = {"auto": 512, "pass_q": 0}.get(exchange, 64)
        others = min(others[0], most), 0
    rows = (sharded, *others)
    shape = shapes.of_step(rows, chosen, pages)
    assert shape in set(shapes)
    assert min(a - b for a, b in zip((shape.sharded, shape.replicated, shape.local), rows, strict=True)) >= 0
    assert shape.exchange == "pass_q" or shape.message * shape.rounds >= pages
    assert sent(shapes.of_step((0, 0, 0), "", 0)) == ("pass_q", 0) or pages == 0


@pytest.mark.parametrize(
    ("exchange", "chosen", "expected"),
    [
        ("auto", "pass_kv", "pass_kv"),
        ("auto", "pass_q", "all_gather"),
        ("auto", "all_gather", "all_gather"),
        ("pass_q", "pass_q", "all_gather"),
        ("pass_kv", "pass_kv", "pass_kv"),
        ("all_gather", "all_gather", "all_gather"),
    ],
)
def test_where_nothing_is_cached_neither_pages_nor_queries_travel(exchange: str, chosen: str, expected: str) -> None:
    shapes = make_shapes(ParallelPlan(context=8, exchange=exchange))
    assert sent(shapes.of_step(FULL, chosen, 0)) == (expected, 0)


def test_what_ranks_gather_has_a_limit() -> None:
    """The messages of all 8 ranks together are of 1 GiB at most."""
    shapes = make_shapes(ParallelPlan(context=8))
    assert sent(shapes.of_step(FULL, "all_gather", 100)) == ("all_gather", 64)
    assert sent(shapes.of_step(FULL, "all_gather", 2000)) == ("all_gather", 256)
    assert 8 * 256 * PAGE_BYTES <= 1 << 30


@pytest.mark.parametrize(
    ("exchange", "placement", "programs"),
    [
        ("kvp", "grow", 15),
        ("pass_q", "interleave", 4),
        ("pass_q", "grow", 67),
        ("auto", "grow", 95),
        ("auto", "interleave", 63),
        ("algorithm_1", "interleave", 47),
    ],
)
def test_the_number_of_programs(exchange: str, placement: str, programs: int) -> None:
    shapes = list(make_shapes(ParallelPlan(stage=2, context=2, exchange=exchange, placement=placement)))  # type: ignore[arg-type]
    assert len(shapes) == len(set(shapes)) == programs


@pytest.mark.parametrize("exchange", ["auto", "pass_q", "pass_kv", "algorithm_1"])
@pytest.mark.parametrize("placement", ["grow", "interleave"])
@pytest.mark.parametrize("tokens", [64, 512, 1000, 2048])
def test_sharded_rows_end_at_what_a_step_has(exchange: str, placement: str, tokens: int) -> None:
    """With as many rows as `chunking` lets a step have, keys may travel; there are no more programs for it."""
    plan = ParallelPlan(stage=2, context=2, exchange=exchange, placement=placement)  # type: ignore[arg-type]
    limited, whole = (
        StepShapes(MODEL, EngineConfig(token_budget=2048, chunking=chunking), plan, 4096, 2048, 2)
        for chunking in (f"static:{tokens}", "static")
    )
    assert max(shape.sharded for shape in limited) == tokens
    assert len(set(limited)) <= len(set(whole))
    chosen = "pass_q" if exchange == "pass_q" else "pass_kv"
    shape = limited.of_step((tokens, 0, 0), chosen, 100)
    assert (shape.exchange, shape.sharded) == (chosen, tokens)
    assert shape in set(limited)


def test_messages_of_small_caches() -> None:
    assert make_messages(24, 100, PAGE_BYTES, 1 << 30) == [Message(24, 1)]
    assert NOTHING_CACHED.rounds_for(0) == 1
    assert replace(EngineConfig()).token_budget == 512

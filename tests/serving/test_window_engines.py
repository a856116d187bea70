"""Models with sliding windows under every plan: the tokens of the dense model, with window pages that stay few."""

from pathlib import Path

import numpy as np
import pytest
from dense_oracle import VOCAB
from mesh_workload import check_tokens, make_mesh_engine, oracle_of
from test_handoff import beginning, run
from tiered_engines import settle

from longctx.cluster.transfer.local import LocalReceiver
from longctx.serving import Output, ParallelPlan, Request, SamplingParams
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.window_pages import window_span
from longctx.serving.profiler import measure, random_shapes
from longctx.serving.request.handoff import Handoff

MIXED = (11, (True, True, False, True))  # as Gemma 3 has them
SLIDING = (5, (True,) * 4)  # as Mistral has them
MODELS = {"mixed": MIXED, "sliding": SLIDING}
SINGLE, GROWN, DEALT = ("grow", "auto"), ("grow", "kvp"), ("interleave", "pass_q")


QUICK = [
    ("sliding", (1, 1, 1), SINGLE),
    ("mixed", (1, 2, 1), GROWN),
    ("mixed", (2, 1, 1), SINGLE),
    ("mixed", (1, 1, 2), SINGLE),
    ("sliding", (1, 3, 1), DEALT),
]
SLOW = [
    (name, sizes, strategy)
    for sizes, strategy in [
        ((1, 1, 1), SINGLE),
        ((1, 2, 1), GROWN),
        ((2, 1, 1), SINGLE),
        ((1, 1, 2), SINGLE),
        ((1, 3, 1), DEALT),
        ((1, 2, 1), ("grow", "auto")),
        ((1, 2, 1), ("interleave", "pass_kv")),
        ((1, 3, 1), ("interleave", "pass_kv")),
        ((1, 2, 1), ("interleave", "algorithm_5")),
        ((1, 4, 1), ("grow", "all_gather")),
        ((3, 1, 1), SINGLE),
        ((2, 2, 2), ("interleave", "auto")),
    ]
    for name in MODELS
    if (name, sizes, strategy) not in QUICK and (name, sizes) != ("sliding", (1, 4, 1))  # whose prompts do not grow
]


@pytest.mark.parametrize(
    ("name", "sizes", "strategy"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_tokens_equal_those_of_the_dense_model(
    name: str, sizes: tuple[int, int, int], strategy: tuple[str, str]
) -> None:
    """Prompts in chunks and decodes mixed, sessions, shared prefixes, several completions, cancels."""
    events = 120 if sizes[1] == 4 else 60  # on four ranks prompts seldom grow from one to another
    check_tokens(sizes, strategy, events=events, layers=4, windows=MODELS[name])


@pytest.mark.parametrize("strategy", [GROWN, pytest.param(SINGLE, marks=pytest.mark.slow)], ids=str)
def test_tokens_where_context_ranks_share_the_feed_forward(strategy: tuple[str, str]) -> None:
    """Helix: rows are on ranks that have neither pages nor window pages of their request."""
    check_tokens((1, 4, 1), strategy, events=40, layers=4, windows=MIXED, ffn="all")


both_models = pytest.mark.parametrize("name", ["mixed", pytest.param("sliding", marks=pytest.mark.slow)])
ONE, STAGES = ParallelPlan(), ParallelPlan(2, 1, 1)
EXACT = SamplingParams(max_tokens=8, ignore_eos=True)


def test_window_pages_are_bounded_at_a_long_context() -> None:
    """A long prompt and its decodes hold window pages of the window, and a page for each page of tokens."""
    engine, oracle = make_mesh_engine(ONE, 4, MIXED), oracle_of(4, 1, None, MIXED)
    prompt, held = [(7 * i) % VOCAB for i in range(140)], set[tuple[int, int]]()
    engine.add_monitor(lambda step: held.add((engine.core.pool.num_held, engine.stats().window_pages_held)))
    (output,) = engine.generate([prompt], EXACT)
    assert output.token_ids == oracle.expected_tokens(prompt, EXACT)
    assert max(pages for pages, _ in held) == 19
    # The span of 11 tokens, the page that is written, and those of a step of 16 tokens.
    assert max(windows for _, windows in held) <= 2 + 1 + 2
    pools = engine.executor.runner.state.cache.k.shape[0]  # type: ignore[attr-defined]
    windows = engine.core.pool.windows
    assert windows is not None
    assert pools == 1 * 24 + 3 * windows.num_pages


@both_models
def test_a_conversation_goes_on_after_its_last_page(name: str) -> None:
    """A session's partial page, and full pages of a shared prefix, are found with their window pages."""
    engine, oracle = make_mesh_engine(ONE, 4, MODELS[name]), oracle_of(4, 1, None, MODELS[name])
    conversation: list[int] = []
    for turn, length in enumerate((40, 3, 30, 1)):
        conversation += [(7 * i + turn) % VOCAB for i in range(length)]
        (output,) = engine.generate([Request(list(conversation), EXACT, session_id="s")])
        assert output.token_ids == oracle.expected_tokens(conversation, EXACT)
        assert output.metrics.cached_tokens == (len(conversation) - length - 1 if turn else 0)
        conversation += output.token_ids


@both_models
def test_what_one_plan_stored_another_loads(name: str, tmp_path: Path) -> None:
    tiers, oracle = TierConfig(1 << 20, 1 << 20, str(tmp_path)), oracle_of(4, 1, None, MODELS[name])
    document = np.random.default_rng(0).integers(0, VOCAB, 83).tolist()
    for plan, tail in ((ONE, [1, 2, 3]), (STAGES, [5, 6])):
        engine = make_mesh_engine(plan, 4, MODELS[name], tiers=tiers, hash_key=bytes(16))
        prompt = [*document, *tail]
        engine.scheduler.loads.seconds_per_page = None
        (output,) = engine.generate([prompt], EXACT)
        assert output.token_ids == oracle.expected_tokens(prompt, EXACT)
        assert output.metrics.loaded_tokens == (0 if plan is ONE else 80)
        settle(engine)
        engine.pages.close()


@both_models
@pytest.mark.parametrize("count", [1, 5])
def test_requests_move_to_an_engine_of_another_plan(name: str, count: int) -> None:
    """After its prompt, and in mid-decode: nothing but the next token is computed there."""
    options = {"transfers": True, "hash_key": bytes(16)}
    first, second = (make_mesh_engine(plan, 4, MODELS[name], **options) for plan in (ONE, STAGES))
    assert first.page_identity is not None
    layout, fingerprint = first.page_identity
    request = Request(np.random.default_rng(1).integers(0, VOCAB, 60).tolist(), EXACT, f"r{count}")
    outputs: dict[str, list[Output]] = {}
    first.submit(beginning(request, count, "lease"))
    run(first, outputs)
    handoff = Handoff.of(outputs[f"r{count}"])
    receiver = LocalReceiver(layout, fingerprint)
    source = receiver.source(first.pages, "lease", layout, fingerprint)
    second.submit(request, None, handoff, {"lease": source})
    final: dict[str, list[Output]] = {}
    run(second, final)
    (output,) = final[f"r{count}"]
    assert output.token_ids == oracle_of(4, 1, None, MODELS[name]).expected_tokens(list(request.prompt), EXACT)
    assert output.metrics.loaded_tokens == 60 + count - 1
    # Sliding layers are sent of the pages alone that the next token sees.
    window, sliding = MODELS[name]
    size = layout.page_size
    pages, seen = -(-(59 + count) // size), (59 + count) // size - window_span(window, size)
    rows = pages * sliding.count(False) + (pages - seen) * sliding.count(True)
    assert receiver.stats.bytes == rows * layout.page_bytes // layout.num_layers
    first.step()
    assert first.stats().window_pages_held == second.stats().window_pages_held == 0


def test_steps_with_window_pages_are_measured() -> None:
    """More pages than window pages; the engine stays usable."""
    engine, oracle = make_mesh_engine(ParallelPlan(1, 2, 1), 4, MIXED, num_pages=40), oracle_of(4, 1, None, MIXED)
    shapes = random_shapes(engine, 150, 2)
    assert len(measure(engine, shapes, repeats=1)) == 2
    prompt = [(7 * i) % VOCAB for i in range(30)]
    (output,) = engine.generate([prompt], EXACT)
    assert output.token_ids == oracle.expected_tokens(prompt, EXACT)

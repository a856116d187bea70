"""The profiler on meshes: batches of every kind of rows, what is fitted to them, and profiles on disk."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from dense_oracle import MODEL, PARAMS, agrees
from hypothesis import given
from hypothesis import strategies as st

from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.predictor import RuntimePredictor, Work
from longctx.serving.predictor.file import load_profile, save_profile
from longctx.serving.predictor.fit import fit, relative_errors
from longctx.serving.predictor.measured import KINDS, Program, kind_of
from longctx.serving.profiler import (
    BatchShape,
    fits,
    links,
    make_batch,
    measure,
    profile,
    random_shapes,
    shapes_to_measure,
    subject,
)
from longctx.serving.scheduler.batch import work_by_rank

CONFIG = EngineConfig(page_size=8, num_pages=24, max_running=6, token_budget=32, buckets=(8, 32), max_length=176)
SMALL = dataclasses.replace(CONFIG, buckets=(32,))  # so that there is little to compile
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = list(range(1, 40))
BUCKETS, TILES = (8, 64), (1, 8, 16, 64)


def make_engine(plan: ParallelPlan) -> Engine:
    return Engine(MODEL, PARAMS, SMALL, plan=plan)


@st.composite
def works(draw: st.DrawFn, kind: str) -> Work:
    """A rank's work of some kind."""
    work = Work()
    for _ in range(draw(st.integers(1, 3))):
        work = work.with_chunk(draw(st.integers(0, 5000)), draw(st.integers(1, 10)), draw(st.booleans()))
    if kind == "replicated":
        work = work.with_chunk(draw(st.integers(0, 5000)), draw(st.integers(1, 20)), False, True)
    elif kind != "local":
        cached = draw(st.integers(0, 5000))
        work = work.with_sharded(cached, draw(st.integers(2, 40)), 2, cached // 2, False, kind)
    return work._replace(elsewhere=draw(st.integers(0, 10**5)))


def program(kind: str, rng: np.random.Generator) -> Program:
    numbers = rng.uniform(0.5, 2, 1 + 3 * len(BUCKETS) + len(TILES) + 4) * 1e-3
    numbers[7:11] *= 1e-4
    numbers[-3:] *= 1e-5
    return Program.of(kind, BUCKETS, TILES, numbers.tolist())


@given(st.data(), st.sampled_from(KINDS), st.integers(0, 100))
def test_seconds_are_linear_in_the_coefficients(data: st.DataObject, kind: str, seed: int) -> None:
    measured, work = program(kind, np.random.default_rng(seed)), data.draw(works(kind))
    ones = [Program.of(kind, BUCKETS, TILES, numbers) for numbers in np.eye(len(measured.numbers)).tolist()]
    expected = float(np.dot([one.seconds(work, BUCKETS) for one in ones], measured.numbers))
    assert measured.seconds(work, BUCKETS) == pytest.approx(expected)
    assert RuntimePredictor(BUCKETS, (measured,)).seconds(work) == pytest.approx(expected)
    assert kind_of(work) == kind


def test_coefficients_are_found_for_each_kind() -> None:
    """From batches whose seconds a predictor says, the same seconds of other batches are predicted."""
    rng = np.random.default_rng(0)
    truth = RuntimePredictor(BUCKETS, tuple(program(kind, rng) for kind in KINDS))

    def draw(count: int) -> list[Work]:
        found = []
        for i in range(count):
            kind, work = KINDS[i % len(KINDS)], Work()
            for _ in range(int(rng.integers(1, 4))):
                work = work.with_chunk(int(rng.integers(5000)), int(rng.integers(1, 10)), bool(rng.integers(2)))
            if kind == "replicated":
                work = work.with_chunk(int(rng.integers(5000)), int(rng.integers(1, 20)), False, True)
            elif kind != "local":
                cached = int(rng.integers(5000))
                work = work.with_sharded(cached, int(rng.integers(2, 60)), 2, cached // 2, exchange=kind)
            found.append(work._replace(elsewhere=int(rng.integers(10**5))))
        return found

    fitted = fit([(work, truth.seconds(work)) for work in draw(400)], BUCKETS, TILES)
    assert {program.kind for program in fitted.programs} == {*KINDS}
    errors = relative_errors(fitted, [(work, truth.seconds(work)) for work in draw(100)])
    assert np.abs(errors).max() < 1e-4
    with pytest.raises(ValueError, match="measured must say the exchange"):
        fit([(Work().with_sharded(0, 16, 2), 1.0)], BUCKETS, TILES)
    with pytest.raises(ValueError, match="more than the largest of buckets"):
        fit([(Work(65), 1.0)], BUCKETS, TILES)
    with pytest.raises(ValueError, match="positive and finite, got nan"):
        fit([(Work(1), float("nan"))], BUCKETS, TILES)


def test_an_unknown_exchange_takes_the_faster_and_a_missing_kind_the_nearest() -> None:
    rng = np.random.default_rng(1)
    by_kind = {kind: program(kind, rng) for kind in KINDS}
    sharded = Work().with_sharded(100, 20, 2, 50)
    predictor = RuntimePredictor(BUCKETS, tuple(by_kind.values()))
    assert predictor.seconds(sharded) == min(by_kind[kind].seconds(sharded, BUCKETS) for kind in KINDS[2:])
    alone = RuntimePredictor(BUCKETS, (by_kind["local"], by_kind["pass_q"]))
    assert alone.seconds(sharded._replace(exchange="pass_kv")) == by_kind["pass_q"].seconds(sharded, BUCKETS)
    replicated = Work().with_chunk(10, 5, True, True)
    assert alone.seconds(replicated) == by_kind["local"].seconds(replicated._replace(replicated=0), BUCKETS)
    assert predictor.seconds(Work()) == 0
    with pytest.raises(ValueError, match="a batch of 65 rows is more than the 64 that can be predicted"):
        predictor.seconds(Work(65))


PLANS = [
    ParallelPlan(context=2, exchange="kvp"),
    ParallelPlan(context=3),
    ParallelPlan(context=2, placement="interleave"),
    ParallelPlan(context=2, placement="interleave", exchange="kvp"),
    ParallelPlan(stage=2, context=2, exchange="pass_q"),
    ParallelPlan(stage=2, tensor=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_batches_have_the_rows_that_their_shapes_say(plan: ParallelPlan) -> None:
    """And pages of their own, on the ranks that they belong to."""
    engine = Engine(MODEL, None, CONFIG, plan=plan, executor=object())  # type: ignore[arg-type]
    shapes = shapes_to_measure(engine, 64) + random_shapes(engine, 64, 40)
    assert {shape[4:] for shape in shapes} == {shape[4:] for shape in random_shapes(engine, 64, 40)}
    for shape in shapes:
        batch = make_batch(engine, shape)
        pages = [page for sequence in batch.admitted for page in sequence.pages]
        assert len(set(pages)) == len(pages)
        for sequence in batch.admitted:
            on = [page // engine.num_pages for page in sequence.pages]
            assert sequence.rank_pages == [on.count(rank) for rank in range(plan.context)]
        exchange = "" if batch.exchange is None else batch.exchange.name
        ranks = work_by_rank(batch.chunks, plan.context, CONFIG.page_size, exchange)
        assert max(work.rows for work in ranks) <= shape.rows
        sharded = (shape.decode_kind, shape.chunk_kind).count("sharded")
        assert bool(sharded and (shape.chunk or shape.decode_kind == "sharded")) == bool(exchange)
        # Sequences that are too short have pages on some ranks only, which compute them alone.
        if min(len(sequence.pages) for sequence in batch.admitted) >= plan.context:
            assert {work.rows for work in ranks} == {shape.rows} if shape.even else ranks[0].rows == shape.rows
    assert not fits(engine, BatchShape(0, 0, 33, 0))
    assert not fits(engine, BatchShape(7, 1, 0, 0))
    assert not fits(engine, BatchShape(0, 0, 8, 170))
    assert not fits(engine, BatchShape(0, 0, -1, 0))


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(context=2, exchange="kvp"),
        pytest.param(ParallelPlan(stage=2), marks=pytest.mark.slow),
        pytest.param(ParallelPlan(tensor=2), marks=pytest.mark.slow),
    ],
)
def test_engines_on_meshes_are_measured_and_stay_usable(plan: ParallelPlan, tmp_path: Path) -> None:
    engine = make_engine(plan)
    (before,) = engine.generate(PROMPT, GREEDY)
    predictor, measured = profile(engine, max_context=16, repeats=1)
    (after,) = engine.generate(PROMPT, GREEDY)
    assert after.token_ids == before.token_ids
    assert agrees(after.token_ids, PROMPT, GREEDY)
    assert all(seconds > 0 for _, seconds in measured)
    assert predictor.kinds == ({"local"} if plan.context == 1 else {"local", "replicated"})
    about = subject(MODEL, PARAMS, SMALL, plan)
    save_profile(tmp_path / "profile.json", predictor, about, {"links": links(engine)})
    assert load_profile(tmp_path / "profile.json", about) == predictor
    assert set(json.loads((tmp_path / "profile.json").read_text())["notes"]["links"].values()) == {"memory"}
    with pytest.raises(ValueError, match="measured on another engine: plan is"):
        load_profile(tmp_path / "profile.json", subject(MODEL, PARAMS, SMALL))
    again = Engine(MODEL, PARAMS, SMALL, plan=plan, predictor=predictor)
    assert again.generate(PROMPT, GREEDY)[0].token_ids == before.token_ids


@pytest.mark.slow
def test_what_is_measured_is_the_slowest_ranks_work() -> None:
    shapes = [
        BatchShape(1, 16, 4, 10, even=False),
        BatchShape(1, 16, 4, 10),
        BatchShape(0, 0, 4, 40, "local", "replicated"),
        BatchShape(0, 0, 16, 16, "local", "sharded", exchange="pass_q"),
    ]
    engine = make_engine(ParallelPlan(context=2, exchange="pass_q"))
    (alone, _), (even, _), (replicated, _), (sharded, _) = measure(engine, shapes, repeats=1)
    here = Work().with_chunk(16, 1, True).with_chunk(10, 4, False)
    assert alone == here
    assert even == here._replace(elsewhere=here.pairs)
    assert (replicated.replicated, replicated.sharded) == (4, 0)
    assert (sharded.sharded, sharded.rows, sharded.exchange, sharded.ring_cached) == (16, 16, "pass_q", 16)


def test_broken_mesh_profiles_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    predictor = RuntimePredictor(BUCKETS, (program("local", np.random.default_rng(0)),))
    save_profile(file, predictor, {})
    good = file.read_text()
    for old, new in (
        ('"kind": "local"', '"kind": "ring"'),
        ('"fixed": 0', '"fixed": -0'),
        ('"per_bucket"', '"per_row"'),
    ):
        assert old in good
        file.write_text(good.replace(old, new))
        with pytest.raises(ValueError, match="is not a profile as `longctx profile` writes it"):
            load_profile(file, {})

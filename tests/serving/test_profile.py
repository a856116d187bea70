"""The profiler: it measures every program of an idle engine, and leaves the engine usable."""

import dataclasses

import pytest
from dense_oracle import MODEL, PARAMS, agrees, make_engine

from longctx.serving import Engine, Request, SamplingParams
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.profiler import BatchShape, measure, profile, random_shapes, shapes_to_measure, subject

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = list(range(1, 40))


def test_every_program_gets_coefficients_and_the_engine_stays_usable() -> None:
    engine = make_engine()
    (before,) = engine.generate(PROMPT, GREEDY)
    calls = []
    predictor, measured = profile(engine, max_context=64, repeats=1, progress=lambda *x: calls.append(x))
    assert predictor.buckets == (8, 32)
    assert calls[-1] == (len(calls), len(calls)) == (len(measured), len(measured))
    rows = {work.rows for work, _ in measured}
    assert min(rows) == 1
    assert max(rows) == 32
    assert {bool(work.chunks) for work, _ in measured if work.decode_keys} == {True, False}
    # Measuring wrote to pages, so the prefix cache is empty, and what it holds from now on is right.
    (after,) = engine.generate(PROMPT, GREEDY)
    assert after.metrics.cached_tokens == 0
    assert after.token_ids == before.token_ids
    assert agrees(after.token_ids, PROMPT, GREEDY)
    assert engine.generate(PROMPT, GREEDY)[0].metrics.cached_tokens == 32


def test_shapes_fit_into_the_engine() -> None:
    engine = make_engine()
    shapes = shapes_to_measure(engine, 64)
    assert len(set(shapes)) == len(shapes)
    random = random_shapes(engine, 64, 50)
    assert len(random) == 50
    for shape in shapes + random:
        assert 1 <= shape.rows <= 32
        assert shape.decodes + (shape.chunk > 0) <= 6
        assert shape.decodes * (shape.decode_context // 8 + 1) + -(-(shape.chunk_start + shape.chunk) // 8) <= 24
    for decodes, context in ((1, 64), (6, 8), (6, 1), (6, 192)):
        tiny = Engine(MODEL, PARAMS, dataclasses.replace(engine.config, max_running=decodes))
        for shape in (*shapes_to_measure(tiny, context), *random_shapes(tiny, context, 10)):
            assert shape.chunk_start >= 0
            assert shape.chunk_start + shape.chunk <= 192
    small = Engine(MODEL, PARAMS, dataclasses.replace(engine.config, num_pages=1, max_running=2))
    with pytest.raises(ValueError, match="no batch of 9 to 32 rows fits into 1 pages"):
        shapes_to_measure(small, 8)


def test_measured_work_equals_that_of_the_batch() -> None:
    shapes = [BatchShape(3, 10, 5, 20), BatchShape(0, 0, 8, 0), BatchShape(2, 7, 0, 0)]
    measured = measure(make_engine(), shapes, repeats=1)
    assert [work for work, _ in measured] == [
        Work(3, 3, 33).with_chunk(20, 5, False),
        Work().with_chunk(0, 8, False),
        Work(2, 2, 16),
    ]
    assert all(seconds > 0 for _, seconds in measured)


def test_invalid_profiling_is_refused() -> None:
    engine = make_engine()
    for wrong, message in (({"max_context": 0}, "max_context must be 1 to 192"), ({"repeats": 0}, "repeats must be")):
        with pytest.raises(ValueError, match=message):
            profile(engine, **wrong)
    with pytest.raises(RuntimeError, match="while its executor is lent"):
        profile(engine, 16, 1, progress=lambda *_: engine.generate(PROMPT))
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(Request(PROMPT))
    engine = make_engine()
    engine.submit(Request(PROMPT, GREEDY))
    with pytest.raises(RuntimeError, match="an engine is measured while it serves no request: 1 have not ended"):
        profile(engine)


def test_a_predictor_must_support_all_steps_of_an_engine() -> None:
    engine = make_engine()
    predictor, _ = profile(engine, max_context=16, repeats=1)
    larger = dataclasses.replace(engine.config, token_budget=64, buckets=None)
    with pytest.raises(ValueError, match="64 rows is more than the 32 that can be predicted"):
        Engine(MODEL, PARAMS, larger, predictor=predictor)
    assert subject(MODEL, PARAMS, larger) != subject(MODEL, PARAMS, engine.config)
    assert "buckets" in subject(MODEL, PARAMS, larger)
    Engine(MODEL, PARAMS, larger, predictor=CurvePredictor((1, 2), (0.0, 0.0), 0.0, 0.0, 0.0))

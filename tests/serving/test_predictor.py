"""Predictors: their sums and fits, what they refuse, and the published tables if they are on this machine."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig
from longctx.parallel.device_tables import Device, Link
from longctx.parallel.topology import Topology
from longctx.serving.predictor import CurvePredictor, RuntimePredictor, Work
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import load_profile, save_profile
from longctx.serving.predictor.fit import fit, relative_errors
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import check_predictor

TILES = (1, 16, 64, 256)
LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128)
PROGRAMS = RuntimePredictor.of_rows({8: 5e-3, 128: 1e-2, 512: 2e-2}, TILES, (3e-7, 1.5e-6, 3e-6, 9e-6), 1.5e-4)
CURVE = CurvePredictor((1, 128, 512), (5e-3, 6e-3, 2e-2), 3e-8, 1e-7, 1e-4)


def test_work_adds_up_over_chunks() -> None:
    work = Work.of([(99, 1, True), (1000, 50, False), (0, 1, True)])
    assert work == Work(2, 2, 101).with_chunk(1000, 50, False)
    assert work == Work().with_chunk(99, 1, True).with_chunk(1000, 50, False).with_chunk(0, 1, True)
    assert work.pairs == 100 + sum(range(1001, 1051)) + 1
    assert work.keys == 100 + 1050 + 1


@given(start=st.integers(0, 10**7), count=st.integers(2, 512))
def test_a_chunk_is_split_into_tiles(start: int, count: int) -> None:
    expected = PROGRAMS.seconds(Work(count))
    for first in range(0, count, 256):
        size = min(256, count - first)
        cost = next(cost for tile, cost in zip(TILES, PROGRAMS.programs[0].per_key, strict=True) if tile >= size)
        expected += cost * (start + first + size)
    assert PROGRAMS.seconds(Work().with_chunk(start, count, False)) == pytest.approx(expected)


@pytest.mark.parametrize("predictor", [PROGRAMS, CURVE])
@given(start=st.integers(0, 10**6), length=st.integers(1, 20_000), chunk=st.integers(1, 512))
def test_prefill_seconds_equal_the_sum_of_its_steps(
    predictor: RuntimePredictor | CurvePredictor, start: int, length: int, chunk: int
) -> None:
    stop = start + length
    steps = [
        predictor.seconds(Work().with_chunk(at, min(chunk, stop - at), at + chunk >= stop))
        for at in range(start, stop, chunk)
    ]
    found = predictor.prefill_seconds(start, stop, chunk)
    # Chunks of one token count as decode_keys; otherwise the sums are the same.
    assert found == pytest.approx(sum(steps), rel=1e-9)
    assert predictor.prefill_seconds(stop, stop, chunk) == 0
    assert predictor.seconds(Work()) == 0


@given(seed=st.integers(0, 2**20))
def test_a_fit_finds_the_coefficients_of_the_times(seed: int) -> None:
    rng = np.random.default_rng(seed)
    works = []
    for _ in range(200):
        decodes, chunk = int(rng.integers(0, 8)), int(rng.integers(0, 500))
        work = Work(decodes, decodes, int(rng.integers(0, 10_000)) * decodes)
        works.append(work.with_chunk(int(rng.integers(0, 8000)), chunk, bool(rng.integers(2))) if chunk else work)
    works += [Work().with_chunk(int(rng.integers(0, 8000)), count, False) for count in (2, 5, 8, 12, 30, 100, 128)]
    measured = [(work, PROGRAMS.seconds(work)) for work in works if work.rows]
    found = fit(measured, (8, 128, 512), TILES)
    assert np.abs(relative_errors(found, measured)).max() < 1e-6
    # It extrapolates, despite noise.
    noisy = [(work, seconds * float(rng.uniform(0.9, 1.1))) for work, seconds in measured]
    far = [Work(20, 20, 10**6).with_chunk(10**6, 300, True), Work().with_chunk(500_000, 512, True)]
    errors = relative_errors(fit(noisy, (8, 128, 512), TILES), [(work, PROGRAMS.seconds(work)) for work in far])
    assert np.abs(errors).max() < 0.15


def test_fit_refuses_incomplete_measurements() -> None:
    good = (Work(4, 1, 10), 1.0)
    with pytest.raises(ValueError, match="no batch for the buckets of \\[16\\] rows"):
        fit([good], (8, 16), TILES)
    with pytest.raises(ValueError, match="a batch of 17 rows, more than the largest"):
        fit([good, (Work(17), 1.0)], (8, 16), TILES)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            fit([(Work(4), seconds)], (8,), TILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed": -1.0}, "finite and not negative"),
        ({"per_key": (math.nan,) * 4}, "finite and not negative"),
        ({"per_key": (0.0,)}, "a number for each of tiles"),
        ({"tiles": (8, 1, 2, 3)}, "ascending"),
        ({"per_bucket": ()}, "three kinds of rows"),
        ({"kind": "ring"}, "kind must be one of local, .* got 'ring'"),
    ],
)
def test_invalid_programs_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PROGRAMS.programs[0], **change)


@pytest.mark.parametrize("change", [{"buckets": ()}, {"buckets": (8, 4)}, {"buckets": (0, 4)}, {"programs": ()}])
def test_invalid_measured_predictors_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(PROGRAMS, **change)
    with pytest.raises(ValueError, match="513 rows is more than the 512"):
        PROGRAMS.seconds(Work(513))


def test_invalid_predictors_are_refused() -> None:
    assert check_predictor(CURVE, 512) is CURVE
    with pytest.raises(ValueError, match=r"overlap must be 0 to 1, got 1\.5"):
        dataclasses.replace(CURVE, overlap=1.5)
    with pytest.raises(TypeError, match="predictor must have `seconds` and `prefill_seconds`, got 3"):
        check_predictor(3, 512)  # type: ignore[arg-type]
    for wrong in (math.nan, math.inf, -1.0):
        fake = type("Fake", (), {"seconds": lambda self, work, x=wrong: x, "prefill_seconds": lambda *_: 0.0})()
        with pytest.raises(ValueError, match="predictor must give finite seconds"):
            check_predictor(fake, 512)


def test_correction_follows_a_slower_device_and_ignores_outliers() -> None:
    corrected = Corrected(CURVE)
    work = Work().with_chunk(1000, 100, True)
    for _ in range(20):
        corrected.observe(work, 2 * CURVE.seconds(work))
    assert corrected.prompt_factor == 2
    assert corrected.seconds(work) == 2 * CURVE.seconds(work)
    assert corrected.prefill_seconds(0, 5000, 512) == 2 * CURVE.prefill_seconds(0, 5000, 512)
    corrected.observe(work, 100.0)  # a compilation
    corrected.observe(work, 0.0)
    assert corrected.prompt_factor == 2
    fresh = Corrected(CURVE)
    for seconds in (3.0, 3.0, *[2 * CURVE.seconds(work)] * 10):  # compilations at first
        fresh.observe(work, seconds)
        assert fresh.prompt_factor in (1, 2)
    assert fresh.prompt_factor == 2
    for _ in range(40):
        corrected.observe(work, CURVE.seconds(work))
    assert corrected.prompt_factor == 1


def test_roofline_equals_the_arithmetic_of_the_data_sheet() -> None:
    device = Device("sheet", {"bfloat16": 300e12}, 2e12, flops_share=1.0, memory_share=1.0)
    sheet = Topology(device, dict.fromkeys(("tensor", "stage"), Link("link", 100e9, share=1.0)))
    predictor = roofline(LLAMA_8B, sheet, 4096)
    # Llama-3 8B has 6.98e9 weights in its layers, and 5.25e8 in its head.
    layers, head = 32 * 4096 * (2 * 40 * 128 + 3 * 14336), 128256 * 4096
    assert predictor.seconds(Work(1)) == pytest.approx(2 * (layers + head) / 2e12)
    assert predictor.seconds(Work(4096)) == pytest.approx(2 * 4096 * layers / 300e12 + 2 * head / 2e12, rel=1e-6)
    pairs, keys = 4096 * 4097 // 2, 4096
    attention = 4 * 32 * 32 * 128 * pairs / 300e12 + 2 * 32 * 8 * 128 * 2 * keys / 2e12
    chunk = Work().with_chunk(0, 4096, False)
    assert predictor.seconds(chunk) - predictor.seconds(Work(4096)) == pytest.approx(attention)
    # One of two stages has half of the layers; one of eight devices has an eighth of their weights, and all-reduces.
    half = roofline(LLAMA_8B, sheet, 4096, stage=2)
    assert half.seconds(chunk) == pytest.approx(predictor.seconds(chunk) / 2, rel=0.05)
    eighth = roofline(LLAMA_8B, sheet, 4096, tensor=8)
    sent = 2 * 32 * 4096 * 2 * 7 / 8 * 4096 * 2 / 100e9
    assert eighth.seconds(chunk) == pytest.approx(predictor.seconds(chunk) / 8 + sent, rel=1e-3)
    cpu, gpu = (roofline(LLAMA_8B, Topology.preset(name), 512) for name in ("cpu", "a100-nvlink"))
    assert cpu.seconds(Work(1)) > gpu.seconds(Work(1))
    for change, message in [({"stage": 33}, "at most the 32 layers"), ({"tensor": 5}, "divide the 32 query heads")]:
        with pytest.raises(ValueError, match=message):
            roofline(LLAMA_8B, sheet, 512, **change)
    for name, values in {
        "overhead": [-1, math.nan, math.inf],
        "element_bytes": [-2, 0],
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}$"):
                roofline(LLAMA_8B, sheet, 512, **{name: value})


def test_a_profile_is_valid_for_one_engine(tmp_path: Path) -> None:
    file, subject = tmp_path / "profile.json", {"num_layers": 4, "buckets": (8, 128, 512)}
    save_profile(file, PROGRAMS, subject, {"error": 0.05})
    assert load_profile(file, subject) == PROGRAMS
    assert json.loads(file.read_text())["notes"] == {"error": 0.05}
    with pytest.raises(ValueError, match="measured on another engine: num_layers is 4 there and 32 here"):
        load_profile(file, subject | {"num_layers": 32})
    with pytest.raises(ValueError, match="measured on another engine: device is None there and TPU here"):
        load_profile(file, subject | {"device": "TPU"})
    for wrong in (
        "{}",
        "nonsense",
        '{"format": "other"}',
        file.read_text().replace('"per_sample": ', '"per_sample": -'),
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="is not a profile as `longctx profile` writes it"):
            load_profile(file, subject)
    with pytest.raises(OSError, match="nowhere"):
        load_profile(tmp_path / "nowhere", subject)

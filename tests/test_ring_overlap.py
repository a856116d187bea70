"""The benchmark of what moves keys beside attention: its predictions, and a rehearsal on CPUs."""

import json
from pathlib import Path

import pytest

from benchmarks import ring_overlap
from longctx.gpu_flags import OVERLAPS


@pytest.mark.parametrize("model", ring_overlap.HEADS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [32_768, 131_072])
def test_the_model_favours_copy_engines(model: str, ranks: int, tokens: int) -> None:
    rings = {overlap: ring_overlap.predict(model, ranks, overlap, tokens)["ring"] for overlap in OVERLAPS}
    assert min(rings, key=rings.__getitem__) == "copy_engines"


def test_predictions() -> None:
    one = {overlap: ring_overlap.predict("llama3-8b", 1, overlap)["ring"] for overlap in OVERLAPS}
    assert len(set(one.values())) == 1  # nothing travels
    assert one[None] == pytest.approx(0.2025, rel=0.01)  # of docs/results/kernels_h100.md
    none, reserved, copies = (
        ring_overlap.predict("llama3-8b", 8, overlap) for overlap in (None, "multiprocessors", "copy_engines")
    )
    assert none["ring"] == pytest.approx(none["attention"] + none["hops"])
    assert copies["ring"] == copies["attention"] == none["attention"]
    assert reserved["attention"] == pytest.approx(none["attention"] * 132 / 128)
    assert reserved["ring"] == reserved["attention"]
    page = Path(ring_overlap.__file__).parents[1] / "docs/mosaic_gpu.md"
    assert ring_overlap.prediction_table() in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rehearsal_on_cpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ring_overlap, "CHOICES", {"none": "", "multiprocessors": ring_overlap.CHOICES["multiprocessors"]}
    )
    rows = list(
        ring_overlap.measure_choices([2], 64, 4, 2, 16, rounds=1, choices=tuple(ring_overlap.CHOICES), cpu=True)
    )
    assert [row["choice"] for row in rows] == ["none", "multiprocessors"]
    assert [row.get("reserved_multiprocessors") for row in rows] == [0, 4], rows
    assert all(row[name] > 0 for row in rows for name in ("ring", "attention", "hops"))
    assert len(ring_overlap.table(rows).splitlines()) == 4
    assert json.loads(json.dumps(rows)) == rows

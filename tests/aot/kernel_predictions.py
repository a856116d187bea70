"""The performance model of kernels that are compiled ahead of time, and what it says of JAX's own."""

import json
from pathlib import Path

import pytest

from benchmarks import kernel_model, kernels

# FlashAttention-3 without pipelining inside a warpgroup, as JAX's kernel is, and with, as ours is: TFLOP/s (table 2).
PUBLISHED = 582, 661


@pytest.mark.slow
def test_kernels_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.json"
    assert kernels.main(["--model", "--only", "llama3-70b/tp8/*@128k*", "--json", str(file)]) == 0
    assert "Predictions come from machine code" in capsys.readouterr().out
    rows = {row["shape"].split("/", 2)[2]: row for row in json.loads(file.read_text())}
    for row in rows.values():
        assert row["predicted_ms"] > max(row["flops_ms"], row["bytes_ms"])
    assert rows["decode@128k/b64"]["predicted_binds"] == "memory"
    assert rows["prefill@128k"]["predicted_binds"] == "multiprocessors"
    assert rows["prefill@128k"]["predicted_merge_ms"] == 0 < rows["decode@128k/b1"]["predicted_merge_ms"]


@pytest.mark.slow
def test_the_model_explains_what_pipelining_gains() -> None:
    """The clock is calibrated with the first figure alone."""
    peer, ours = (rate / 1e12 for rate in kernel_model.ablation())
    assert peer == pytest.approx(PUBLISHED[0], rel=0.01)
    assert ours == pytest.approx(PUBLISHED[1], rel=0.05)

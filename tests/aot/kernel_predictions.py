"""The performance model of kernels that are compiled ahead of time, and what it says of JAX's own."""

import json
from pathlib import Path

import pytest

from benchmarks import kernel_model, kernels, triton_decode
from benchmarks.h100 import TARGETS
from longctx.models import LlamaConfig
from longctx.models.footprint import cache_bytes, weight_bytes

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


@pytest.mark.slow
def test_a_decode_step_on_an_a100_is_predicted(tmp_path: Path) -> None:
    """Near to what reading the weights and the cache takes, and never below."""
    config, batch, tokens = LlamaConfig.preset("llama-3-8b"), 64, 4096
    loop = triton_decode.loop_of(triton_decode.compile_decode("A100", config, batch, tokens, tmp_path))
    found = triton_decode.predict("A100", config, batch, tokens, loop)
    read = weight_bytes(config) + cache_bytes(config, batch * tokens, dtype_bytes=2)
    least = read / (TARGETS["A100"].bandwidth * 1e9)
    assert least < found.step[0] < found.step[1] < 1.5 * least
    # The least of 16 rows and 64 keys: 64 products of each of two kinds over 4 warps.
    assert loop.products == 32 < loop.instructions

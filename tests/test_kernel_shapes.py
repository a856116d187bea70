"""The named shapes, their least costs, and the benchmark that times them, here with CPU contenders."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernel_shapes import MAX_CACHE_BYTES, SHAPES, AttentionShape

CHUNK = AttentionShape("tiny/chunk", "tiny", 1, "chunk", 2, 24, 128, 4, 2, 16)
PREFILL = AttentionShape("tiny/prefill", "tiny", 1, "prefill", 1, 80, 80, 4, 2, 16)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1])
        import benchmarks.kernels

        yield benchmarks.kernels


@pytest.mark.parametrize(("q_length", "kv_length"), [(1, 1), (1, 9), (5, 5), (4, 11)])
def test_flops_and_bytes_count_what_is_visible(q_length: int, kv_length: int) -> None:
    shape = AttentionShape("tiny", "tiny", 1, "chunk", 3, q_length, kv_length, 6, 2, 16)
    visible = np.arange(kv_length) <= np.arange(kv_length - q_length, kv_length)[:, None]
    products = 2  # scores, and their weights with the values
    assert shape.flops == products * 2 * 16 * 6 * 3 * visible.sum()
    elements = 2 * np.prod(shape.q_shape) + 2 * np.prod(shape.kv_shape)
    assert shape.bytes == 2 * elements


def test_shapes_match_their_names() -> None:
    lengths = {"8k": 2**13, "16k": 2**14, "128k": 2**17, "1m": 2**20}
    for name, shape in SHAPES.items():
        model, tp, case, *batch = name.split("/")
        case, at = case.split("@")
        assert (shape.name, shape.model, f"tp{shape.tp}") == (name, model, tp)
        assert shape.kv_length == lengths[at]
        assert case in (shape.kind, f"chunk{shape.q_length}")
        assert [f"b{shape.batch}"] * (shape.kind == "decode") == batch
        assert shape.q_length == {"prefill": shape.kv_length, "decode": 1}.get(shape.kind, shape.q_length)
        assert shape.kv_heads >= 1
        assert shape.heads % shape.kv_heads == 0
        assert shape.cache_bytes <= MAX_CACHE_BYTES
    shape = SHAPES["llama3-70b/tp8/chunk64@1m"]
    assert shape.q_shape == (1, 64, 8, 128)
    assert shape.kv_shape == (1, 2**20, 1, 128)


def test_model_prints_the_floor(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.kernel_model, "missing", lambda: "some tool")
    files = tmp_path / "floor.json", tmp_path / "floor.md"
    assert kernels.main(["--model", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    printed = capsys.readouterr().out
    assert files[1].read_text() == printed
    assert printed.count("\n") == 2 + len(SHAPES) + 2
    assert printed.endswith("Predictions need some tool.\n")
    rows = {row["shape"]: row for row in json.loads(files[0].read_text())}
    # 989 TFLOP/s and 3.35 TB/s: half of 4 T S N H, and 4 KiB of keys and values a token.
    prefill, decode = rows["mha/tp1/prefill@16k"], rows["llama3-8b/tp1/decode@128k/b1"]
    assert prefill["binds"] == "FLOPs"
    assert prefill["flops_ms"] == pytest.approx(2 * 16384**2 * 2048 / 989e12 * 1e3, rel=1e-3)
    assert decode["binds"] == "bytes"
    assert decode["bytes_ms"] == pytest.approx(131072 * 4096 / 3.35e12 * 1e3, rel=1e-3)


def test_without_a_gpu_the_benchmark_says_so(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert kernels.main([]) == 2
    assert "needs a GPU, found cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--only", "no such case"])
    assert "nothing is called no such case" in capsys.readouterr().err


@pytest.fixture(scope="module")
def measured(kernels: ModuleType) -> dict[tuple[str, str], object]:
    from benchmarks.kernel_contenders import contiguous, jax_nn, paged, prepare_jax

    def wrong(case, sets):  # type: ignore[no-untyped-def]
        return prepare_jax(lambda q, k, v: jnp.zeros_like(q), case, sets, (), causal=True)

    def unable(case, sets):  # type: ignore[no-untyped-def]
        raise NotImplementedError("it has no such heads")

    contenders = {
        "attention": contiguous("reference"),
        "pages of 64": paged("reference", 64),
        "cuDNN": jax_nn("xla"),
        "XLA": wrong,
        "torch": unable,
    }
    chunk = kernels.Case.of(CHUNK)
    backward = replace(kernels.Case.of(PREFILL), name="tiny/backward", backward=True)
    results = kernels.run([chunk], contenders, budget=0.05, rounds=2, num_sets=2)
    some = {name: contenders[name] for name in ("pages of 64", "cuDNN", "XLA")}
    results += kernels.run([backward], some, budget=0.05, rounds=2, num_sets=1)
    results += kernels.run([replace(chunk, name="big")], contenders, 1, 1, memory=1e3)
    results += kernels.run([replace(chunk, name="late")], contenders, 1, 1, deadline=0)
    return {(result.case.name, result.contender): result for result in results}


def test_run_times_checks_and_gives_reasons(measured: dict) -> None:
    for contender in ("attention", "pages of 64", "cuDNN"):
        result = measured["tiny/chunk", contender]
        assert result.ms > 0
        assert result.error < 2e-2
        assert result.rounds >= 1
    assert measured["tiny/backward", "cuDNN"].ms > 0
    assert ("tiny/backward", "pages of 64") not in measured
    for case in ("tiny/chunk", "tiny/backward"):
        assert measured[case, "XLA"].failed
        assert measured[case, "XLA"].ms is None
    assert measured["tiny/chunk", "torch"].reason == "it has no such heads"
    assert "memory" in measured["big", ""].reason
    assert "time" in measured["late", ""].reason


def test_report_lists_every_case(kernels: ModuleType, measured: dict) -> None:
    where = kernels.environment()
    text = kernels.report(list(measured.values()), 1e9, where)
    assert "| tiny/chunk | attention |" in text
    assert "FAILED: a relative error of 1.0e+00" in text
    assert "- torch: it has no such heads. tiny/chunk" in text
    assert "- everyone: left out: the time was up (--minutes). late" in text
    assert text.count("| not measured |") == 7  # but pages against contiguous
    data = json.loads(kernels.to_json(list(measured.values()), 1e9, where))
    assert len(data["results"]) == len(measured)
    assert len(data["aims"]) == 8

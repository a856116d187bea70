"""The choice of an implementation, and the reasons against the others."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from longctx.kernels import attention, device, explain, paged_attention
from longctx.kernels.attention import plan_attention
from longctx.kernels.device import Device
from longctx.kernels.mosaic_gpu import adapter, ptxas
from longctx.kernels.mosaic_gpu.ptxas import Ptxas, ptxas_in_use

Q = jax.ShapeDtypeStruct((6, 4, 128), jnp.bfloat16)
PAGES = jax.ShapeDtypeStruct((5, 64, 2, 128), jnp.bfloat16)


def of(x: jax.ShapeDtypeStruct, **changes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(changes.get("shape", x.shape), changes.get("dtype", x.dtype))


def test_without_a_gpu_xla_is_taken() -> None:
    selection = explain(Q, Q)
    assert selection.taken == "xla"
    assert selection.refused["mosaic_gpu"] == "needs an NVIDIA GPU of the Hopper generation (sm_90), got cpu 'cpu'"
    triton = "needs an NVIDIA GPU of compute capability 8.0 or later, got cpu 'cpu'"
    assert str(selection).splitlines()[1:3] == [f"triton      {triton}", "xla         taken"]


def test_on_hopper_the_kernel_is_taken() -> None:
    with adapter.interpreted():
        assert explain(Q, Q).taken == explain(Q, PAGES, paged=True).taken == "mosaic_gpu"
        assert explain(Q, Q).refused["xla"] == "slower than mosaic_gpu, which supports the case"


@pytest.mark.parametrize(
    ("q", "pages", "reason"),
    [
        (of(Q, dtype=jnp.float32), None, "needs a dtype of bfloat16 or float16, got float32"),
        (of(Q, shape=(6, 4, 96)), None, "needs a head size of 64, 128, 256, got 96"),
        (Q, of(PAGES, shape=(5, 48, 2, 128)), "needs a page size, a multiple of 16, that divides 128 or is a multiple"),
        (Q, of(PAGES, shape=(5, 4, 2, 128)), "a multiple of 16, that divides 128 or is a multiple of it, got 4"),
    ],
)
def test_what_the_kernel_does_not_support(q: Any, pages: Any, reason: str) -> None:
    with adapter.interpreted():
        selection = explain(q, q) if pages is None else explain(q, pages, paged=True)
        assert selection.taken == "xla"
        assert reason in selection.refused["mosaic_gpu"]
        with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' needs .*; 'xla' would serve"):
            call(q, pages)


def call(q: Any, pages: Any, implementation: str = "mosaic_gpu") -> None:
    q = jnp.ones(q.shape, q.dtype)
    if pages is None:
        attention(q, q, q, implementation=implementation)
    else:
        pages, row = jnp.ones(pages.shape, pages.dtype), jnp.zeros(6, int)
        paged_attention(q, pages, pages, row[None], None, row[:1], row, row, implementation=implementation)


@pytest.mark.parametrize("pages", [None, PAGES])
def test_on_another_device_it_is_refused(pages: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU of the Hopper generation \(sm_90\), got cpu"):
        call(Q, pages)


FOUND = Ptxas(88, (12, 9, 86), "/usr/bin/ptxas")


@pytest.mark.parametrize(
    ("ptxas", "platform", "taken", "says"),
    [
        (FOUND, 12090, "mosaic_gpu", "12.9.86 (/usr/bin/ptxas)"),
        # A toolkit on the path, older than the platform, and newer.
        (FOUND._replace(ptx_version=87, version=(12, 8, 93)), 12090, "xla", "12.8.93 (/usr/bin/ptxas)"),
        (FOUND._replace(version=(12, 9, 41)), 13000, "xla", "12.9.41 (/usr/bin/ptxas)"),
        (FOUND._replace(ptx_version=90, version=(13, 0, 88)), 12080, "mosaic_gpu", "13.0.88 (/usr/bin/ptxas)"),
        (FOUND._replace(ptx_version=85, version=(12, 6, 85)), 12060, "mosaic_gpu", "12.6.85 (/usr/bin/ptxas)"),
        # Part of jaxlib: of CUDA 12.8, of 12.9.0 or 12.9.1, of 13.
        (Ptxas(87), 12080, "xla", "of unknown version, for PTX up to 8.7"),
        (Ptxas(88), 12090, "mosaic_gpu", "of unknown version, for PTX up to 8.8; that of CUDA 12.9.0 would miscompile"),
        (Ptxas(90), 13000, "mosaic_gpu", "of unknown version, for PTX up to 9.0"),
        # Nothing is known but the platform.
        (Ptxas(), 12080, "xla", "not found"),
        (Ptxas(), 12090, "mosaic_gpu", "not found; that of CUDA 12.9.0 would miscompile mosaic_gpu: use another"),
    ],
)
def test_a_ptxas_that_miscompiles_it_is_refused(
    ptxas: Ptxas, platform: int, taken: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Device("NVIDIA H100 80GB HBM3", "gpu", True, 132, platform, ptxas)
    monkeypatch.setattr(device.Device, "target", classmethod(lambda cls: here))
    selection = explain(Q, Q)
    assert selection.taken == taken
    assert selection.ptxas.startswith(says)
    assert str(selection).splitlines()[-1] == f"ptxas       {selection.ptxas}"
    if taken == "xla":
        which = f"found {says}" if ptxas.ptx_version else "the platform's version is CUDA 12.8"
        reason = f"needs a ptxas that is not of CUDA 12.8.0 to 12.9.0, which miscompiles such loops: {which}"
        assert selection.refused["mosaic_gpu"] == reason


def install(folder: Path, said: str) -> str:
    """A program called ptxas that says this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ptxas").write_text(f"#!/bin/sh\necho '{said}'\n")
    (folder / "ptxas").chmod(0o755)
    return str(folder)


def test_ptxas_is_looked_for_where_jaxlib_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First on PATH, then beside JAX; what can't run, or is too old for XLA, is passed over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ptxas, "mosaic_library", lambda: tmp_path / "site/plugin/library.so")
    monkeypatch.setattr(ptxas, "newest_ptx", lambda: 88)
    monkeypatch.setenv("PATH", f"{tmp_path / 'empty'}:{tmp_path / 'bin'}")
    find = ptxas_in_use.__wrapped__
    (tmp_path / "site/plugin").mkdir(parents=True)
    beside = install(tmp_path / "site/nvidia/cuda_nvcc/bin", "Cuda compilation tools, release 12.9, V12.9.86")
    if not Path("/usr/local/cuda/bin/ptxas").exists():
        assert find().version == (12, 9, 86)
        assert Path(find().path).resolve() == Path(beside, "ptxas")
    first = install(tmp_path / "bin", "Cuda compilation tools, release 12.9, V12.9.86")
    assert find() == Ptxas(88, (12, 9, 86), f"{first}/ptxas")
    for skipped in ("release 11.7, V11.7.99", "release 12.3, V12.3.103", "nothing"):
        install(tmp_path / "empty", skipped)
        assert find() == Ptxas(88, (12, 9, 86), f"{first}/ptxas")
    install(tmp_path / "cuda_sdk_lib/bin", "release 12.9, V12.9.90")
    assert find() == Ptxas(88, (12, 9, 90), "cuda_sdk_lib/bin/ptxas")
    # The first is not what reads PTX of this version: something else assembles.
    for ptx_version, broken in ((87, True), (90, False), (92, False)):
        monkeypatch.setattr(ptxas, "newest_ptx", lambda: ptx_version)  # noqa: B023
        assert (find(), find().broken) == (Ptxas(ptx_version), broken)
    monkeypatch.setattr(ptxas, "newest_ptx", lambda: None)
    assert find() == Ptxas()


@pytest.mark.parametrize("broken", ["release 12.8, V12.8.93", "release 12.9, V12.9.41"])
def test_a_toolkit_that_would_miscompile_gives_way_to_the_package(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ptxas, "mosaic_library", lambda: tmp_path / "site/plugin/library.so")
    monkeypatch.setattr(ptxas, "newest_ptx", lambda: 88)
    toolkit = install(tmp_path / "cuda-12.8/bin", broken)
    monkeypatch.setenv("PATH", toolkit)
    (tmp_path / "site/plugin").mkdir(parents=True)
    find = ptxas_in_use.__wrapped__
    beside = tmp_path / "site/nvidia/cuda_nvcc/bin"
    install(beside, broken)  # no better: PATH stays as it is
    find()
    assert os.environ["PATH"] == toolkit
    install(beside, "release 12.9, V12.9.86")
    found = find()
    assert (found.version, Path(found.path).resolve()) == ((12, 9, 86), beside / "ptxas")
    first, rest = os.environ["PATH"].split(os.pathsep)
    assert (Path(first).resolve(), rest) == (beside, toolkit)
    assert find() == found  # and PATH does not grow
    assert os.environ["PATH"].split(os.pathsep)[1:] == [toolkit]


def test_the_size_of_values_counts() -> None:
    """Values of another size than keys are not for the kernels of Hopper, nor are plans that are made for them."""
    lacks = "needs values with the head size of keys, 128, got 64"
    with adapter.interpreted():
        for k, paged in ((Q, False), (PAGES, True)):
            assert explain(Q, k, paged, value_size=128) == explain(Q, k, paged)
            found = explain(Q, k, paged, value_size=64)
            assert (found.taken, found.refused["mosaic_gpu"]) == ("xla", lacks)
        assert plan_attention(Q, Q).implementation == "mosaic_gpu"
        plan = plan_attention(Q, Q, value_size=64)
        assert plan.implementation == "xla"
        q, v = jnp.ones(Q.shape, Q.dtype), jnp.ones((6, 4, 64), Q.dtype)
        assert attention(q, q, v, plan=plan)[0].shape == (6, 4, 64)
        with pytest.raises(NotImplementedError, match=lacks):
            plan_attention(Q, Q, value_size=64, implementation="mosaic_gpu")


@pytest.mark.parametrize("value_size", [0, -1, 2.5, True, "64"])
def test_a_size_of_values_is_a_positive_integer(value_size: Any) -> None:
    for function in (explain, plan_attention):
        with pytest.raises(ValueError, match="value_size must be an integer of at least 1, got"):
            function(Q, Q, value_size=value_size)


def test_explain_refuses() -> None:
    with pytest.raises(ValueError, match=r"k must have a shape as in attention or paged_attention, got \(6, 4, 128\)"):
        explain(Q, Q, paged=True)
    with pytest.raises(ValueError, match="k must have the head size of q, 128, got 64"):
        explain(Q, of(Q, shape=(6, 4, 64)))


@pytest.mark.parametrize("index", [None, jnp.array([[0, 1, 7]])])
@pytest.mark.parametrize("page", [5, -3])
def test_a_page_that_is_not_there_is_named_by_checkify(index: Any, page: int) -> None:
    q, pages, row = jnp.ones((1, 4, 8)), jnp.ones((5, 4, 2, 8)), jnp.zeros(1, int)

    def run(table: jax.Array, length: int) -> jax.Array:
        return paged_attention(q, pages, pages, table, index, jnp.array([length]), row, row)[0]

    checked = jax.jit(checkify.checkify(run), static_argnums=1)
    error, _ = checked(jnp.array([[0, page - 1, 99]]), 4)
    error.throw()  # the entry is not in use
    error, out = checked(jnp.array([[0, page, 99]]), 5)
    assert bool(jnp.isfinite(out).all())
    with pytest.raises(checkify.JaxRuntimeError, match=rf"page_table must hold pages below 5 .* got {page}"):
        error.throw()

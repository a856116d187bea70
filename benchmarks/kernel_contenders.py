"""The contenders of `benchmarks.kernels`, with one interface: our kernels, cuDNN, JAX's kernel, XLA and torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.kernel_cases import Case, Operands, page_table
from longctx.kernels import attention, paged_attention

OURS = "attention"
PAGE_SIZES = (64, 256)
# Tiles follow one another in XLA's loops: more would take minutes.
MAX_XLA_FLOPS = 2e13
MAX_DENSE_BYTES = 16e9


@dataclass(frozen=True)
class Prepared:
    """A contender ready to run a case. A pass computes every set of operands once, without waiting for it."""

    start: Callable[[], Any]
    wait: Callable[[Any], object]
    first: Callable[[Any], tuple[Array, ...]]  # the results of the first set: out `[B, T, N, H]` and any gradients
    poison: Callable[[], None]  # puts NaN where results will be
    causal: bool  # what it computes, else every query sees every key
    page_size: int = 0  # of shuffled pages; 0: contiguous


# Raises NotImplementedError, or whatever a peer raises, where it can't run the case.
Contender = Callable[[Case, list[Operands]], Prepared]
Compute = Callable[..., Array]


def prepare_jax(compute: Compute, case: Case, sets: list[Operands], shared: tuple[Array, ...], **what: Any) -> Prepared:
    """`compute(q, k, v, *shared)` of each set in one program, so that the host's share is that of one call."""

    def one(operands: Operands, shared: tuple[Array, ...]) -> tuple[Array, ...]:
        q, k, v, *d_out = operands
        if not case.backward:
            return (compute(q, k, v, *shared),)
        out, pullback = jax.vjp(lambda q, k, v: compute(q, k, v, *shared), q, k, v)
        return out, *pullback(*d_out)

    traced = jax.jit(one)

    @jax.jit
    def program(sets: list[Operands], shared: tuple[Array, ...]) -> list[tuple[Array, ...]]:
        outs: list[tuple[Array, ...]] = []
        for q, *rest in sets:
            if outs:  # one after another, and what follows from positions anew for each
                (q, shared), outs[-1] = lax.optimization_barrier(((q, shared), outs[-1]))
            outs.append(traced((q, *rest), shared))
        return outs

    results = jax.eval_shape(program, sets, shared)

    def poison() -> None:
        jax.block_until_ready(jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), results))

    return Prepared(lambda: program(sets, shared), jax.block_until_ready, lambda outs: outs[0], poison, **what)


def contiguous(implementation: str) -> Contender:
    """Our `attention`. Positions are operands, so what the kernel computes from them counts."""

    def prepare(case: Case, sets: list[Operands]) -> Prepared:
        if implementation == "xla" and case.flops > MAX_XLA_FLOPS:
            raise NotImplementedError(f"left out: over {MAX_XLA_FLOPS / 1e12:.0f} TFLOP, it would take too long")
        if not case.causal:

            def compute(q: Array, k: Array, v: Array) -> Array:
                return attention(q, k, v, causal=False, implementation=implementation)[0]

            return prepare_jax(compute, case, sets, (), causal=False)

        def compute_causal(q: Array, k: Array, v: Array, q_positions: Array, kv_positions: Array) -> Array:
            return attention(
                q, k, v, q_positions=q_positions, kv_positions=kv_positions, implementation=implementation
            )[0]

        positions = jnp.asarray(case.q_positions), jnp.asarray(case.kv_positions)
        return prepare_jax(compute_causal, case, sets, positions, causal=True)

    return prepare


def paged(implementation: str | None, page_size: int) -> Contender:
    """Our `paged_attention` to the same keys, taken for pages of a pool; each sequence has shuffled ones."""

    def prepare(case: Case, sets: list[Operands]) -> Prepared:
        shape = case.shape
        if shape.kv_length % page_size:
            raise NotImplementedError("left out: a part of a page")

        def compute(q: Array, k: Array, v: Array, table: Array, *tokens: Array) -> Array:
            k_pages, v_pages = (x.reshape(-1, page_size, *x.shape[2:]) for x in (k, v))
            rows, (lengths, positions, sequence) = q.reshape(-1, *q.shape[2:]), tokens
            operands = rows, k_pages, v_pages, table, None, lengths, positions, sequence
            return paged_attention(*operands, implementation=implementation)[0].reshape(q.shape)

        sequences = np.arange(shape.batch, dtype=np.int32)
        tokens = (
            page_table(shape, page_size),
            np.full(shape.batch, shape.kv_length, np.int32),
            np.tile(case.q_positions, shape.batch),
            np.repeat(sequences, shape.q_length),
        )
        return prepare_jax(
            compute, case, sets, tuple(map(jnp.asarray, tokens)), causal=case.causal, page_size=page_size
        )

    return prepare


def _square(case: Case) -> bool:
    """Whether a causal mask without positions is right. Else queries are few, and peers run without a mask."""
    if not case.plain:
        raise NotImplementedError("it knows no positions")
    return case.causal and case.shape.q_length == case.shape.kv_length


def jax_nn(implementation: Literal["cudnn", "xla"]) -> Contender:
    """`jax.nn.dot_product_attention`: cuDNN, or XLA with every score in memory."""

    def prepare(case: Case, sets: list[Operands]) -> Prepared:
        causal, shape = _square(case), case.shape
        scores = 8 * shape.batch * shape.heads * shape.q_length * shape.kv_length * (2 if case.backward else 1)
        if implementation == "xla" and scores > MAX_DENSE_BYTES:
            raise NotImplementedError(f"left out: its dense scores take {scores / 1e9:.0f} GB")

        def compute(q: Array, k: Array, v: Array) -> Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)

        return prepare_jax(compute, case, sets, (), causal=causal)

    return prepare


def attention_mgpu(case: Case, sets: list[Operands]) -> Prepared:
    """The Hopper kernel that comes with JAX, forward, in float16: its shared memory has that dtype whatever q has."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as peer

    causal, config = _square(case), peer.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    if case.backward:
        raise NotImplementedError("left out: its gradients are of calls without a mask")
    config = replace(config, causal=causal)
    # It doesn't scale scores.
    scale = case.shape.head_size**-0.5
    halves = [tuple((x * factor).astype(jnp.float16) for x, factor in zip(s, (scale, 1, 1), strict=True)) for s in sets]
    return prepare_jax(lambda q, k, v: peer.attention(q, k, v, config), case, halves, (), causal=causal)


def torch_flash(case: Case, sets: list[Operands]) -> Prepared:
    """PyTorch's `scaled_dot_product_attention` with its flash backend, on the same memory."""
    try:
        import torch
    except ImportError:
        raise NotImplementedError("torch is not installed") from None
    if not torch.cuda.is_available():
        raise NotImplementedError("torch has no CUDA")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal = _square(case)
    tensors = [[torch.from_dlpack(x).transpose(1, 2) for x in operands] for operands in sets]

    def one(q: Any, k: Any, v: Any, *d_out: Any) -> tuple[Any, ...]:
        if case.backward:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return (out, *torch.autograd.grad(out, (q, k, v), *d_out)) if case.backward else (out,)

    def run() -> list[tuple[Any, ...]]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return [one(*operands) for operands in tensors]

    start, outs = run, run()
    torch.cuda.synchronize()
    if not case.backward:  # recorded, so that the host's share is that of one call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = run()

        def start() -> list[tuple[Any, ...]]:
            graph.replay()
            return outs

    def poison() -> None:
        for x in jax.tree.leaves(outs if not case.backward else [torch.empty_like(x) for x in outs[0]]):
            x.fill_(float("nan"))
        torch.cuda.synchronize()

    def first(outs: list[tuple[Any, ...]]) -> tuple[Array, ...]:
        results = [x.detach().transpose(1, 2).contiguous() for x in outs[0]]
        torch.cuda.synchronize()
        return tuple(map(jnp.from_dlpack, results))

    return Prepared(start, lambda _: torch.cuda.synchronize(), first, poison, causal)


def our_contenders(implementation: str = "mosaic_gpu") -> dict[str, Contender]:
    pages = {f"pages of {size}": paged(implementation, size) for size in PAGE_SIZES}
    return {OURS: contiguous(implementation), **pages}


def peers() -> dict[str, Contender]:
    return {
        "cuDNN": jax_nn("cudnn"),
        "attention_mgpu": attention_mgpu,
        "XLA": contiguous("xla"),
        "jax.nn XLA": jax_nn("xla"),
        "torch": torch_flash,
    }


def applicable(case: Case, contenders: dict[str, Contender]) -> dict[str, Contender]:
    """Pages are for chunks and decodes, as an engine asks for them."""
    cached = case.shape.kind != "prefill"
    return {name: contender for name, contender in contenders.items() if cached or not name.startswith("pages")}

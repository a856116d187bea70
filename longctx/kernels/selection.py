"""Chooses an implementation for a case and explains the choice."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from longctx.annotations import Integer
from longctx.kernels.device import TRITON_INTERPRETED, Device
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.mosaic_gpu.tile_config import HEAD_SIZES, TileConfig
from longctx.kernels.triton.tile_config import LARGEST_FLOAT32_HEAD, LARGEST_HEAD, LARGEST_HEAD_OF_PAGES, padded

# In the order in which they are preferred.
NAMES = ("mosaic_gpu", "triton", "xla", "reference")
# The releases of CUDA that are refused by the platform's version, where the version of ptxas can't be known.
_BROKEN_CUDA = range(12080, 12090)
# The first GPU with asynchronous copies to shared memory and products of bfloat16.
_AMPERE = (8, 0)


class Case(NamedTuple):
    """Everything that the choice depends on, besides the device."""

    dtype: jnp.dtype
    head_size: int
    value_size: int
    has_soft_cap: bool = False
    has_bias: bool = False
    page_size: int | None = None  # None: keys are contiguous
    is_fp8: bool = False  # the pages

    @classmethod
    def of_pages(cls, q_dtype: jnp.dtype, k_pages: Any, value_size: int | None = None) -> "Case":
        """For queries of a dtype and pages `[pages, page_size, K, H]`: an array, or its type; see `explain`."""
        _, page_size, _, head_size = k_pages.shape
        is_fp8 = k_pages.dtype in (BITS, E4M3)
        value_size = head_size if value_size is None else value_size
        return cls(q_dtype, head_size, value_size, page_size=page_size, is_fp8=is_fp8)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The implementation that is taken when none is named, and for each other one the reason why it is not.

    Attributes:
      taken: its name.
      refused: the reason for each other one, by name.
      ptxas: what assembles the kernels on a Hopper GPU; elsewhere empty.

    Examples:
      >>> import jax
      >>> from longctx.kernels import explain
      >>> q = jax.ShapeDtypeStruct((6, 8, 64), "bfloat16")
      >>> selection = explain(q, q)
      >>> selection.taken, sorted(selection.refused)
      ('xla', ['mosaic_gpu', 'reference', 'triton'])
    """

    taken: str
    refused: dict[str, str]
    ptxas: str = ""

    def __str__(self) -> str:
        rows = [f"{name:<12}{'taken' if name == self.taken else self.refused[name]}" for name in NAMES]
        return "\n".join(rows + [f"{'ptxas':<12}{self.ptxas}"] * bool(self.ptxas))


def explain(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    paged: bool = False,
    *,
    value_size: Integer | None = None,
) -> Selection:
    """Which implementation `attention` (or `paged_attention`) takes by itself, and why not another.

    Args:
      q: queries, `[*B, T, N, H]`: an array or a `jax.ShapeDtypeStruct`.
      k: keys `[*B, S, K, H]`, or pages `[pages, page_size, K, H]`, of which those of 8 bits are FP8.
      paged: whether k are pages.
      value_size: the head size of values, as of multi-head latent attention. None: that of keys.

    Returns:
      A `Selection`, for the device of the mesh of `jax.set_mesh` or else the default device. `print` shows it as a
      table with a reason for each implementation.

    Raises:
      ValueError: q or k has too few dimensions, their head sizes differ, or value_size is no positive integer.

    Examples:
      >>> import jax
      >>> from longctx.kernels import explain
      >>> q, k = jax.ShapeDtypeStruct((6, 8, 64), "bfloat16"), jax.ShapeDtypeStruct((6, 2, 64), "bfloat16")
      >>> print(explain(q, k))
      mosaic_gpu  needs an NVIDIA GPU of the Hopper generation (sm_90), got cpu 'cpu'
      triton      needs an NVIDIA GPU of compute capability 8.0 or later, got cpu 'cpu'
      xla         taken
      reference   dense: for tests, takes the memory of all scores
    """
    for name, x in (("q", q), ("k", k)):
        if len(x.shape) < 3 + (paged and name == "k"):
            raise ValueError(f"{name} must have a shape as in attention or paged_attention, got {x.shape}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k must have the head size of q, {q.shape[-1]}, got {k.shape[-1]}")
    dtype, size = jnp.dtype(q.dtype), check_value_size(value_size, q.shape[-1])
    return select(Case.of_pages(dtype, k, size) if paged else Case(dtype, q.shape[-1], size))


def check_value_size(value_size: Integer | None, head_size: int) -> int:
    """The head size of values; None: that of keys. ValueError: it is no positive integer."""
    if value_size is None:
        return head_size
    if not isinstance(value_size, Integer) or isinstance(value_size, bool) or value_size < 1:
        raise ValueError(f"value_size must be an integer of at least 1, got {value_size!r}")
    return int(value_size)


def select(case: Case) -> Selection:
    """The best implementation for the case, with reasons."""
    device = Device.target()
    ptxas = _describe_ptxas(device) if device.is_hopper and device.kind != "interpreter" else ""
    reasons = {name: unsupported_reason(case, name) for name in NAMES}
    taken = next(name for name in NAMES if reasons[name] is None)
    slower = f"slower than {taken}, which supports the case"
    refused = {name: reason or slower for name, reason in reasons.items() if name != taken}
    return Selection(taken, refused | {"reference": "dense: for tests, takes the memory of all scores"}, ptxas)


def _describe_ptxas(device: Device) -> str:
    unsure = device.ptxas.broken is None and device.cuda_version not in _BROKEN_CUDA
    return f"{device.ptxas}{'; that of CUDA 12.9.0 would miscompile mosaic_gpu: use another' if unsure else ''}"


def choose(names: Sequence[str], case: Case) -> str:
    """The first of the named implementations that supports the case, or the best one if none is named.

    Raises:
      NotImplementedError: none of them supports the case; the message says why.
    """
    if not names:
        return select(case).taken
    reasons = {name: unsupported_reason(case, name) for name in names}
    for name, reason in reasons.items():
        if reason is None:
            return name
    refused = "; ".join(f"implementation {name!r} {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"{refused}; 'xla' would serve")


def unsupported_reason(case: Case, name: str) -> str | None:
    """Why the named implementation does not support the case; None if it does."""
    of_name = {"mosaic_gpu": _mosaic_gpu_lacks, "triton": _triton_lacks}
    return of_name[name](case) if name in of_name else None


def _mosaic_gpu_lacks(case: Case) -> str | None:
    device = Device.target()
    if not device.is_hopper:
        return f"needs an NVIDIA GPU of the Hopper generation (sm_90), got {device.platform} {device.kind!r}"
    if reason := _broken_ptxas(device):
        return reason
    if case.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs a dtype of bfloat16 or float16, got {case.dtype}"
    if case.head_size not in HEAD_SIZES:
        return f"needs a head size of {', '.join(map(str, HEAD_SIZES))}, got {case.head_size}"
    if case.value_size != case.head_size:
        return f"needs values with the head size of keys, {case.head_size}, got {case.value_size}"
    if case.has_soft_cap:
        return "needs scores without logits_soft_cap"
    if case.has_bias:
        return "needs scores without bias"
    page_size, block = case.page_size, TileConfig.choose(case.head_size, 1).block_kv
    # TMA copies 128 bytes or more, and the scales of a page have 4 for each token.
    if case.is_fp8 and page_size is not None and page_size % 32:
        return f"needs FP8 pages of a multiple of 32 tokens, got {page_size}"
    if page_size is not None and (page_size % 16 or (block % page_size and page_size % block)):
        return f"needs a page size, a multiple of 16, that divides {block} or is a multiple of it, got {page_size}"
    return None


def _triton_lacks(case: Case) -> str | None:
    device = Device.target()
    if not TRITON_INTERPRETED.get() and (device.capability or (0, 0)) < _AMPERE:
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, got {device.platform} {device.kind!r}"
    if reason := _broken_ptxas(device):
        return reason
    if case.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"needs a dtype of bfloat16, float16 or float32, got {case.dtype}"
    largest = LARGEST_FLOAT32_HEAD if case.dtype == jnp.float32 else LARGEST_HEAD
    if (size := max(case.head_size, case.value_size)) > largest:
        return f"needs a head size of at most {largest}, got {size}"
    if case.has_bias:
        return "needs scores without bias"
    if case.page_size is not None and case.head_size > LARGEST_HEAD_OF_PAGES:
        return f"needs pages with a head size of at most {LARGEST_HEAD_OF_PAGES}, got {case.head_size}"
    # The plan of a step knows the size of keys alone.
    if case.page_size is not None and padded(case.value_size) > padded(case.head_size):
        return f"needs pages with values no larger than keys, {case.head_size}, got {case.value_size}"
    if case.is_fp8 and (case.head_size % 2 or case.value_size % 2):
        return f"needs FP8 pages with even head sizes, got {case.head_size} and {case.value_size}"
    return None


def _broken_ptxas(device: Device) -> str | None:
    """Why the assembler of kernels for a Hopper GPU can't be trusted with loops that have a mask."""
    broken = device.ptxas.broken
    if not device.is_hopper or not (broken or (broken is None and device.cuda_version in _BROKEN_CUDA)):
        return None
    which = f"found {device.ptxas}" if broken else "the platform's version is CUDA 12.8"
    return f"needs a ptxas that is not of CUDA 12.8.0 to 12.9.0, which miscompiles such loops: {which}"

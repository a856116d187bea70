"""Layout of a page's bytes, and the parts of them that engines of different plans have.

A page's payload is `[layers, 2, page_size, K, H]`, keys before values, of all layers and KV heads of the model, so it
does not depend on a mesh. 16-bit floats travel as their bits. Of float8 pages it is `[layers, 2, page_size, K, H + 4]`
bytes: the H bytes of a row, then its scale, a little-endian float32.
"""

import math
from typing import NamedTuple

import numpy as np

from longctx.models.footprint import KV_SCALE_BYTES
from longctx.models.validation import FP8_KV


class PageLayout(NamedTuple):
    """The shape of a page's payload.

    Attributes:
      num_layers, num_kv_heads, head_dim, page_size: of the model and the engine.
      dtype: of keys and values, such as `"bfloat16"`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def bits(self) -> np.dtype:
        """The dtype in which pages lie in memory: unsigned integers for short floats, which numpy may not know."""
        if self.dtype == FP8_KV:
            return np.dtype(np.uint8)
        return np.dtype(np.uint16) if self.dtype in ("bfloat16", "float16") else np.dtype(self.dtype)

    @property
    def has_scales(self) -> bool:
        """Whether each row of a token and KV head has a scale."""
        return self.dtype == FP8_KV

    @property
    def row_size(self) -> int:
        """Elements of `bits` of a row of a token and KV head: H, and where it has a scale, that."""
        return self.head_dim + KV_SCALE_BYTES * self.has_scales

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Return the shape of one page: `(layers, 2, page_size, K, row_size)`."""
        return self.part_shape(self.whole)

    @property
    def page_bytes(self) -> int:
        return self.part_bytes(self.whole)

    def part_shape(self, part: "PageSlice") -> tuple[int, int, int, int, int]:
        """Return the shape of a part of one page: `(layers, 2, page_size, heads, row_size)`."""
        layers, heads = (stop - first for first, stop in part)
        return layers, 2, self.page_size, heads, self.row_size

    def part_bytes(self, part: "PageSlice") -> int:
        return math.prod(self.part_shape(part)) * self.bits.itemsize

    @property
    def whole(self) -> "PageSlice":
        """All layers and heads."""
        return PageSlice((0, self.num_layers), (0, self.num_kv_heads))

    def check_part(self, part: "PageSlice") -> None:
        """Raise ValueError unless a part has layers and heads, and only those that the model has."""
        for name, (first, stop), (_, count) in zip(part._fields, part, self.whole, strict=True):
            if not 0 <= first < stop <= count:
                raise ValueError(f"part must have {name} (first, stop) of 0 to {count}, got {(first, stop)}")

    def check_same(self, other: "PageLayout", who: str) -> None:
        """ValueError, unless pages of `who` have this layout; the message names what differs."""
        pairs = zip(self._fields, self, other, strict=True)
        differs = [f"{name} {theirs} instead of {own}" for name, own, theirs in pairs if own != theirs]
        if differs:
            raise ValueError(f"{who} has pages of another layout: {', '.join(differs)}")


class PageSlice(NamedTuple):
    """Layers and KV heads, each `(first, stop)`, of all layers and KV heads of the model."""

    layers: tuple[int, int]
    heads: tuple[int, int]

    def intersect(self, other: "PageSlice") -> "PageSlice | None":
        """Return the part that both have; None if that is nothing."""
        layers, heads = _common(self.layers, other.layers), _common(self.heads, other.heads)
        return None if layers is None or heads is None else PageSlice(layers, heads)

    def within(self, outer: "PageSlice") -> tuple[slice, slice]:
        """Return the slice of these layers and heads in an array of `outer`."""
        return tuple(  # type: ignore[return-value]
            slice(own[0] - other[0], own[1] - other[0]) for own, other in zip(self, outer, strict=True)
        )


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    first, stop = max(one[0], other[0]), min(one[1], other[1])
    return (first, stop) if first < stop else None

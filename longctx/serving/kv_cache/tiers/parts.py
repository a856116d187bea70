"""Parts of pages: which layers and KV heads, what shape they have, whether some make up another."""

from collections.abc import Iterable, Sequence

import numpy as np

from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice

PartShape = tuple[int, int, int, int, int]


def part_shape(layout: PageLayout, part: PageSlice) -> PartShape:
    """Return the shape of one page: `(layers, 2, page_size, heads, row_size)`."""
    layers, heads = (stop - first for first, stop in part)
    return layers, 2, layout.page_size, heads, layout.row_size


def covers(parts: Iterable[PageSlice], whole: PageSlice) -> bool:
    """Whether parts have every layer and head of `whole`."""
    (layer, last_layer), (head, last_head) = whole
    missing = np.ones((last_layer - layer, last_head - head), bool)
    for part in parts:
        if (common := part.intersect(whole)) is not None:
            missing[common.within(whole)] = False
    return not missing.any()


def copy_pages(blocks: Sequence[PageBlock], outs: Sequence[np.ndarray | None], whole: PageSlice) -> list[bool]:
    """Copy the pages of blocks into arrays `[layers, 2, page_size, heads, row_size]` of `whole`; which are complete.

    `None`: the page is left out.
    """
    parts: list[list[PageSlice]] = [[] for _ in outs]
    for block in blocks:
        found = block.common_with(whole)
        if found is None:
            continue
        common, (layers, heads), (from_layers, from_heads) = found
        data = np.asarray(block.data)
        for page, source in enumerate(data, block.first):
            out = outs[page] if 0 <= page < len(outs) else None
            if out is not None:
                out[layers, :, :, heads] = source[from_layers, :, :, from_heads].view(out.dtype)
                parts[page].append(common)
    return [covers(there, whole) for there in parts]

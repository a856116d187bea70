"""Tiles, their blocks and the workers' shares, in numpy: every visible block once, and every piece once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import RULES, Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case as PagedCase
from paged_cases import Shape
from paged_cases import cases as paged_cases

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.mosaic_gpu import make_tiles
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu.adapter import interpreted
from longctx.kernels.mosaic_gpu.tile_config import TileConfig
from longctx.kernels.paged_attention.mosaic_gpu import ALIGNMENT, plan_mosaic_gpu
from longctx.kernels.paged_attention.operands import check_paged_operands
from longctx.kernels.paged_attention.sorted_tiles import max_rows
from longctx.kernels.work import Tile, Tiles, Work, equal_shares, whole_items

Part = tuple[int, list[int], list[int]]
share_equally, share_whole = (jax.jit(f, static_argnums=(1, 2)) for f in (equal_shares, whole_items))
plan_paged = jax.jit(plan_mosaic_gpu, static_argnums=(1, 2), static_argnames="reserved_multiprocessors")


def blocks_of(work: Work) -> tuple[dict[tuple[int, int], list[Part]], list[int]]:
    """Run the kernel's loops: (piece, full blocks, masked blocks) of each (head, tile), and each worker's blocks."""
    tiles, items, found, loads = np.asarray(work.tiles), np.asarray(work.items), {}, []
    for worker, (first, stop, first_unit, stop_unit) in enumerate(np.asarray(work.workers)):
        loads.append(0)
        for position in range(first, stop):
            tile = Tile.of(tiles, items, position, worker, first_unit, stop_unit)
            order = [int(tile.block(jnp.int32(n))) for n in range(int(tile.num_blocks))]
            num_full = int(tile.num_full)
            loads[-1] += len(order)
            if order or work.pieces is None:
                part = int(tile.piece), order[:num_full], order[num_full:]
                found.setdefault((int(tile.head), int(tile.number)), []).append(part)
    return found, loads


@st.composite
def drawn_tiles(draw: st.DrawFn) -> Tiles:
    number = draw(st.sampled_from([1, 5, 12]))  # each compiles a hundred operations
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = np.sort(rng.integers(0, draw(st.sampled_from([3, 25])), (number, 4)), 1)
    edges[rng.random(number) < 0.3] = 5  # sees nothing
    zeros = jnp.zeros(number, jnp.int32)
    return Tiles(zeros, zeros, zeros, zeros, *(jnp.asarray(edges[:, i], jnp.int32) for i in range(4)))


def check_blocks(tiles: Tiles, heads: int, found: dict[tuple[int, int], list[Part]]) -> None:
    """Every block of every tile once for each head, and masked if it is not full."""
    start, full_start, full_stop, stop = (np.asarray(x) for x in tiles[4:])
    for head, tile in np.ndindex(heads, len(start)):
        parts = found.get((head, tile), [])
        full, masked = ([block for part in parts for block in part[i]] for i in (1, 2))
        assert sorted(full) == list(range(full_start[tile], full_stop[tile]))
        edges = [*range(start[tile], full_start[tile]), *range(full_stop[tile], stop[tile])]
        assert sorted(masked) == edges


@given(drawn_tiles(), st.sampled_from([1, 3]), st.sampled_from([1, 4, 20]))
@settings(max_examples=6)
def test_equal_shares_cover_every_block_once(tiles: Tiles, heads: int, num_workers: int) -> None:
    work = share_equally(tiles, heads, num_workers)
    found, loads = blocks_of(work)
    check_blocks(tiles, heads, found)
    assert work.pieces is not None
    numbers = [piece for parts in found.values() for piece, *_ in parts]
    assert len(set(numbers)) == len(numbers)
    for item, (first, number) in enumerate(np.asarray(work.pieces)):
        parts = found.get(divmod(item, len(tiles.start)), [])
        assert [piece for piece, *_ in parts] == list(range(first, first + number))
    assert max(numbers, default=0) < len(work.pieces) + num_workers
    # Heads need not divide the workers: all have an equal share, but for the last one.
    share = max(1, -(-sum(loads) // num_workers))
    assert loads == np.clip(sum(loads) - share * np.arange(num_workers), 0, share).tolist()


@given(drawn_tiles(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 20]))
@settings(max_examples=6)
def test_whole_items_are_distributed_longest_first(tiles: Tiles, heads: int, num_workers: int) -> None:
    work = share_whole(tiles, heads, num_workers)
    found, loads = blocks_of(work)
    assert sorted(found) == [*np.ndindex(heads, len(tiles.start))]
    assert all(len(parts) == 1 for parts in found.values())
    check_blocks(tiles, heads, found)
    assert len(loads) == min(num_workers, heads * len(tiles.start))
    lengths = np.asarray(tiles.stop - tiles.start)
    assert max(loads) - min(loads) <= lengths.max()
    numbers = np.asarray(work.workers[:, 1] - work.workers[:, 0])
    assert numbers.max() - numbers.min() <= 1
    # In snake order over the workers, longest first, and all heads of a tile before the next.
    taken, workers = [], work.workers[:, :2].tolist()
    for number in range(numbers.max()):
        for first, stop in workers[:: -1 if number % 2 else 1]:
            taken += [int(work.items[first + number, 1])] if first + number < stop else []
    assert taken == np.repeat(np.argsort(-lengths, kind="stable"), heads).tolist()


def seen_by(case: Case) -> np.ndarray:
    """Bool `[entries, T, S]`."""
    q_seg, kv_seg, q_pos, kv_pos = (
        np.atleast_2d(case.masks[name]) for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    )
    seen = (q_seg[:, :, None] == kv_seg[:, None]) & (kv_seg[:, None] >= 0)
    distance = q_pos[:, :, None] - kv_pos[:, None]
    rule = rule_of(case)
    before, after = (10**6 if side is None else side for side in (rule.window[0], 0 if rule.causal else rule.window[1]))
    seen &= (distance <= before) & (-distance <= after)
    if (first := case.masks.get("q_first")) is not None:
        seen &= kv_pos[:, None] >= np.atleast_2d(first)[:, :, None]
    if (last := case.masks.get("q_last")) is not None:
        seen &= kv_pos[:, None] <= np.atleast_2d(last)[:, :, None]
    return seen


def rule_of(case: Case) -> AttentionRule:
    rule = RULES[case.rule]
    return AttentionRule(rule.get("causal", True), 1.0, rule.get("window", (None, None)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def tiles_of(rule: AttentionRule, config: TileConfig, from_keys: bool, queries: Tokens, keys: Tokens) -> Any:
    sides = rule.visible(queries), keys
    return make_tiles(1, *(sides[::-1] if from_keys else sides), config)


@pytest.mark.parametrize("from_keys", [False, True])
@given(data=st.data())
@settings(max_examples=8)
def test_tiles_of_contiguous_keys_see_what_the_mask_says(from_keys: bool, data: st.DataObject) -> None:
    """Rows are queries, or as in the gradient of keys, keys; they and the others are 300 and 700."""
    rules = ("causal", "all", "window", "both sides", "first", "last", "first and last")
    lengths = (700, 300) if from_keys else (300, 700)
    case = data.draw(cases(st.just(((), *lengths, 1, 1, 64)), rules))
    masks = {name: jnp.asarray(np.atleast_2d(x), jnp.int32) for name, x in case.masks.items()}
    queries = Tokens(*(masks.get(f"q_{name}") for name in ("positions", "segment_ids", "first", "last")))  # type: ignore[arg-type]
    config = TileConfig.choose(64, 300)
    keys = Tokens(masks["kv_positions"], masks["kv_segment_ids"])
    tiles, rows, tokens = tiles_of(rule_of(case), config, from_keys, queries, keys)
    seen = seen_by(case)[0]
    seen = seen.T if from_keys else seen
    assert len(tiles.start) == 3
    for tile in range(3):
        own = slice(tile * config.block_q, min(300, (tile + 1) * config.block_q))
        start, full_start, full_stop, stop = (int(x[tile]) for x in tiles[4:])
        for block in range(-(-700 // config.block_kv)):
            keys = slice(block * config.block_kv, (block + 1) * config.block_kv)
            part = seen[own, keys]
            assert start <= block < stop or not part.any()
            whole = part.shape[1] == config.block_kv and part.all()
            assert whole or not full_start <= block < full_stop
            # What the kernel's mask compares.
            of_others = [np.asarray(x[0, keys]) for x in tokens]
            of_rows = [np.asarray(x[tile, : own.stop - own.start])[:, None] for x in rows]
            (last, segment, *first), others = (of_others, of_rows) if from_keys else (of_rows, of_others)
            positions, segments = others
            mask = (positions <= last) & (segments == segment) & (positions >= (first[0] if first else -(2**31)))
            np.testing.assert_array_equal(mask[:, : part.shape[1]], part)
            assert not mask[:, part.shape[1] :].any()


PAGED = [
    Shape(rows=90, heads=6, kv_heads=2, size=64, page_size=16, sequences=5, entries=30, index_given=True),
    Shape(rows=25, heads=7, kv_heads=1, size=64, page_size=32, sequences=4, entries=9, index_given=False),
]


@given(paged_cases(PAGED, ("causal", "first")), st.sampled_from([None, 1, 90]))
@settings(max_examples=4)
def test_tiles_of_paged_rows(case: PagedCase, max_rows_per_sequence: int | None) -> None:
    """Each row has one slot in one tile of its sequence, and a tile's blocks hold exactly the keys that it sees.

    Also where a sequence has more rows than was said.
    """
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in case[:3])
    metadata = {name: None if x is None else jnp.asarray(x, jnp.int32) for name, x in case.metadata.items()}
    operands = check_paged_operands(*arrays, **metadata)
    group = case.q.shape[1] // case.k_pages.shape[2]
    with interpreted():
        plan = plan_paged(operands, None, max_rows_per_sequence)
        beside_hops = plan_paged(operands, None, max_rows_per_sequence, reserved_multiprocessors=1)
    assert (len(plan.work.workers), len(beside_hops.work.workers)) == (2, 1)
    table, all_places, last = map(np.asarray, (plan.work.tiles, plan.place, plan.seen[0]))
    config = TileConfig.choose(64, last.shape[1])
    tokens, heads = np.asarray(plan.token), np.asarray(plan.head)
    assert len(tokens) == max_rows(len(case.q), group, len(case.metadata["kv_lengths"]), ALIGNMENT)
    # TMA copies rows into tiles of 8 in shared memory: from any other row on, some would arrive as zeros.
    assert not (table[:, 1] % 8).any()
    lengths, sequences = case.metadata["kv_lengths"], case.metadata["q_sequence"]
    q_first = np.maximum(case.metadata.get("q_first", np.zeros(len(sequences), int)), 0)
    firsts = np.asarray(plan.seen[1]) if case.rule == "first" else np.zeros_like(last)
    places = set()
    for row, sequence in enumerate(sequences):
        if sequence < 0:
            assert (all_places[row] == -1).all()
            continue
        seen = max(0, min(case.metadata["q_positions"][row] + 1, lengths[sequence]))
        for g in range(group):
            tile, slot = divmod(int(all_places[row, g]), config.block_q)
            places.add((tile, slot))
            assert table[tile, 2] == sequence
            assert table[tile, 3] == lengths[sequence]
            assert last[tile, slot] == seen - 1
            first = min(q_first[row], lengths[sequence])
            assert firsts[tile, slot] == first
            # What the kernel reads there.
            at = table[tile, 1] + slot
            assert (tokens[at], heads[at]) == (row, g)
            start, full_start, full_stop, stop = (x * config.block_kv for x in table[tile, 4:])
            assert start <= first
            assert seen <= stop or first >= seen
            assert first <= full_start <= full_stop <= seen or full_start == full_stop
    assert len(places) == group * (sequences >= 0).sum()


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 64, 65, 1000])
def test_tile_config_fits_into_shared_memory(head_size: int, num_rows: int) -> None:
    config = TileConfig.choose(head_size, num_rows)
    assert (config.block_q + 2 * config.num_stages * config.block_kv) * head_size * 2 + 1024 <= 227 * 1024
    assert config.num_consumers == (1 if num_rows <= 64 else 2)

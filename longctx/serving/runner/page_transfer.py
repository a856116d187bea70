"""Reads pages from the pools of devices and writes them, beside the steps: no copy of a pool, and no wait for a step.

Every device runs small programs of its own, which its order of execution puts between two steps: a read gathers rows of
the pool into fresh memory, a write updates the donated pool in place. Where pages lie on one rank, the others do
nothing and are sent nothing; and processes of one mesh, whose blocks come at different times, need not agree on an
order, as nothing is exchanged.

A device's pool is `[layers * pages, page_size, K, H]` (`paged_cache.PagedCache`): the page `page` of the layer in place
`i` of the stage is its row `i * pages + page`.

Programs have few shapes, `_BUCKETS` times the layers of a stage in rows, and are compiled ahead: a read or write of any
pages, layers and heads never waits for XLA in the thread that runs steps.
"""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from longctx.models import LlamaConfig
from longctx.models.layer_runs import layers_of_stages, layers_per_stage
from longctx.serving.kv_cache.connector import Needed, PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.runner.layer_pages import LayerPages
from longctx.serving.runner.page_programs import PoolShape, compile_read, compile_write, cut_block, slice_pages
from longctx.serving.runner.paged_cache import PagedCache

_BUCKETS = (1, 8, 64)  # pages
MAX_BUCKET_BYTES = 64 << 20  # of a program's rows on a device


class DevicePart(NamedTuple):
    """Part that one device has of the pages of its context rank.

    Attributes:
      stage, rank: of the device.
      part: layers and KV heads of the model.
      padding: layers of zeros before the first of its layers, where stages are uneven.
      is_first: whether it is the first device that has this part; others repeat it, where `tensor` exceeds the model's
        KV heads.
    """

    stage: int
    rank: int
    part: PageSlice
    padding: int
    is_first: bool

    def rows(self, pages: "_Pages", layers: tuple[int, int], pools: LayerPages) -> np.ndarray:
        """Rows of the pool, int32 `[pages * layers]`, page after page, of pages of the rank and layers of the model.

        A row that there is none of is -1.
        """
        places = np.arange(*layers) - self.part.layers[0] + self.padding
        window = None if pages.window is None else np.where(pages.window < 0, -1, pages.window % pools.num_window_pages)
        return pools.rows(self.stage, places, pages.numbers % pools.num_pages, window).reshape(-1)


class _Pages(NamedTuple):
    """Pages of all ranks, and window pages, of which -1 is none; in a model without sliding layers None."""

    numbers: np.ndarray
    window: np.ndarray | None

    def take(self, at: np.ndarray | slice) -> "_Pages":
        return _Pages(self.numbers[at], None if self.window is None else self.window[at])


def process_part(mesh: Mesh, config: LlamaConfig) -> PageSlice:
    """The least part of a page that has all that this process's devices have of it."""
    parts = device_parts(mesh, config).items()
    own = [each.part for device, each in parts if device.process_index == jax.process_index()]
    layers, heads = ((min(first), max(stop)) for first, stop in (zip(*x, strict=True) for x in zip(*own, strict=True)))
    return PageSlice(layers, heads)


def device_parts(mesh: Mesh, config: LlamaConfig) -> dict[jax.Device, DevicePart]:
    """Return the part of each device of a mesh."""
    stages, _, tensor = mesh.devices.shape
    layers = layers_of_stages(config.num_layers, stages)
    parts = {}
    for (stage, rank, index), device in np.ndenumerate(mesh.devices):
        real = [layer for layer in layers[stage] if layer is not None]
        first, stop = index * config.num_kv_heads // tensor, -(-(index + 1) * config.num_kv_heads // tensor)
        repeats = max(1, tensor // config.num_kv_heads)
        part = PageSlice((real[0], real[-1] + 1), (first, stop))
        parts[device] = DevicePart(stage, rank, part, len(layers[stage]) - len(real), index % repeats == 0)
    return parts


class _Part(NamedTuple):
    """Rows on their way to a device: arguments of its program."""

    device: int  # its number among the process's
    program: Any
    arguments: tuple[Array, ...]  # rows, count, head, data


class PlacedBlock(NamedTuple):
    """A block whose bytes are on the devices that it is for, in arrays of their own."""

    parts: list[_Part]


class _DeviceBlock(NamedTuple):
    """Rows that were read from one device: `numbers` are the pages, among those that were asked for."""

    numbers: np.ndarray
    part: PageSlice
    rows: Array


class DevicePageRead:
    """Pages that are copied from the devices; see `connector.PageRead`. Any thread may wait for them.

    In a process of several it has what the process's devices have.
    """

    def __init__(self, blocks: list[_DeviceBlock]) -> None:
        self._blocks = blocks

    @property
    def num_bytes(self) -> int:
        """That it takes on devices, and on the host, as long as it is referred to."""
        return sum(block.rows.nbytes for block in self._blocks)

    def result(self) -> list[PageBlock]:
        """Wait for the pages: blocks of consecutive ones, numpy arrays `[pages, layers, 2, page_size, K, row_size]`."""
        found = []
        for numbers, part, rows in self._blocks:
            data = _as_pages(np.asarray(rows), len(numbers), part)
            found += [PageBlock(int(numbers[first]), part, data[first:stop]) for first, stop in _runs(numbers)]
        return found

    def on_devices(self) -> list[PageBlock]:
        """The same blocks in arrays of JAX on the devices that have them, without waiting."""
        found = []
        for numbers, part, rows in self._blocks:
            for first, stop in _runs(numbers):
                data = slice_pages(rows, np.int32(first), stop - first, part.layers[1] - part.layers[0])
                found.append(PageBlock(int(numbers[first]), part, data))
        return found


class PageTransfer:
    """Reads and writes pages of the pools of a mesh's devices; of several processes, each those of its own devices.

    A page's payload has all layers. In a model with sliding layers, those of these layers are in window pages, which
    calls name beside the pages: as many, each of the rank of its page, and -1 where there is none. Such layers of a
    payload are not written, and in one that is read they hold anything.
    """

    def __init__(
        self, mesh: Mesh, config: LlamaConfig, num_pages: int, page_size: int, dtype: Any, num_window_pages: int = 0
    ) -> None:
        self.layout = PageLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, page_size, jnp.dtype(dtype).name
        )
        parts = device_parts(mesh, config)
        self.devices = {device: part for device, part in parts.items() if device.process_index == jax.process_index()}
        self._pools = LayerPages.of(config, mesh.shape["stage"], num_pages, num_window_pages)
        self._num_pages, self._num_ranks = num_pages, mesh.shape["context"]
        self._sliding = np.array(config.sliding_layers or (False,) * config.num_layers, bool)
        self._is_cpu = mesh.devices.flat[0].platform == "cpu"
        self._layers = layers_per_stage(config.num_layers, mesh.shape["stage"])
        heads = next(iter(parts.values())).part.heads
        row_bytes = 2 * page_size * (heads[1] - heads[0]) * self.layout.row_size * self.layout.bits.itemsize
        rows = [pages * self._layers for pages in _BUCKETS]
        self._buckets = [*reversed([n for n in rows if n == rows[0] or n * row_bytes <= MAX_BUCKET_BYTES])]
        self._programs: dict[Any, Any] = {}
        self._compiling = threading.Lock()

    def read(
        self, cache: PagedCache, pages: List[int], layers: tuple[int, int], window_pages: List[int] | None = None
    ) -> DevicePageRead:
        """Begin to copy layers `(first, stop)` of pages to the host."""
        numbers, checked = self._check_pages(pages), self._check(pages, window_pages)
        if not 0 <= layers[0] < layers[1] <= self.layout.num_layers:
            raise ValueError(f"layers must be a part of 0 to {self.layout.num_layers}, got {layers}")
        asked = PageSlice(layers, (0, self.layout.num_kv_heads))
        blocks = []
        for shards in zip(*(pool.addressable_shards for pool in _pools(cache)), strict=True):
            device = self.devices[shards[0].device]
            part, here = device.part.intersect(asked), np.flatnonzero(numbers // self._num_pages == device.rank)
            if part is None or not here.size or not device.is_first:
                continue
            for at, bucket in self._split(here, part):
                rows = device.rows(checked.take(at), part.layers, self._pools).reshape(len(at), -1)
                # What there is no row of is read from another layer of the page.
                rows = np.maximum(np.where(rows < 0, rows.max(1, keepdims=True), rows), 0)
                rows = _pad(rows.reshape(-1), bucket)
                program = self._program(shards[0].device, bucket)
                found = program(tuple(shard.data for shard in shards), jax.device_put(rows, shards[0].device))
                found.copy_to_host_async()
                blocks.append(_DeviceBlock(at, part, found))
        return DevicePageRead(blocks)

    def place(self, pages: List[int], block: PageBlock, window_pages: List[int] | None = None) -> PlacedBlock:
        """Send a block to the devices that it is for, and wait until it is there; any thread may.

        `pages` and `window_pages` are those of the whole load. CPUs read the memory of numpy arrays where it is, once
        the block is written: see `write`.
        """
        self._check_block(block, len(pages))
        checked = self._check(pages, window_pages).take(slice(block.first, block.first + len(block.data)))
        numbers = checked.numbers
        data, parts = block.data, list[_Part]()
        if self._is_cpu:
            data = np.asarray(data)
        for index, (device, own) in enumerate(self.devices.items()):
            part, here = own.part.intersect(block.part), np.flatnonzero(numbers // self._num_pages == own.rank)
            if part is None or not here.size:
                continue
            for at, bucket in self._split(here, part):
                rows = own.rows(checked.take(at), part.layers, self._pools)
                head = part.heads[0] - own.part.heads[0]
                cut = _cut(data, at, part.within(block.part), bucket)
                if (rows < 0).any():
                    kept = np.flatnonzero(rows >= 0)
                    if not kept.size:
                        continue
                    rows, cut = rows[kept], cut[_pad(kept, bucket)]
                program = self._program(device, bucket, part.heads[1] - part.heads[0])
                scalars = np.int32(len(rows)), np.int32(head)
                arguments = jax.device_put((_pad(rows, bucket), *scalars, cut), device, may_alias=True)
                parts.append(_Part(index, program, arguments))
        jax.block_until_ready([part.arguments for part in parts])
        return PlacedBlock(parts)

    def write(self, cache: PagedCache, blocks: List[PlacedBlock]) -> tuple[PagedCache, list[Array]]:
        """Write blocks over their pages, in place: the cache is donated.

        Returns:
          The cache, and arrays that are there once CPUs have read the blocks' memory, which must not change before.
        """
        order = {device: index for index, device in enumerate(self.devices)}
        pools = _pools(cache)
        shards = [sorted(pool.addressable_shards, key=lambda shard: order[shard.device]) for pool in pools]
        devices = [tuple(shard.data for shard in each) for each in zip(*shards, strict=True)]
        done = []
        for block in blocks:
            for index, program, arguments in block.parts:
                devices[index], written = program(devices[index], *arguments)
                done.append(written)
        arrays = [
            jax.make_array_from_single_device_arrays(pool.shape, pool.sharding, list(data))
            for pool, data in zip(pools, zip(*devices, strict=True), strict=True)
        ]
        return PagedCache(*arrays), done if self._is_cpu else []

    def needed(self, pages: List[int], window_pages: List[int] | None = None) -> np.ndarray:
        """The parts of pages that devices of this process have: bool `[pages, layers, KV heads]`.

        Where a page has no window page they have none of its sliding layers.
        """
        ranks, layout = self._check_pages(pages) // self._num_pages, self.layout
        has = np.zeros((len(ranks), layout.num_layers, layout.num_kv_heads), bool)
        for own in self.devices.values():
            has[np.ix_(ranks == own.rank, np.arange(*own.part.layers), np.arange(*own.part.heads))] = True
        if window_pages is not None:
            has[np.ix_(np.array(window_pages) < 0, self._sliding)] = False
        return has

    def needed_of(self, window_pages: List[int]) -> Needed:
        """Return what a load needs of pages whose first ones have no window page; the last one always comes whole."""
        first = next((number for number, window in enumerate(window_pages) if window >= 0), len(window_pages))
        full = np.flatnonzero(~self._sliding).tolist()
        runs = [(full[first], full[stop - 1] + 1) for first, stop in _runs(np.array(full))] if full else []
        return Needed(min(first, len(window_pages) - 1), tuple(runs))

    def compile(self) -> None:
        """Compile all programs of whole heads; for a block of fewer heads `place` compiles one."""
        for device, own in self.devices.items():
            for bucket in self._buckets:
                self._program(device, bucket)
                self._program(device, bucket, own.part.heads[1] - own.part.heads[0])

    def _split(self, here: np.ndarray, part: PageSlice) -> Iterator[tuple[np.ndarray, int]]:
        """Pages in as many parts as there are programs to run, with the rows of each program."""
        layers = part.layers[1] - part.layers[0]
        start = 0
        while start < len(here):
            left = len(here) - start
            bucket = next((x for x in self._buckets if x // layers <= left), self._buckets[-1])
            count = min(bucket // layers, left)
            yield here[start : start + count], bucket
            start += count

    def _program(self, device: jax.Device, bucket: int, heads: int = 0) -> Any:
        """Return the compiled program that reads rows, or that writes `heads` heads of them."""
        key = device, bucket, heads
        if key not in self._programs:
            with self._compiling:
                if key not in self._programs:
                    self._programs[key] = self._compile(device, bucket, heads)
        return self._programs[key]

    def _compile(self, device: jax.Device, bucket: int, heads: int) -> Any:
        own, layout = self.devices[device].part.heads, self.layout
        pool = PoolShape(layout, self._pools.total, own[1] - own[0])
        return compile_write(device, pool, bucket, heads, self._is_cpu) if heads else compile_read(device, pool, bucket)

    def _check_pages(self, pages: List[int]) -> np.ndarray:
        numbers, total = np.asarray(pages, np.int64).reshape(-1), self._num_pages * self._num_ranks
        if numbers.size and (numbers.min() < 0 or numbers.max() >= total):
            raise ValueError(f"pages must be from 0 to {total - 1}, got {sorted(pages)}")
        return numbers

    def _check(self, pages: List[int], window_pages: List[int] | None) -> _Pages:
        numbers, each = self._check_pages(pages), self._pools.num_window_pages
        if (window_pages is None) != (each == 0):
            raise ValueError(f"window_pages must be given where layers are sliding, and only there, got {window_pages}")
        if window_pages is None:
            return _Pages(numbers, None)
        window = np.asarray(window_pages, np.int64).reshape(-1)
        if len(window) != len(numbers) or (window < -1).any():
            raise ValueError(f"window_pages must be {len(numbers)}, each -1 or a page, got {window_pages}")
        if (wrong := (window >= 0) & (window // each != numbers // self._num_pages)).any():
            at = int(np.argmax(wrong))
            raise ValueError(f"window_pages must be of their pages' ranks, got {window[at]} for page {numbers[at]}")
        return _Pages(numbers, window)

    def _check_block(self, block: PageBlock, num_pages: int) -> None:
        layout, part = self.layout, block.part
        if part.intersect(layout.whole) != part:
            raise ValueError(f"block must be of a part of {layout.whole}, got {part}")
        shape = part.layers[1] - part.layers[0], 2, layout.page_size, part.heads[1] - part.heads[0], layout.row_size
        if block.data.shape[1:] != shape or block.data.dtype != layout.bits:
            got = f"{block.data.dtype}{list(block.data.shape[1:])}"
            raise ValueError(f"block must have pages {layout.bits}{list(shape)}, got {got}")
        if not (block.first >= 0 and block.first + len(block.data) <= num_pages):
            stop = block.first + len(block.data)
            raise ValueError(
                f"block must be of pages 0 to {num_pages - 1} of its load, got {block.first} to {stop - 1}"
            )


def _pools(cache: PagedCache) -> list[Array]:
    """The arrays that a cache has."""
    return [pool for pool in cache if pool is not None]


def _pad(rows: np.ndarray, bucket: int) -> np.ndarray:
    """Rows up to a program's number: the last one again, which reads need not look at, and writes do not write."""
    return np.pad(rows, (0, bucket - len(rows)), mode="edge")


def _cut(data: Any, pages: np.ndarray, within: tuple[slice, slice], bucket: int) -> Any:
    """Rows `[bucket, 2, page_size, heads, row_size]` of some pages, layers and heads of a block."""
    layers, heads = within
    if not isinstance(data, np.ndarray):
        count, width = layers.stop - layers.start, heads.stop - heads.start
        at = _pad(pages.astype(np.int32), bucket // count)
        return cut_block(data, at, np.int32(layers.start), np.int32(heads.start), count, width, bucket)
    if pages[-1] - pages[0] + 1 == len(pages):
        cut = data[pages[0] : pages[-1] + 1, layers, :, :, heads]
    else:
        cut = data[pages][:, layers, :, :, heads]
    rows = np.ascontiguousarray(cut).reshape(-1, *cut.shape[2:])
    if len(rows) == bucket:
        return rows
    padded = np.empty((bucket, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def _as_pages(rows: np.ndarray, count: int, part: PageSlice) -> np.ndarray:
    layers = part.layers[1] - part.layers[0]
    return rows[: count * layers].reshape(count, layers, *rows.shape[1:])


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return where consecutive numbers begin and end."""
    ends = [*np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers)]
    yield from zip([0, *ends[:-1]], ends, strict=True)

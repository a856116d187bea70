"""What each warpgroup of the forward kernel does, by its own `schedule`, as operations for `barrier_checker`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from barrier_checker import Arrive, Barrier, Copy, Done, Operation, Read, Slot, Wait, Write

from longctx.kernels.mosaic_gpu import schedule
from longctx.kernels.mosaic_gpu.schedule import Pipeline


class Tile(NamedTuple):
    """A tile at a position of the worker's list."""

    num_blocks: int
    num_full: int
    position: int = 0


class Product(NamedTuple):
    """A product that was issued, with what it reads."""

    slots: tuple[Slot, ...]
    result: Any


class Weights(NamedTuple):
    position: int
    block: int
    masked: bool


class Recorder:
    """The machine of `schedule`, which writes down operations. It checks what needs no other role: the dataflow."""

    def __init__(self, pipeline: Pipeline, tiles: list[Tile], consumer: int = -1) -> None:
        self.pipeline, self.tiles, self.consumer = pipeline, tiles, consumer
        self.operations: list[Operation] = []
        self.products: list[tuple[list[Product], Product]] = []  # in flight: accumulators, in the order of issue
        self.current = Tile(0, 0)
        blocks = [(tile.position, n) for tile in tiles for n in range(tile.num_blocks)]
        self.next_scores, self.next_converted = iter(blocks), iter([block for block in blocks for _ in "kv"])

    # Both roles

    def wait(self, barrier: str, index: int) -> None:
        self.operations.append(Wait((barrier, index)))

    def arrive(self, barrier: str, index: int) -> None:
        self.operations.append(Arrive((barrier, index)))

    def loop(self, start: int, stop: int, step: Callable[[int, Any], Any], carry: Any) -> Any:
        return functools.reduce(lambda carry, n: step(n, carry), range(start, stop), carry)

    def when(self, condition: bool, action: Callable[[], None]) -> None:
        if condition:
            action()

    def minimum(self, a: int, b: int) -> int:
        return min(a, b)

    def remainder(self, a: int, b: int) -> int:
        return a % b

    def integer(self, a: int) -> int:
        return a

    def tile(self, position: int) -> Tile:
        self.current = self.tiles[position]
        return self.current

    # The producer

    def copy_rows(self, tile: Tile, consumer: int) -> None:
        self.operations.append(Copy(("q_ready", consumer), ("q", consumer), tile.position))

    def find(self, tile: Tile, n: int) -> None:
        pass

    def copy_block(self, name: str, tile: Tile, n: int, stage: int) -> None:
        for slot in self.parts(name, stage):
            self.operations.append(Copy((f"{name}_ready", stage), slot, (tile.position, n)))

    def parts(self, name: str, stage: int) -> list[Slot]:
        """The slots of a block, each filled by one copy; of what is converted, one."""
        return [
            (name, stage, part) for part in range(self.pipeline.copies if name in self.pipeline.copied.names else 1)
        ]

    # The converter

    def convert(self, source: str, source_stage: int, name: str, stage: int) -> None:
        block = next(self.next_converted)
        parts = self.parts(source, source_stage)
        self.operations += [Read(slot, block) for slot in parts] + [Done(slot) for slot in parts]
        self.operations += [Write(slot, ..., block) for slot in self.parts(name, stage)]

    # A consumer. The state is the blocks of a tile whose softmax and whose product with the values is done.

    def begin(self, tile: Tile) -> tuple[int, tuple[int, int]]:
        return tile.position, (0, 0)

    def softmax(
        self, tile: Tile, mask: int | None, n: int, state: tuple[int, int], scores: tuple[int, int]
    ) -> tuple[tuple[int, int], Weights]:
        assert (scores, state) == ((tile.position, n), (n, n))
        assert mask == tile.position or (mask is None and n < tile.num_full)
        return (n + 1, n), Weights(tile.position, n, mask is not None)

    def clean(self, tile: Tile, n: int, stage: int) -> None:
        for slot in self.parts("v", stage):
            self.operations.append(Write(slot, (tile.position, n), (tile.position, n, "clean")))

    def multiply(self, state: tuple[int, int], products: Callable[..., Any], scores: bool, values: bool) -> Any:
        accumulators: list[list[Product]] = [[] for _ in range(scores + values)]
        results = list(products(*accumulators))
        if values:
            result = results.pop(0)
            assert result == (self.current.position, state[1])
            state = (state[0], state[1] + 1)
        assert len(results) == scores
        return state, results[0] if scores else None

    def issue(self, accumulator: list[Product], reads: list[Read], result: Any) -> None:
        self.operations += reads
        product = Product(tuple(read.slot for read in reads), result)
        accumulator.append(product)
        self.products.append((accumulator, product))

    def issue_scores(self, accumulator: list[Product], stage: int) -> None:
        block = next(self.next_scores)
        reads = [Read(slot, block) for slot in self.parts("k", stage)]
        self.issue(accumulator, [Read(("q", self.consumer), block[0]), *reads], block)

    def issue_values(self, accumulator: list[Product], weights: Weights, stage: int) -> None:
        content = (weights.position, weights.block, *(("clean",) if weights.masked else ()))
        self.issue(accumulator, [Read(slot, content) for slot in self.parts("v", stage)], content[:2])

    def awaited(self, accumulator: list[Product], in_flight: int = 0) -> Any:
        while len(self.products) > in_flight:
            self.operations += [Done(slot) for slot in self.products.pop(0)[1].slots]
        assert not any(other is accumulator for other, _ in self.products), "its product is still in flight"
        (product,) = accumulator
        return product.result

    def store(self, tile: Tile, state: tuple[int, int]) -> None:
        assert state == (tile.num_blocks, tile.num_blocks)
        assert not self.products

    def store_empty(self, tile: Tile) -> None:
        assert tile.num_blocks == 0


def roles_of(
    pipeline: Pipeline, tiles: list[Tile], module: ModuleType = schedule
) -> tuple[dict[str, list[Operation]], dict[Barrier, int]]:
    """The operations of each role over a worker's tiles, and the arrivals of each barrier."""
    tiles = [tile._replace(position=position) for position, tile in enumerate(tiles)]
    producer = Recorder(pipeline, tiles)
    module.produce(producer, 0, len(tiles))
    roles = {"producer": producer.operations}
    if pipeline.num_fp8_stages:
        converter = Recorder(pipeline, tiles)
        module.convert(converter, 0, len(tiles))
        roles["converter"] = converter.operations
    for number in range(pipeline.num_consumers):
        consumer = Recorder(pipeline, tiles, number)
        module.consume(consumer, 0, len(tiles))
        roles[f"consumer {number}"] = consumer.operations
    arrivals = {(name, i): spec.arrivals for name, spec in pipeline.barriers.items() for i in range(spec.number)}
    return roles, arrivals

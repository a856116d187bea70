"""What each warpgroup of the forward kernel does, by its own `schedule`, as operations for `barrier_checker`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from barrier_checker import Arrive, Barrier, Copy, Done, Fault, Operation, Read, Slot, Wait, Write

from longctx.kernels.mosaic_gpu import schedule
from longctx.kernels.mosaic_gpu.schedule import Pipeline, Ring


class Tile(NamedTuple):
    """A tile at a position of the worker's list."""

    num_blocks: int
    num_full: int
    position: int = 0


class Weights(NamedTuple):
    """Of a block of the tile at a position."""

    position: int
    block: int


class Sum(NamedTuple):
    """acc: over so many blocks of the tile at a position, scaled to the peak after a block."""

    position: int
    blocks: int
    scaled: int


class Accumulator:
    """Of a product that begins with `start`."""

    def __init__(self, start: Sum | None) -> None:
        self.start, self.result = start, None


class Recorder:
    """The machine of `schedule`, which writes down operations. It checks what needs no other role: the dataflow."""

    def __init__(self, pipeline: Pipeline, tiles: list[Tile], consumer: int = -1) -> None:
        self.pipeline, self.tiles, self.consumer = pipeline, tiles, consumer
        self.operations: list[Operation] = []
        self.products: list[tuple[Accumulator, list[Slot]]] = []  # in flight, in the order of issue
        blocks = [(tile.position, n) for tile in tiles for n in range(tile.num_blocks)]
        self.next_scores, self.next_converted = iter(blocks), iter([block for block in blocks for _ in "kv"])

    # All roles

    def wait(self, barrier: str, index: int) -> None:
        self.operations.append(Wait((barrier, index)))

    def arrive(self, barrier: str, index: int) -> None:
        """What is called free, no product of this role may read (others are the checker's)."""
        if any((barrier, index) == (f"{slot[0]}_free", slot[1]) for _, slots in self.products for slot in slots):
            raise Fault(f"{barrier} {index}: a product still reads that")
        self.operations.append(Arrive((barrier, index)))

    def loop(self, start: int, stop: int, step: Callable[[int, Any], Any], carry: Any) -> Any:
        return functools.reduce(lambda carry, n: step(n, carry), range(start, stop), carry)

    def when(self, condition: bool, action: Callable[[], None]) -> None:
        if condition:
            action()

    def branch(self, condition: bool, function: Callable[[Any], Any], carry: Any) -> Any:
        return function(carry) if condition else carry

    def minimum(self, a: int, b: int) -> int:
        return min(a, b)

    def maximum(self, a: int, b: int) -> int:
        return max(a, b)

    def remainder(self, a: int, b: int) -> int:
        return a % b

    def integer(self, a: int) -> int:
        return a

    def tile(self, position: int) -> Tile:
        return self.tiles[position]

    # The producer

    def copy_rows(self, tile: Tile, consumer: int) -> None:
        self.operations.append(Copy(("q_ready", consumer), ("q", consumer), tile.position))

    def find(self, tile: Tile, n: int) -> None:
        pass

    def copy_block(self, ring: Ring, tile: Tile, n: int, stage: int) -> None:
        for slot in self.parts(ring, stage):
            self.operations.append(Copy((ring.ready, stage), slot, (tile.position, n)))

    def parts(self, ring: Ring, stage: int) -> list[Slot]:
        """The slots of a block, each filled by one copy; of what is converted, one."""
        copies = self.pipeline.copies if ring in self.pipeline.copied.both else 1
        return [(ring.stages, stage, part) for part in range(copies)]

    # The converter

    def convert(self, source: Ring, source_stage: int, ring: Ring, stage: int) -> None:
        block = next(self.next_converted)
        parts = self.parts(source, source_stage)
        self.operations += [Read(slot, (block,)) for slot in parts] + [Done(slot) for slot in parts]
        self.operations += [Write(slot, ..., block) for slot in self.parts(ring, stage)]

    # A consumer

    def begin(self, tile: Tile) -> tuple[int, Sum, int]:
        return tile.position, Sum(tile.position, 0, 0), 0

    def weigh(
        self, tile: Tile, mask: int | None, n: int, softmax: int, scores: tuple[int, int]
    ) -> tuple[int, Weights, int]:
        assert (scores, softmax) == ((tile.position, n), n)
        assert mask == tile.position or (mask is None and n < tile.num_full)
        return n + 1, Weights(tile.position, n), n

    def scale(self, acc: Sum, decay: int) -> Sum:
        assert acc == Sum(acc.position, decay, decay - 1)
        return acc._replace(scaled=decay)

    def narrow(self, weights: Weights) -> Weights:
        return weights

    def clean(self, tile: Tile, n: int, stage: int) -> None:
        for slot in self.parts(self.pipeline.multiplied.of_values, stage):
            self.operations.append(Write(slot, (tile.position, n), (tile.position, n, "clean")))

    def multiply(self, products: Callable[..., Any], scores: bool, acc: Any = None, like: Any = None) -> Any:
        return products(*[Accumulator(start) for start in [None] * scores + ([] if acc is None else [acc])])

    def issue(self, accumulator: Accumulator, reads: list[Read], result: Any) -> None:
        assert accumulator.result is None, "an accumulator takes one product"
        accumulator.result = result
        self.operations += reads
        self.products.append((accumulator, [read.slot for read in reads]))

    def issue_scores(self, accumulator: Accumulator, stage: int) -> None:
        block = next(self.next_scores)
        reads = [Read(slot, (block,)) for slot in self.parts(self.pipeline.multiplied.of_keys, stage)]
        self.issue(accumulator, [Read(("q", self.consumer), block[:1]), *reads], block)

    def issue_values(self, accumulator: Accumulator, weights: Weights, stage: int) -> None:
        position, n = weights
        assert accumulator.start == Sum(position, n, n)
        # A full block may be clean, as it stays what it is.
        contents = [(position, n, "clean"), *([(position, n)] if n < self.tiles[position].num_full else [])]
        reads = [Read(slot, tuple(contents)) for slot in self.parts(self.pipeline.multiplied.of_values, stage)]
        self.issue(accumulator, reads, Sum(position, n + 1, n))

    def awaited(self, accumulator: Accumulator, in_flight: int = 0) -> Any:
        while len(self.products) > in_flight:
            self.operations += [Done(slot) for slot in self.products.pop(0)[1]]
        assert not any(other is accumulator for other, _ in self.products), "its product is still in flight"
        return accumulator.result

    def store(self, tile: Tile, acc: Sum, softmax: int) -> None:
        assert (acc, softmax) == (Sum(tile.position, tile.num_blocks, tile.num_blocks - 1), tile.num_blocks)
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

"""The order of waits, arrivals and data accesses of the forward kernel's warpgroups, written once.

`produce` and `consume` are the roles of a thread block, and `convert` where pages are FP8. They act on a machine: the
kernel's emits Pallas operations (`forward.py`); the one of `tests/kernels` records them, and every order in which the
roles can run is searched for deadlocks and races. Nothing here depends on JAX.

The producer copies the rows of each tile to `q` (a slot for each consumer) and its keys and values, block by block, to
the rings `k` and `v` (a slot for each stage). A consumer computes, of block n,

    scores(n) = q @ k(n).T,   weights(n) = exp(scores(n) - peak so far),   acc = acc * decay + weights(n) @ v(n)

and multiplies in turns with the other consumer: in one turn it issues scores(n + 1) and weights(n) @ v(n) together, so
that the tensor cores go from one to the next. It computes weights(n + 1) while its own second product runs, and while
the other consumer has its turn.

Blocks of FP8 pages are copied to the rings `k_fp8` and `v_fp8` instead. The converter moves them to `k` and `v`, of
which the consumers know nothing else.

Source: FlashAttention-3 (Shah et al. 2024), 3.1 and 3.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable


class BarrierSpec(NamedTuple):
    """`number` barriers; a phase of each is complete after `arrivals` arrivals of a warpgroup or of a copy."""

    number: int
    arrivals: int


class Ring(NamedTuple):
    """Names of the stages of a ring, which hold blocks of keys or of values, and of their barriers."""

    stages: str
    ready: str
    free: str
    half: int  # 0: keys, 1: values


_MULTIPLIED = Ring("k", "k_ready", "k_free", 0), Ring("v", "v_ready", "v_free", 1)
_FP8 = Ring("k_fp8", "k_fp8_ready", "k_fp8_free", 0), Ring("v_fp8", "v_fp8_ready", "v_fp8_free", 1)


class Rings(NamedTuple):
    """A ring for keys and one for values."""

    of_keys: Ring
    of_values: Ring
    num_stages: int
    arrivals: int  # that make a stage ready

    @property
    def both(self) -> tuple[Ring, Ring]:
        return self.of_keys, self.of_values


class Pipeline(NamedTuple):
    """Static sizes."""

    num_consumers: int  # 1 or 2
    num_stages: int
    copies: int  # copies that bring a block of keys, or of values
    num_fp8_stages: int = 0  # 0: blocks are copied as they are multiplied, and there is no converter

    @property
    def multiplied(self) -> Rings:
        """Stages that the consumers read."""
        return Rings(*_MULTIPLIED, self.num_stages, 1 if self.num_fp8_stages else self.copies)

    @property
    def copied(self) -> Rings:
        """Stages that the producer fills."""
        return Rings(*_FP8, self.num_fp8_stages, self.copies) if self.num_fp8_stages else self.multiplied

    @property
    def barriers(self) -> dict[str, BarrierSpec]:
        """All barriers by name. All begin with nothing having arrived."""
        specs = {
            "q_ready": BarrierSpec(self.num_consumers, 1),
            "q_free": BarrierSpec(self.num_consumers, 1),
        }
        for rings, readers in ((self.copied, 1), (self.multiplied, self.num_consumers)):
            for ring in rings.both:
                specs[ring.ready] = BarrierSpec(rings.num_stages, rings.arrivals)
                specs[ring.free] = BarrierSpec(rings.num_stages, readers)
        if self.num_consumers == 2:
            specs["turn"] = BarrierSpec(2, 1)
        return specs


class Progress(NamedTuple):
    """Position of a role: the stage and the phase that come next."""

    blocks: Any
    tiles: Any  # those with at least one block

    def after(self, machine: "Machine", tile: Any) -> "Progress":
        return Progress(self.blocks + tile.num_blocks, self.tiles + machine.minimum(tile.num_blocks, 1))


@runtime_checkable
class Machine(Protocol):
    """State that both roles act on. Integers may be Python's or traced."""

    pipeline: Pipeline

    def wait(self, barrier: str, index: Any) -> None:
        """Wait for the next phase of a barrier: the first wait is for the first phase, and none may be left out."""

    def arrive(self, barrier: str, index: Any) -> None: ...

    def loop(self, start: Any, stop: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = step(n, carry)` for each n of [start, stop); the last carry."""

    def when(self, condition: Any, action: Callable[[], None]) -> None: ...

    def branch(self, condition: Any, function: Callable[[Any], Any], carry: Any) -> Any:
        """`function(carry)` if the condition holds, else `carry`."""

    def minimum(self, a: Any, b: Any) -> Any: ...

    def maximum(self, a: Any, b: Any) -> Any: ...

    def remainder(self, a: Any, b: int) -> Any: ...

    def integer(self, a: int) -> Any:
        """An integer that a loop can carry."""

    def tile(self, position: Any) -> Any:
        """The tile at a position of this worker's list: it has `num_blocks` and `num_full` (blocks without a mask)."""


@runtime_checkable
class Producer(Machine, Protocol):
    """Actions of the producer. A copy to slot i of `q` arrives on `q_ready` i once it is there, and so on."""

    def copy_rows(self, tile: Any, consumer: int) -> None:
        """Begin to copy the rows of a consumer to `q[consumer]`."""

    def find(self, tile: Any, n: Any) -> None:
        """Look up where the n-th block of a tile lies, for the two copies that follow."""

    def copy_block(self, ring: Ring, tile: Any, n: Any, stage: Any) -> None:
        """Begin to copy the keys or values of the n-th block to a stage of a ring."""


@runtime_checkable
class Converter(Machine, Protocol):
    """Actions of the converter."""

    def convert(self, source: Ring, source_stage: Any, ring: Ring, stage: Any) -> None:
        """Write a block of an FP8 ring to another ring in 16 bits, visible to products that begin later."""


@runtime_checkable
class Consumer(Machine, Protocol):
    """Actions of a consumer, in registers. `softmax` is what the softmax carries beside acc."""

    consumer: Any  # 0 or 1

    def begin(self, tile: Any) -> tuple[Any, Any, Any]:
        """Return what the masks of these rows need, an acc of 0, and the softmax of rows that have seen nothing."""

    def weigh(self, tile: Any, mask: Any, n: Any, softmax: Any, scores: Any) -> tuple[Any, Any, Any]:
        """Return the softmax after block n, its float32 weights, and the decay of those before; None without a mask."""

    def scale(self, acc: Any, decay: Any) -> Any: ...

    def narrow(self, weights: Any) -> Any:
        """Weights in 16 bits, as products take them."""

    def clean(self, tile: Any, n: Any, stage: Any) -> None:
        """Write zeros over values of the n-th block that were never written, in a stage of `v`."""

    def multiply(self, products: Callable[..., Any], scores: bool, acc: Any = None, like: Any = None) -> Any:
        """Return what `products` does, which is `like` that, with zeros for scores, if any, then what `acc` begins."""

    def issue_scores(self, accumulator: Any, stage: Any) -> None:
        """Begin `accumulator += q[consumer] @ k[stage].T`, which reads both until it is awaited."""

    def issue_values(self, accumulator: Any, weights: Any, stage: Any) -> None:
        """Begin `accumulator += weights @ v[stage]`, which reads v until it is awaited."""

    def awaited(self, accumulator: Any, in_flight: int = 0) -> Any:
        """Wait until at most `in_flight` of the products issued last are in flight; return the accumulator's value."""

    def store(self, tile: Any, acc: Any, softmax: Any) -> None:
        """Write the results of a tile."""

    def store_empty(self, tile: Any) -> None:
        """Write the results of a tile without blocks."""


def produce(machine: Producer, start: Any, stop: Any) -> None:
    """Copy the operands of the tiles [start, stop) of this worker's list."""
    pipeline = machine.pipeline

    def copy_tile(position: Any, done: Progress) -> Progress:
        tile = machine.tile(position)

        def copy_rows() -> None:
            for consumer in range(pipeline.num_consumers):

                def wait_for_slot(consumer: int = consumer) -> None:
                    machine.wait("q_free", consumer)

                machine.when(done.tiles > 0, wait_for_slot)
                machine.copy_rows(tile, consumer)

        def copy_block(n: Any, _: None) -> None:
            machine.find(tile, n)
            for ring in pipeline.copied.both:
                stage = _free_stage(machine, pipeline.copied, ring, done.blocks + n)
                machine.copy_block(ring, tile, n, stage)

        machine.when(tile.num_blocks > 0, copy_rows)
        machine.loop(0, tile.num_blocks, copy_block, None)
        return done.after(machine, tile)

    done = machine.loop(start, stop, copy_tile, Progress(machine.integer(0), machine.integer(0)))

    _drain(machine, pipeline.copied, done.blocks)

    def drain_rows() -> None:
        for consumer in range(pipeline.num_consumers):
            machine.wait("q_free", consumer)

    machine.when(done.tiles > 0, drain_rows)


def convert(machine: Converter, start: Any, stop: Any) -> None:
    """Convert the blocks of the tiles [start, stop) of this worker's list to what the consumers multiply."""
    pipeline = machine.pipeline

    def convert_tile(position: Any, done: Any) -> Any:
        tile = machine.tile(position)

        def convert_block(n: Any, _: None) -> None:
            number = done + n
            copied = machine.remainder(number, pipeline.copied.num_stages)
            for source, ring in zip(pipeline.copied.both, pipeline.multiplied.both, strict=True):
                machine.wait(source.ready, copied)
                stage = _free_stage(machine, pipeline.multiplied, ring, number)
                machine.convert(source, copied, ring, stage)
                machine.arrive(source.free, copied)
                machine.arrive(ring.ready, stage)

        machine.loop(0, tile.num_blocks, convert_block, None)
        return done + tile.num_blocks

    _drain(machine, pipeline.multiplied, machine.loop(start, stop, convert_tile, machine.integer(0)))


def _free_stage(machine: Machine, rings: Rings, ring: Ring, number: Any) -> Any:
    """The stage for a block, by its number since the beginning, once what it held before is no longer read."""
    stage = machine.remainder(number, rings.num_stages)
    machine.when(number >= rings.num_stages, lambda: machine.wait(ring.free, stage))
    return stage


def _drain(machine: Machine, rings: Rings, blocks: Any) -> None:
    """Wait until all blocks have been read. So every phase is waited for, and nothing is in flight in the end."""

    def drain_stage(number: Any, _: None) -> None:
        for ring in rings.both:
            machine.wait(ring.free, machine.remainder(number, rings.num_stages))

    machine.loop(blocks - machine.minimum(blocks, rings.num_stages), blocks, drain_stage, None)


def consume(machine: Consumer, start: Any, stop: Any) -> None:
    """Compute a consumer's rows of the tiles [start, stop) of this worker's list."""
    two, me = machine.pipeline.num_consumers == 2, machine.consumer

    def consume_tile(position: Any, done: Progress) -> Progress:
        tile = machine.tile(position)
        machine.when(tile.num_blocks > 0, lambda: _consume_blocks(machine, position, tile, done.blocks))
        machine.when(tile.num_blocks == 0, lambda: machine.store_empty(tile))
        return done.after(machine, tile)

    if two:  # the first turn is that of consumer 0
        machine.when(me == 1, lambda: machine.arrive("turn", 0))
    machine.loop(start, stop, consume_tile, Progress(machine.integer(0), machine.integer(0)))
    if two:
        machine.when(me == 0, lambda: machine.wait("turn", 0))


def _consume_blocks(machine: Consumer, position: Any, tile: Any, blocks_before: Any) -> None:
    two, me = machine.pipeline.num_consumers == 2, machine.consumer

    def stage(n: Any) -> Any:
        return machine.remainder(blocks_before + n, machine.pipeline.num_stages)

    def take_turn() -> None:
        if two:
            machine.wait("turn", me)

    def pass_turn() -> None:
        if two:
            machine.arrive("turn", 1 - me)

    def clean(n: Any) -> None:
        """Consumer 0 cleans for both, as its turn comes first."""
        machine.when(me == 0, lambda: machine.clean(tile, n, stage(n)))

    def first_scores(of_scores: Any) -> tuple[Any, Any]:
        machine.issue_scores(of_scores, stage(0))
        pass_turn()
        scores = machine.awaited(of_scores)
        machine.arrive("k_free", stage(0))
        after, weights, _ = machine.weigh(tile, mask, 0, softmax, scores)
        machine.wait("v_ready", stage(0))
        return after, machine.narrow(weights)

    def step(n: Any, carry: Any, masked: bool) -> Any:
        """The product of block n, and the weights of block n + 1, which takes a mask if `masked`."""
        acc, softmax, weights = carry
        if masked:
            clean(n)
        machine.wait("k_ready", stage(n + 1))
        take_turn()

        def products(of_scores: Any, of_values: Any) -> tuple[Any, Any, Any]:
            def weigh() -> tuple[Any, Any, Any]:
                return machine.weigh(tile, mask if masked else None, n + 1, softmax, scores)

            def await_values() -> Any:
                acc = machine.awaited(of_values)
                machine.arrive("v_free", stage(n))
                return acc

            machine.issue_scores(of_scores, stage(n + 1))
            machine.issue_values(of_values, weights, stage(n))
            pass_turn()
            scores = machine.awaited(of_scores, in_flight=1)
            machine.arrive("k_free", stage(n + 1))
            if masked:  # a mask takes the registers of the weights, which the product of values reads
                acc = await_values()
                after, wide_weights, decay = weigh()
                machine.wait("v_ready", stage(n + 1))
            else:
                after, wide_weights, decay = weigh()
                # Before the other wait: where it branches, the compiler can't move the softmax behind that one.
                machine.wait("v_ready", stage(n + 1))
                acc = await_values()
            # Not before: no register of a product's operands may be written while it runs.
            return machine.scale(acc, decay), after, machine.narrow(wide_weights)

        return machine.multiply(products, scores=True, acc=acc, like=carry)

    def last_values(of_values: Any) -> Any:
        machine.issue_values(of_values, weights, stage(last))
        pass_turn()
        acc = machine.awaited(of_values)
        machine.arrive("v_free", stage(last))
        return acc

    last = tile.num_blocks - 1
    mask, acc, softmax = machine.begin(tile)
    machine.wait("q_ready", me)
    machine.wait("k_ready", stage(0))
    take_turn()
    carry = acc, *machine.multiply(first_scores, scores=True)
    # Blocks without a mask come first, and step n weighs block n + 1. The first block is weighed with one always.
    num_full = machine.maximum(tile.num_full - 1, 0)
    carry = machine.loop(0, num_full, lambda n, carry: step(n, carry, masked=False), carry)
    # The branch costs nothing, and keeps the compiler from merging the loops, which one version is said to do wrongly.
    carry = machine.branch(
        num_full < last,
        lambda carry: machine.loop(num_full, last, lambda n, carry: step(n, carry, masked=True), carry),
        carry,
    )
    machine.arrive("q_free", me)
    acc, softmax, weights = carry
    clean(last)
    take_turn()
    acc = machine.multiply(last_values, scores=False, acc=acc, like=acc)
    # The tile is read again, as nothing that only this needs shall take registers in the loops.
    machine.store(machine.tile(position), acc, softmax)

"""`ModelRunner`, which runs the devices of a mesh for an executor."""

import functools
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from longctx.kernels.fp8 import E4M3
from longctx.models import Llama, LlamaConfig
from longctx.models.params import Ffn, Params
from longctx.models.sharded_params import device_config, shard_params
from longctx.parallel.mesh import named_sharding
from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.request.sampling_params import SamplingLevel, SamplingParams
from longctx.serving.runner import state_updates
from longctx.serving.runner.layered_step import Programs, compile_layered_step, layered_step
from longctx.serving.runner.page_transfer import DevicePageRead, PageTransfer, PlacedBlock
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.sample_step import compile_samplers, mask_size, outer_params, sample_program
from longctx.serving.runner.sampler import LogitBias, SampledTokens
from longctx.serving.runner.step import DeviceState, state_shardings, step_program
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape


def abstract_state(
    config: LlamaConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    num_pages: int,
    page_size: int,
    slots: int,
    entries: int,
    rows: int,
    num_window_pages: int = 0,
) -> DeviceState:
    """Shapes, dtypes and shardings of the state of a `ModelRunner`."""
    stages, ranks, is_fp8 = mesh.shape["stage"], mesh.shape["context"], jnp.dtype(kv_dtype) == E4M3
    has_window, sizes = num_window_pages > 0, (num_pages, page_size, kv_dtype, ranks, stages, num_window_pages)
    each, places, array = stages * ranks, state_shardings(mesh, is_fp8, has_window), jax.ShapeDtypeStruct
    no_bias = LogitBias.row(SamplingParams())
    state = DeviceState(
        PagedCache.abstract(device_config(config, mesh), *sizes),
        array((each, slots, entries), jnp.int32),  # type: ignore[arg-type]
        array((each, slots, entries), jnp.int32) if ranks > 1 else None,  # type: ignore[arg-type]
        array((each, rows, config.hidden_size), dtype) if stages > 1 else None,  # type: ignore[arg-type]
        array((slots,), jnp.int32),  # type: ignore[arg-type]
        array((slots, config.vocab_size), jnp.uint32),  # type: ignore[arg-type]
        jax.tree.map(lambda row: array((slots, *row.shape), row.dtype), no_bias),
        array((each, slots, entries), jnp.int32) if has_window else None,  # type: ignore[arg-type]
    )
    return jax.tree.map(lambda x, place: array(x.shape, x.dtype, sharding=place), state, places)


class Drawing(NamedTuple):
    """Input of `ModelRunner.draw`: the last rows of a step, and its packed `SampleInputs`."""

    shape: Shape
    level: SamplingLevel
    last_rows: jax.Array
    samples: Any


class ModelRunner:
    """Runs steps on the devices of a mesh. Calls take effect in their order, in all stages.

    Each rank numbers its own pages for `set_entries` and `step`. In calls that move pages, the numbers count the pages
    of all ranks, rank after rank.

    Args:
      num_pages: pages of each rank. None: `allocate` is called before the first step.
      num_window_pages: likewise, of layers with a sliding window; 0 in a model without them.
      slots, entries: sequences that run at a time, and pages of the longest.
      sections: the largest bucket of each kind of rows.
      kv_dtype: dtype of the cache, float8_e4m3fn for FP8 pages; None: the parameters'.
      ffn: of the plan.
    """

    def __init__(
        self,
        model: Llama,
        params: Params,
        mesh: Mesh,
        num_pages: int | None,
        page_size: int,
        slots: int,
        entries: int,
        sections: tuple[int, int, int],
        kv_dtype: DTypeLike | None = None,
        ffn: Ffn = "tensor",
        num_window_pages: int = 0,
    ) -> None:
        self.model, self.mesh = model, mesh
        self._page_size, self._slots, self._entries = page_size, slots, entries
        self._all_allowed: dict[int, jax.Array] = {}  # by the samples of a rank
        self._sections, self._num_rows = (sections[0], sections[0] + sections[1]), sum(sections)
        self.params = shard_params(params, model.config, mesh, ffn=ffn)
        dtype = self.params["embed"].dtype
        self._kv_dtype = jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        is_fp8 = self._kv_dtype == E4M3
        has_window = model.config.sliding_window is not None
        program = step_program(mesh, model.config.quantization is not None, is_fp8, has_window)
        self.run_step: Any = layered_step if isinstance(self.params["layers"], tuple) else program
        if num_pages is not None:
            self.allocate(num_pages, num_window_pages)

    def allocate(self, num_pages: int, num_window_pages: int = 0) -> None:
        """Make the arrays of the state, with a number of pages of each rank; once.

        Raises:
          ValueError: the model has sliding layers and there are no window pages, or the other way round.
        """
        self._num_pages, state = (num_pages, num_window_pages), self.abstract_state(num_pages, num_window_pages)
        page_index, no_bias = state_updates.unused_page_index(self._page_size), LogitBias.row(SamplingParams())

        def fill(x: Any, value: Any) -> jax.Array:
            return self._put(np.broadcast_to(np.asarray(value, x.dtype), x.shape), x.sharding.spec)

        def zeros(x: Any) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=x.sharding)

        # All arrays are committed to devices: an uncommitted one would compile the first step twice.
        self.state = DeviceState(
            jax.tree.map(zeros, state.cache),
            fill(state.table, 0),
            None if state.page_index is None else fill(state.page_index, page_index),
            None if state.rows is None else fill(state.rows, 0),
            fill(state.last_token, 0),
            fill(state.seen, 0),
            jax.tree.map(fill, state.bias, no_bias),
            None if state.window_table is None else fill(state.window_table, 0),
        )

    def abstract_state(self, num_pages: int, num_window_pages: int = 0) -> DeviceState:
        """Return shapes, dtypes and shardings of the state with a number of pages of each rank; no array is made."""
        dtype = self.params["embed"].dtype
        sizes = num_pages, self._page_size, self._slots, self._entries, self._num_rows, num_window_pages
        return abstract_state(self.model.config, self.mesh, dtype, self._kv_dtype, *sizes)

    def clear_slot(self, slot: int) -> None:
        """Mark all page table entries of a slot as unused."""
        self._update(state_updates.clear_slot, np.int32(slot), page_size=self._page_size)

    def set_entries(
        self,
        slot: int,
        first: np.ndarray,
        pages: np.ndarray,
        page_index: np.ndarray,
        window_pages: np.ndarray | None = None,
    ) -> None:
        """Set page table entries of a slot, see `state_updates.set_entries`."""
        self._update(state_updates.set_entries, np.int32(slot), first, pages, page_index, window_pages)

    def set_seen(self, slot: int, seen: np.ndarray) -> None:
        """Set how often a slot has seen each token, uint32 `[vocab]`, see `sampler.count_tokens`."""
        self._update(state_updates.set_seen, np.int32(slot), seen)

    def set_bias(self, slot: int, bias: LogitBias) -> None:
        """Set the biases of a slot, numpy arrays `[M]`."""
        self._update(state_updates.set_bias, np.int32(slot), bias)

    def _update(self, update: Any, *arguments: Any, **static: Any) -> None:
        kinds = self.state.cache.is_fp8, self.state.window_table is not None
        program = state_updates.update_program(update, self.mesh, *kinds, *static)
        self.state = program(self.state, *arguments, **static)

    @property
    def num_programs(self) -> int:
        """Programs of a shape of steps, those of all levels of sampling included."""
        return (len(Programs._fields) if self.run_step is layered_step else 1) + len(SamplingLevel)

    def compile(self, shape: Shape, compiled: Callable[[], object] = lambda: None) -> List[Any]:
        """Compile the programs that `step` runs for a shape, and return them; `compiled` is called after each."""
        rows = np.stack([RowInputs.empty(shape)[0]] * self.mesh.shape["stage"])
        inputs = self._to_devices(rows, SampleInputs.empty(shape)[0])
        # JAX finds the program again when `step` calls it with arrays: only what is abstract of them is in its key.
        state = self.abstract_state(shape.num_pages, shape.num_window_pages)
        arguments = (self.model, self.mesh, self.params, state, *inputs, shape, self._sections)
        if self.run_step is layered_step:
            programs = [*compile_layered_step(*arguments, compiled=compiled)]
        else:
            programs = [self.run_step.lower(*arguments).compile()]
            compiled()
        for sampler in compile_samplers(self.model, self.mesh, shape, self.params, state, inputs[1]).values():
            programs.append(sampler)
            compiled()
        return programs

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[SampledTokens, jax.Array]:
        """Run one step of all stages, and draw its tokens: `begin_step` and `draw`.

        Returns:
          (sampled tokens; hidden states for `prompt_logprobs`).
        """
        drawing, hidden = self.begin_step(rows, samples, shape)
        return self.draw(drawing), hidden

    def begin_step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[Drawing, jax.Array]:
        """Run one step of all stages, but for drawing its tokens, which `draw` has to do before the next step.

        Args:
          rows: a packed `RowInputs` for each stage and rank, int32 `[stage, context, length]`.
          samples: a packed `SampleInputs`, int32 `[length]`.

        Returns:
          (what `draw` takes; hidden states for `prompt_logprobs` and `pool_rows`).
        """
        inputs = self._to_devices(rows, samples)
        self.state, hidden, last_rows = self.run_step(
            self.model, self.mesh, self.params, self.state, *inputs, shape, self._sections
        )
        level = SamplingLevel(int(SampleInputs.views(samples, shape).level[0]))
        return Drawing(shape, level, last_rows, inputs[1]), hidden

    def draw(self, drawing: Drawing, masks: np.ndarray | None = None) -> SampledTokens:
        """Draw the tokens of a step.

        Args:
          masks: of the tokens that may come, int32 `[ranks, samples, words]`, see `mask_size`; None: all may.
        """
        shape, level, last_rows, samples = drawing
        state, on_devices = self.state, None
        if level >= SamplingLevel.MASKS:
            on_devices = self._no_masks(shape) if masks is None else self._put(masks, P())
        static = self.model, self.mesh, shape.of_samples, level
        tokens, outer = (state.last_token, state.seen), outer_params(self.params)
        sampled, (last_token, seen) = sample_program(self.mesh)(
            *static, outer, tokens, state.bias, last_rows, samples, on_devices
        )
        self.state = state._replace(last_token=last_token, seen=seen)
        for x in jax.tree.leaves(sampled):
            x.copy_to_host_async()
        return sampled

    def _no_masks(self, shape: Shape) -> jax.Array:
        """Return masks that allow all tokens."""
        if shape.samples not in self._all_allowed:
            size = mask_size(self.model.config.vocab_size, shape)
            self._all_allowed[shape.samples] = self._put(np.full(size, -1, np.int32), P())
        return self._all_allowed[shape.samples]

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray, shape: Shape) -> tuple[Any, Any, Any]:
        """Log probabilities of `targets` `[ranks, rows]` after a step's rows, see `state_updates.prompt_logprobs`."""
        on_devices = self._put(targets, P("context"))
        return state_updates.prompt_logprobs(self.model, self.mesh, self.params, hidden, on_devices, shape.num_top)

    def pool_rows(self, hidden: jax.Array, slots: np.ndarray) -> jax.Array:
        """Sum a step's rows by `slots` `[ranks, rows]`, see `state_updates.pool_rows`."""
        return state_updates.pool_rows(self.mesh, hidden, self._put(slots, P("context")), len(self.state.last_token))

    @functools.cached_property
    def transfer(self) -> PageTransfer:
        """Reads and writes pages of the state, by `read_pages` and `write_placed`."""
        num_pages, num_window_pages = self._num_pages
        sizes = num_pages, self._page_size, self._kv_dtype, num_window_pages
        return PageTransfer(self.mesh, self.model.config, *sizes)

    def read_pages(
        self, pages: List[int], layers: tuple[int, int], window_pages: List[int] | None = None
    ) -> DevicePageRead:
        """Begin to copy layers `(first, stop)` of pages to the host, as calls so far leave them; see `PageTransfer`."""
        return self.transfer.read(self.state.cache, pages, layers, window_pages)

    def write_placed(self, blocks: List[PlacedBlock]) -> Callable[[], object] | None:
        """Begin to write blocks from `PageTransfer.place` over their pages.

        Returns:
          What waits, in any thread, until nothing reads the blocks' memory any more. None: nothing does.
        """
        cache, done = self.transfer.write(self.state.cache, blocks)
        self.state = self.state._replace(cache=cache)
        return functools.partial(jax.block_until_ready, done) if done else None

    def write_pages(self, pages: List[int], block: PageBlock, window_pages: List[int] | None = None) -> None:
        """Place and write a block of a load of `pages`; its memory may change after it. See `PageTransfer.place`."""
        if (wait := self.write_placed([self.transfer.place(pages, block, window_pages)])) is not None:
            wait()

    def _to_devices(self, rows: np.ndarray, samples: np.ndarray) -> tuple[Any, Any]:
        if self.mesh.size == 1:
            return rows, samples
        return self._put(rows, P("stage", "context")), self._put(samples, P())

    def _put(self, x: Any, spec: P) -> jax.Array:
        sharding = named_sharding(self.mesh, spec)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        # `device_put` would compare the value across all processes in every call.
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

"""What the executor tells devices to do: the interface, and a mesh that does it."""

from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import device_config, shard_params
from longctx.parallel.mesh import named_sharding
from longctx.serving.runner import state_updates
from longctx.serving.runner.paged_cache import PagedCache
from longctx.serving.runner.sampler import Drawn
from longctx.serving.runner.step import DeviceState, state_specs, step
from longctx.serving.runner.step_inputs import SamplePlan, Shape


class ModelRunner(Protocol):
    """Calls take effect in their order; each reaches all stages at once. Pages are numbered within their rank."""

    def clear_slot(self, slot: int) -> None:
        """Forget its pages."""
        ...

    def set_entries(self, slot: int, first: np.ndarray, pages: np.ndarray, numbers: np.ndarray) -> None:
        """As `state_updates.set_entries`."""
        ...

    def set_seen(self, slot: int, seen: np.ndarray) -> None:
        """Which tokens a slot has seen, uint8 `[vocab]`."""
        ...

    def compile(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> None:
        """What `step` would run."""
        ...

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[Drawn, Any]:
        """One tick: a `RowPlan` for each stage and rank, a `SamplePlan`; what was drawn, and hidden states."""
        ...

    def prompt_logprobs(self, hidden: Any, targets: np.ndarray, shape: Shape) -> tuple[Any, Any, Any]:
        """Of the tokens `[ranks, rows]` that follow a step's rows, as `state_updates.prompt_logprobs`."""
        ...


class MeshModelRunner:
    """The devices of a mesh.

    Args:
      slots, entries: sequences at a time, and pages of the longest.
      sections: the largest bucket of each kind of rows.
    """

    def __init__(
        self,
        model: Llama,
        params: Params,
        mesh: Mesh,
        num_pages: int,
        page_size: int,
        slots: int,
        entries: int,
        sections: tuple[int, int, int],
    ) -> None:
        self.model, self.mesh = model, mesh
        self._num_pages, self._page_size = num_pages, page_size
        self._sections = (sections[0], sections[0] + sections[1])
        self.params = shard_params(params, model.config, mesh)
        stages, ranks = mesh.shape["stage"], mesh.shape["context"]
        each, dtype = stages * ranks, self.params["embed"].dtype
        specs: Any = state_specs(stages, ranks)
        numbers = np.full((each, slots, entries), state_updates.no_number(page_size), np.int32)
        pages = named_sharding(mesh, specs.cache.k)
        # An array not committed to devices would compile the first step twice.
        self.state = DeviceState(
            PagedCache.empty(device_config(model.config, mesh), num_pages, page_size, dtype, pages, ranks),
            self._put(np.zeros((each, slots, entries), np.int32), specs.table),
            None if specs.numbers is None else self._put(numbers, specs.numbers),
            None
            if specs.rows is None
            else self._put(np.zeros((each, sum(sections), model.config.hidden_size), dtype), specs.rows),
            self._put(np.zeros(slots, np.int32), specs.last_token),
            self._put(np.zeros((slots, model.config.vocab_size), np.uint8), specs.seen),
        )

    def clear_slot(self, slot: int) -> None:
        self.state = state_updates.clear_slot(self.state, np.int32(slot), self._page_size)

    def set_entries(self, slot: int, first: np.ndarray, pages: np.ndarray, numbers: np.ndarray) -> None:
        self.state = state_updates.set_entries(self.state, np.int32(slot), first, pages, numbers)

    def set_seen(self, slot: int, seen: np.ndarray) -> None:
        self.state = state_updates.set_seen(self.state, np.int32(slot), seen)

    def compile(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> None:
        told = self._told(rows, samples)
        step.lower(self.model, self.mesh, self.params, self.state, *told, shape, self._sections).compile()

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[Drawn, jax.Array]:
        told = self._told(rows, samples)
        self.state, drawn, hidden = step(self.model, self.mesh, self.params, self.state, *told, shape, self._sections)
        plain = SamplePlan.views(samples, shape).plain[0]
        for x in drawn[: 1 if plain else None]:
            x.copy_to_host_async()
        return drawn, hidden

    def prompt_logprobs(self, hidden: jax.Array, targets: np.ndarray, shape: Shape) -> tuple[Any, Any, Any]:
        there = self._put(targets, P("context"))
        return state_updates.prompt_logprobs(self.model, self.mesh, self.params, hidden, there, shape.num_top)

    def _told(self, rows: np.ndarray, samples: np.ndarray) -> tuple[Any, Any]:
        if self.mesh.size == 1:
            return rows, samples
        return self._put(rows, P("stage", "context")), self._put(samples, P())

    def _put(self, x: Any, spec: P) -> jax.Array:
        sharding = named_sharding(self.mesh, spec)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        # `device_put` would ask all processes whether they have the same, each time.
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

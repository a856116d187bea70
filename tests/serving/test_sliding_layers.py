"""Steps of a model with sliding layers, whose window pages are written over, against its dense forward pass."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.models import Llama, LlamaConfig
from longctx.models.attend import dense_attend
from longctx.models.params import Ffn, Params
from longctx.models.sharded_params import shard_params
from longctx.parallel.mesh import make_mesh
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape

LENGTH, PAGE, WINDOW, CHUNK = 45, 4, 10, 6
CONFIG = LlamaConfig(50, 32, 24, 5, 4, 2, 8, sliding_window=WINDOW, sliding_layers=(True, True, False, True, False))
WITH_SINKS = dataclasses.replace(CONFIG, attention_sinks=True, out_bias=True)
ALL_SLIDING = LlamaConfig(50, 32, 24, 3, 4, 2, 8, sliding_window=WINDOW)
TOKENS = np.random.default_rng(0).integers(0, 50, LENGTH)


@functools.cache
def params_of(config: LlamaConfig) -> Params:
    return Llama(config).init(jax.random.key(0), jnp.float32)


def dense(config: LlamaConfig) -> np.ndarray:
    """The hidden states of all tokens."""
    positions = jnp.arange(LENGTH)
    attend = dense_attend(config, jnp.float32, positions, implementation="reference")
    hidden, _ = Llama(config).forward(params_of(config), jnp.asarray(TOKENS), positions, attend, None)
    return np.asarray(hidden)


class Host:
    """The host of one sequence, page n of which is on rank n modulo ranks, as is its window page, one of few."""

    def __init__(self, config: LlamaConfig, sizes: tuple[int, int, int], apart: bool, ffn: Ffn = "tensor") -> None:
        self.stages, self.ranks, _ = sizes
        pages = -(-LENGTH // PAGE)
        self.num_window_pages = -(-((WINDOW + CHUNK + PAGE) // PAGE + 1) // self.ranks)
        assert self.num_window_pages * self.ranks < pages, "window pages must be used again"
        rows = (0, 0, CHUNK) if self.ranks == 1 else (0, CHUNK, 0)
        self.shape = Shape.of(rows, 2, PAGE, pages, 0, self.ranks, ffn=ffn, num_window_pages=self.num_window_pages)
        mesh, params = make_mesh(*sizes), params_of(config)
        if apart:
            params = shard_params(params, config, mesh, apart=True, ffn=ffn)
        counts = pages, PAGE, 2, pages, rows
        self.runner = ModelRunner(Llama(config), params, mesh, *counts, ffn=ffn, num_window_pages=self.num_window_pages)

    def run(self) -> np.ndarray:
        starts = [*range(0, LENGTH, CHUNK)]
        empty, found = RowInputs.empty(self.shape)[0], []
        for step in range(len(starts) + self.stages - 1):
            batches = [step - stage for stage in range(self.stages)]
            rows = [self._rows(starts[at]) if 0 <= at < len(starts) else empty for at in batches]
            _, hidden = self.runner.step(np.stack(rows), SampleInputs.empty(self.shape)[0], self.shape)
            if batches[-1] >= 0:
                found.append(np.asarray(hidden)[-1][: LENGTH - starts[batches[-1]]])
        return np.concatenate(found)

    def _rows(self, start: int) -> np.ndarray:
        packed, inputs = RowInputs.empty(self.shape)
        positions = np.arange(start, min(start + CHUNK, LENGTH))
        count, pages = len(positions), positions // PAGE
        inputs.tokens[:, :count], inputs.positions[:, :count], inputs.slots[:, :count] = TOKENS[positions], positions, 0
        inputs.offsets[:, :count] = positions % PAGE
        if self.ranks > 1:
            inputs.groups.reshape(self.ranks, self.ranks, -1)[:, :, :count] = 0
        for rank in range(self.ranks):
            here = pages % self.ranks == rank
            inputs.pages[rank, :count] = np.where(here, pages // self.ranks, -1)
            inputs.window_pages[rank, :count] = np.where(here, self._window_pages(pages), -1)
            new = np.unique(pages[here & (positions % PAGE == 0)])
            for name, values in self._entries(new).items():
                getattr(inputs, name)[rank, : len(new)] = values
        return packed

    def _window_pages(self, pages: np.ndarray) -> np.ndarray:
        return pages // self.ranks % self.num_window_pages

    def _entries(self, pages: np.ndarray) -> dict[str, Any]:
        entries = pages // self.ranks
        return {
            "table_slots": 0,
            "table_entries": entries,
            "table_pages": entries,
            "table_page_index": pages,
            "table_window_pages": self._window_pages(pages),
        }


@pytest.mark.parametrize(
    ("config", "sizes", "apart"),
    [
        (CONFIG, (1, 1, 1), False),
        (CONFIG, (2, 2, 1), True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (CONFIG, (1, 1, 1), True),
                (CONFIG, (3, 1, 2), False),
                (CONFIG, (1, 3, 1), False),
                (ALL_SLIDING, (1, 1, 1), False),
                (ALL_SLIDING, (2, 1, 1), True),
            )
        ),
    ],
)
def test_steps_are_as_the_dense_forward_pass(config: LlamaConfig, sizes: tuple[int, int, int], apart: bool) -> None:
    """Of one program and of one for each layer, with stages that differ in their kinds of layers."""
    np.testing.assert_allclose(Host(config, sizes, apart).run(), dense(config), atol=2e-4)


@pytest.mark.parametrize(
    ("sizes", "apart"), [((1, 2, 2), False), pytest.param((2, 2, 1), True, marks=pytest.mark.slow)]
)
def test_a_rank_adds_the_sinks_and_the_bias_of_its_heads(sizes: tuple[int, int, int], apart: bool) -> None:
    """Where context ranks share output projections: sinks count once, after the merge, and so does the bias."""
    np.testing.assert_allclose(Host(WITH_SINKS, sizes, apart, "all").run(), dense(WITH_SINKS), atol=2e-4)


def test_entries_are_set_with_their_window_pages() -> None:
    host = Host(CONFIG, (1, 2, 1), False)
    pages, number = np.array([[3, 5, -1], [2, -1, -1]]), np.array([[0, 2, 0], [1, 0, 0]])
    host.runner.clear_slot(1)
    host.runner.set_entries(1, np.array([0, 1], np.int32), pages, number, np.array([[-1, 2, 0], [1, 0, 0]]))
    state = host.runner.state
    assert state.window_table is not None
    np.testing.assert_array_equal(np.asarray(state.window_table)[:, 1, :3], [[0, 2, 0], [0, 1, 0]])
    np.testing.assert_array_equal(np.asarray(state.table)[:, 1, :3], [[3, 5, 0], [0, 2, 0]])


def test_window_pages_are_needed() -> None:
    sizes = PAGE, 2, 4, (0, 0, CHUNK)
    with pytest.raises(ValueError, match="num_window_pages must be 1 or more"):
        ModelRunner(Llama(CONFIG), params_of(CONFIG), make_mesh(), 4, *sizes)

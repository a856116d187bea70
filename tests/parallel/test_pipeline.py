"""The sequence pipeline against its stages run one after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import PartitionSpec as P

from longctx.parallel import make_mesh, sequence_pipeline

SIZE = 6


def stage_fn(weights: jax.Array, state: jax.Array, x: jax.Array, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As attention does: a chunk sees what the stage has kept of the chunks before it."""
    y = jnp.tanh(x @ weights + jnp.sum(state, 0)[None])
    row = jnp.where(chunk < 0, state.shape[0], chunk)
    return state.at[row].set(jnp.mean(y, 0), mode="drop"), y


def one_after_another(weights: jax.Array, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
    states, ys = [], chunks
    for stage in weights:
        state, outs = jnp.zeros((len(chunks), SIZE)), []
        for number, x in enumerate(ys):
            state, y = stage_fn(stage, state, x, jnp.int32(number))
            outs.append(y)
        states.append(state)
        ys = jnp.stack(outs)
    return jnp.stack(states), ys


def pipelined(stages: int, weights: jax.Array, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
    def run(weights: jax.Array, chunks: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.zeros((chunks.shape[0], SIZE))
        state, ys = sequence_pipeline(functools.partial(stage_fn, weights[0]), state, chunks)
        return state[None], ys

    mesh = make_mesh(stage=stages)
    return jax.shard_map(run, mesh=mesh, in_specs=(P("stage"), P()), out_specs=(P("stage"), P()))(weights, chunks)


@pytest.mark.parametrize(
    ("stages", "num_chunks"),
    [(1, 3), (3, 5), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 1), (4, 4), (5, 2)))],
)
def test_as_one_stage_after_another(stages: int, num_chunks: int) -> None:
    rng = np.random.default_rng(stages)
    weights = jnp.asarray(rng.normal(size=(stages, SIZE, SIZE)), jnp.float32)
    chunks = jnp.asarray(rng.normal(size=(num_chunks, 4, SIZE)), jnp.float32)
    got = jax.jit(functools.partial(pipelined, stages))(weights, chunks)
    for ours, theirs in zip(got, jax.jit(one_after_another)(weights, chunks), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_gradients() -> None:
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(3, SIZE, SIZE)), jnp.float32)
    chunks = jnp.asarray(rng.normal(size=(4, 2, SIZE)), jnp.float32)
    ours, theirs = (
        jax.jit(jax.grad(lambda w, x, f=f: jnp.sum(jnp.sin(f(w, x)[1])), (0, 1)))(weights, chunks)
        for f in (functools.partial(pipelined, 3), one_after_another)
    )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_one_permute_a_tick() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, SIZE, SIZE), (7, 2, SIZE))]
    text = jax.jit(functools.partial(pipelined, 4)).lower(*shapes).compile().as_text()
    permutes = [x for x in collectives(text, 4) if x.opcode == "collective-permute"]
    assert [x.sent for x in permutes] == [2 * SIZE * 4]  # in the loop over ticks, one chunk
    assert f'trip_count":{{"n":"{7 + 4 - 1}"' in text.replace(" ", "") or f"constant({7 + 4 - 1})" in text


def test_no_chunks() -> None:
    with pytest.raises(ValueError, match="chunks must be"):
        pipelined(2, jnp.zeros((2, SIZE, SIZE)), jnp.zeros((0, 2, SIZE)))

"""Stages that do not divide the layers: who holds which, layers of zeros, and parameters from one mesh to another."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig, RowwiseFp8, load_checkpoint, save_checkpoint
from longctx.models.layer_runs import Stacking, layer_runs, layers_of_stages, layers_per_stage, sliding_places
from longctx.models.layer_stacks import LayerRuns
from longctx.models.sharded_params import abstract_sharded_params, shard_params
from longctx.parallel import make_mesh

CONFIG = LlamaConfig(96, 64, 80, num_layers=5, num_heads=8, num_kv_heads=2, head_dim=8, max_positions=256, qk_norm=True)
TOKENS = (np.arange(24) * 7 % 96).reshape(12, 2)  # sequences that know nothing of each other


@functools.cache
def make(modules: str | None = None) -> tuple[Llama, dict]:
    quantization = None if modules is None else RowwiseFp8.of(CONFIG.num_layers, modules)
    model = Llama(dataclasses.replace(CONFIG, quantization=quantization))
    return model, model.init(jax.random.key(0), initializer_range=0.2)


@functools.cache
def logits(modules: str | None) -> jax.Array:
    model, params = make(modules)
    return model(params, TOKENS)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_same_logits(actual: jax.Array, modules: str | None) -> None:
    """Sums in another order round an activation to the next float8 now and then, in one sequence of the twelve."""
    wrong = (np.abs(actual - logits(modules)) > 1e-4).any((1, 2)).sum()
    assert wrong <= (0 if modules is None else 2)


@given(num_layers=st.integers(1, 300), data=st.data())
def test_every_layer_is_in_one_stage(num_layers: int, data: st.DataObject) -> None:
    """In order; each stage has `ceil` or `floor` of `layers / stages`, and one layer of zeros if it has fewer."""
    stages = data.draw(st.integers(1, num_layers))
    parts = layers_of_stages(num_layers, stages)
    held = [[layer for layer in part if layer is not None] for part in parts]
    assert [*itertools.chain(*held)] == list(range(num_layers))
    assert {len(part) for part in parts} == {layers_per_stage(num_layers, stages)}
    assert {len(layers) for layers in held} <= {num_layers // stages, -(-num_layers // stages)}
    assert [len(layers) for layers in held] == sorted(map(len, held), reverse=True)


def test_each_place_of_a_stage_says_whether_its_layer_slides() -> None:
    """A layer of zeros, first in a smaller stage, does not."""
    mixed = dataclasses.replace(CONFIG, sliding_window=7, sliding_layers=(True, True, False, True, True))
    np.testing.assert_array_equal(sliding_places(mixed, 3), [[True, True], [False, True], [False, True]])
    np.testing.assert_array_equal(sliding_places(mixed, 1), [mixed.sliding_layers])
    assert not sliding_places(CONFIG, 2).any()


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_405b_in_fp8_has_three_runs_on_every_number_of_stages(stages: int) -> None:
    """Its first and last layers are not quantised: they are in the first and the last place of their stages."""
    llama = LlamaConfig.preset("llama-3.1-405b")
    runs = layer_runs(dataclasses.replace(llama, quantization=RowwiseFp8.of(llama.num_layers)), Stacking(stages))
    ffn = {"w_gate", "w_up", "w_down"}
    assert [(set(run.quantized), set(run.partly)) for run in runs] == [(set(), ffn), (ffn, set()), (set(), ffn)]
    assert [len(run.layers) // stages for run in runs] == [1, layers_per_stage(126, stages) - 2, 1]


@pytest.mark.parametrize("stages", [2, 3])
def test_smaller_stages_have_a_layer_of_zeros(stages: int) -> None:
    _, params = make()
    sharded = shard_params(params, CONFIG, make_mesh(stages, 1, 2))
    parts = layers_of_stages(5, stages)
    assert len(sharded["layers"]) == len(parts[0]) == layers_per_stage(5, stages)
    for place, layer in enumerate(sharded["layers"]):
        for stage, part in enumerate(parts):
            own = {name: np.asarray(layer[name])[stage] for name in ("attn_norm", "mlp_norm")}
            if part[place] is None:
                assert not any(np.asarray(x)[stage].any() for x in jax.tree.leaves(layer))
            else:
                assert_same(own, {name: np.asarray(params["layers"][name])[part[place]] for name in own})


@pytest.mark.parametrize("modules", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("ffn", "all"))])
def test_layers_of_zeros_change_no_logits(modules: str | None, tmp_path: Path) -> None:
    """Nor do they have gradients: a model that is trained with them keeps them."""
    model, params = make(modules)
    save_checkpoint(tmp_path, model, params)
    _, loaded = load_checkpoint(tmp_path, make_mesh(3, 1, 2))
    assert isinstance(loaded["layers"], LayerRuns)
    assert_same_logits(model(loaded, TOKENS), modules)
    if modules is None:
        loss = jax.jit(jax.grad(lambda params: jnp.sum(model(params, TOKENS) ** 2)))
        (ours,), theirs = loss(loaded)["layers"].stacks, loss(params)["layers"]
        places = [layer for part in layers_of_stages(5, 3) for layer in part]
        for at, layer in enumerate(places):
            for name in theirs:
                wanted = np.zeros_like(theirs[name][0]) if layer is None else theirs[name][layer]
                np.testing.assert_allclose(ours[name][at], wanted, rtol=2e-3, atol=1e-3 * np.abs(theirs[name]).max())


def test_parameters_of_one_mesh_serve_another_and_are_saved(tmp_path: Path) -> None:
    """Six places are three on 2 stages and two on 3: what is in them differs."""
    model, params = make()
    save_checkpoint(tmp_path / "one", model, params)
    for stages in (2, 3):
        _, loaded = load_checkpoint(tmp_path / "one", make_mesh(stages, 1, 1))
        assert {x.shape[0] for x in jax.tree.leaves(loaded["layers"])} == {6}
        for others in (1, 3, 5):
            mesh = make_mesh(others, 1, 1)
            assert_same(shard_params(loaded, CONFIG, mesh), shard_params(params, CONFIG, mesh))
        save_checkpoint(tmp_path / "again", model, loaded, max_shard_bytes=50_000)
        assert_same(load_checkpoint(tmp_path / "again")[1], params)


def test_partly_quantised_parameters_of_another_mesh_are_refused(tmp_path: Path) -> None:
    model, params = make("ffn")
    save_checkpoint(tmp_path, model, params)
    _, loaded = load_checkpoint(tmp_path, make_mesh(2, 1, 1))
    with pytest.raises(ValueError, match="params are partly quantised and stacked for 2 stages: load them for 3"):
        shard_params(loaded, model.config, make_mesh(3, 1, 1))
    with pytest.raises(ValueError, match="params do not have the model's structure"):
        save_checkpoint(tmp_path, model, loaded)
    deeper = dataclasses.replace(CONFIG, num_layers=6)
    with pytest.raises(ValueError, match="params do not have the model's structure, be it for one stage or for 4"):
        shard_params(params, dataclasses.replace(deeper, quantization=RowwiseFp8.of(6)), make_mesh(4, 1, 1))


def test_abstract_params_hold_the_largest_stage() -> None:
    mesh = make_mesh(3, 1, 2)
    (stack,) = abstract_sharded_params(CONFIG, mesh)["layers"].stacks
    assert stack["wq"].shape == (6, 64, 8, 8)
    assert stack["wq"].sharding.shard_shape(stack["wq"].shape) == (2, 64, 4, 8)


@pytest.mark.parametrize("modules", [None, pytest.param("ffn", marks=pytest.mark.slow)])
def test_processes_stack_what_each_of_them_holds(modules: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of one device, which every process has, are stacked for the stages before each takes its part."""
    model, params = make(modules)
    mesh = make_mesh(3, 1, 2)
    monkeypatch.setattr(type(mesh), "is_multi_process", property(lambda mesh: True))
    sharded = shard_params(params, model.config, mesh)
    monkeypatch.undo()
    wanted = abstract_sharded_params(model.config, mesh)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), sharded) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    assert_same_logits(model(sharded, TOKENS), modules)

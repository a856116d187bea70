"""Layers whose weights are arrays of their own, as accelerators run them: the same model as stacked layers are."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hlo import copied_bytes
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig, RowwiseFp8, load_checkpoint, save_checkpoint
from longctx.models.layer_runs import STACKED, Stacking, layer_runs
from longctx.models.layer_stacks import put_together, stacking_of, take_apart
from longctx.models.params import abstract_params, param_specs, stacking_on
from longctx.models.sharded_params import abstract_sharded_params, shard_params
from longctx.nnx import to_nnx
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.engine.page_fingerprint import page_fingerprint
from longctx.serving.kv_cache.page_layout import PageLayout

CONFIG = LlamaConfig(96, 32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=256)
TOKENS = (np.arange(24) * 7 % 96).reshape(12, 2)
PROMPTS = [[*range(3, 40)], [5, 4, 3]]


@functools.cache
def make(modules: str | None = None, num_layers: int = 4, apart: bool = False) -> tuple[Llama, dict]:
    quantization = None if modules is None else RowwiseFp8.of(num_layers, modules)
    model = Llama(dataclasses.replace(CONFIG, num_layers=num_layers, quantization=quantization))
    return model, model.init(jax.random.key(0), initializer_range=0.3, apart=apart)


def assert_same(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@given(num_layers=st.integers(1, 16), data=st.data())
def test_a_run_is_one_place_of_all_stages(num_layers: int, data: st.DataObject) -> None:
    """In the order of the places, and with the same quantised weights as stacked runs have."""
    stages = data.draw(st.integers(1, num_layers))
    names = st.sampled_from([(), ("w_up",), ("w_gate", "w_up")])
    layers = tuple(data.draw(st.lists(names, min_size=num_layers, max_size=num_layers)))
    config = dataclasses.replace(CONFIG, num_layers=num_layers, quantization=RowwiseFp8(layers))
    places = []
    for run in layer_runs(config, Stacking(stages)):
        count = len(run.layers) // stages
        places += [dataclasses.replace(run, layers=run.layers[i::count]) for i in range(count)]
    assert [*layer_runs(config, Stacking(stages, apart=True))] == places


@pytest.mark.parametrize("modules", [pytest.param(None, marks=pytest.mark.slow), "ffn"])
def test_logits_and_weights_are_those_of_stacked_layers(modules: str | None, tmp_path: Path) -> None:
    (model, stacked), (_, apart) = make(modules), make(modules, apart=True)
    assert {x.shape[0] for x in jax.tree.leaves(apart["layers"])} == {1}
    np.testing.assert_allclose(model(apart, TOKENS), model(stacked, TOKENS), atol=1e-5)
    layout = PageLayout(4, 4, 2, 8, np.dtype(np.float32).name)
    assert page_fingerprint(model.config, apart, layout) == page_fingerprint(model.config, stacked, layout)
    save_checkpoint(tmp_path, model, apart)
    assert_same(load_checkpoint(tmp_path, apart=False)[1], stacked)
    assert_same(load_checkpoint(tmp_path, apart=True)[1], apart)


@pytest.mark.parametrize(
    ("modules", "num_layers", "stages"), [("ffn", 6, 2), pytest.param(None, 4, 3, marks=pytest.mark.slow)]
)
def test_layers_of_stages_run_in_the_order_of_the_model(
    modules: str | None, num_layers: int, stages: int, tmp_path: Path
) -> None:
    """Outside of an engine too, where one device has the layers of all stages."""
    model, params = make(modules, num_layers)
    save_checkpoint(tmp_path, model, params)
    for apart in (True, False):
        _, loaded = load_checkpoint(tmp_path, make_mesh(stages, 1, 1), apart=apart)
        assert stacking_of(loaded["layers"]) in (Stacking(stages, apart), STACKED)
        np.testing.assert_allclose(model(loaded, TOKENS), model(params, TOKENS), atol=1e-4)


@pytest.mark.parametrize(("modules", "sizes"), [("ffn", (2, 1, 2)), (None, (3, 1, 1))])
def test_every_form_is_sharded_alike(modules: str | None, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """Stacks that are taken apart, apart layers of one device, and those that were loaded for the mesh."""
    (model, stacked), (_, apart), mesh = make(modules), make(modules, apart=True), make_mesh(*sizes)
    sharded = shard_params(stacked, model.config, mesh, apart=True)
    wanted = abstract_sharded_params(model.config, mesh, apart=True)
    describe = lambda x: (x.shape, x.dtype, x.sharding.shard_shape(x.shape))  # noqa: E731
    assert jax.tree.map(describe, sharded) == jax.tree.map(describe, wanted)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), sharded, wanted))
    assert_same(shard_params(apart, model.config, mesh), sharded)
    save_checkpoint(tmp_path, model, stacked)
    _, loaded = load_checkpoint(tmp_path, mesh, apart=True)
    assert jax.tree.map(lambda x: x.sharding.spec, loaded) == param_specs(model.config, mesh, apart=True)
    assert_same(shard_params(loaded, model.config, mesh), sharded)


def test_processes_take_stacks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = make()
    mesh = make_mesh(2, 1, 2)
    monkeypatch.setattr(type(mesh), "is_multi_process", property(lambda mesh: True))
    sharded = shard_params(params, model.config, mesh, apart=True)
    monkeypatch.undo()
    assert_same(sharded, shard_params(params, model.config, mesh, apart=True))


def test_a_stack_is_freed_as_it_is_taken_apart() -> None:
    _, params = make()
    stack = dict(params["layers"])
    layers = take_apart(stack, 2)
    assert not stack
    assert_same(put_together(layers), params["layers"])


def test_accelerators_have_layers_apart() -> None:
    accelerator = SimpleNamespace(platform="gpu")
    mesh: Any = SimpleNamespace(shape={"stage": 2}, devices=np.array([accelerator, accelerator]))
    assert stacking_on(CONFIG, mesh) == Stacking(2, apart=True)
    assert stacking_on(CONFIG, make_mesh()) == stacking_on(CONFIG, None) == STACKED
    assert stacking_on(CONFIG, mesh, apart=False) == Stacking(2)


def test_a_module_is_trained_on_stacked_layers() -> None:
    (model, stacked), (_, apart) = make(), make(apart=True)
    module = to_nnx(model, apart)
    np.testing.assert_array_equal(module.params["layers"]["wq"][...], stacked["layers"]["wq"])


def test_weights_are_not_copied_out_of_a_stack() -> None:
    model, _ = make()

    def copied(stacking: Stacking) -> int:
        params = abstract_params(model.config, stacking=stacking)
        run = jax.jit(lambda params: model(params, TOKENS[0]))
        return copied_bytes(run.lower(params).compile().as_text(), "params")

    layer = sum(4 * x.size for x in jax.tree.leaves(abstract_params(model.config)["layers"]))
    assert copied(Stacking(apart=True)) < layer / 4 <= copied(STACKED)


@pytest.mark.parametrize(
    ("plan", "modules"),
    [
        pytest.param(ParallelPlan(), None, marks=pytest.mark.slow),
        (ParallelPlan(stage=3, tensor=2), None),  # stages do not divide the layers
        pytest.param(ParallelPlan(stage=2, context=2, tensor=2), "ffn", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_runs_layers_that_are_given_apart(plan: ParallelPlan, modules: str | None) -> None:
    """As it does on accelerators: by one program, which gives the tokens of the model alone."""
    (model, stacked), (_, apart) = make(modules), make(modules, apart=True)
    config = EngineConfig(num_pages=24, page_size=8, max_length=64, token_budget=32, buckets=(32,), max_running=2)
    engine = Engine(model, apart, config, plan=plan)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    for prompt, tokens in zip(PROMPTS, (output.token_ids for output in outputs), strict=True):
        logits = np.asarray(model(stacked, np.array(prompt + tokens)))[len(prompt) - 1 : -1]
        best = np.sort(logits)[:, ::-1]
        chosen = logits[np.arange(len(tokens)), tokens]
        assert (best[:, 0] - chosen < 1e-4).all()

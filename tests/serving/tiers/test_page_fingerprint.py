"""Which engines know each other's pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longctx.models import LlamaConfig, load_checkpoint
from longctx.models.builtin import TINY
from longctx.models.params import init_params
from longctx.models.rope_config import RopeConfig
from longctx.parallel.mesh import make_mesh
from longctx.serving.engine.page_fingerprint import page_fingerprint
from longctx.serving.kv_cache.page_layout import PageLayout

CONFIG = LlamaConfig(64, 16, 32, 3, 4, 2, 4)
PARAMS = init_params(CONFIG, jax.random.key(0), jnp.bfloat16)
PAGES = PageLayout(3, 2, 4, 8, "bfloat16")
OWN = page_fingerprint(CONFIG, PARAMS, PAGES)


def test_the_same_weights_have_one_fingerprint() -> None:
    assert page_fingerprint(CONFIG, init_params(CONFIG, jax.random.key(0), jnp.bfloat16), PAGES) == OWN
    assert page_fingerprint(CONFIG, jax.tree.map(np.asarray, PARAMS), PAGES) == OWN
    longer = dataclasses.replace(CONFIG, max_positions=99, eos_ids=(3,))
    assert page_fingerprint(longer, PARAMS, PAGES) == OWN
    # Keys and values don't follow from the head.
    assert page_fingerprint(CONFIG, PARAMS | {"lm_head": PARAMS["lm_head"] * 2}, PAGES) == OWN


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2), (3, 1, 2)])
def test_a_mesh_makes_no_difference(shape: tuple[int, int, int]) -> None:
    specs = jax.tree.map(lambda x: jax.sharding.PartitionSpec(*(None,) * (x.ndim - 1), "tensor"), PARAMS["layers"])
    mesh = make_mesh(*shape)
    put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
    assert page_fingerprint(CONFIG, PARAMS | {"layers": jax.tree.map(put, PARAMS["layers"], specs)}, PAGES) == OWN


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((3, 1, 2), marks=pytest.mark.slow)])
def test_a_checkpoint_that_is_loaded_on_a_mesh_is_the_same(shape: tuple[int, int, int]) -> None:
    model, params = load_checkpoint(TINY)
    config = model.config
    pages = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, 64, str(params["embed"].dtype))
    _, on_mesh = load_checkpoint(TINY, mesh=make_mesh(*shape))
    assert page_fingerprint(config, on_mesh, pages) == page_fingerprint(config, params, pages)


def test_any_weight_any_setting_and_the_layout_make_a_difference() -> None:
    found = [OWN]
    for path, leaf in jax.tree_util.tree_leaves_with_path({"embed": PARAMS["embed"], "layers": PARAMS["layers"]}):
        bits = np.asarray(leaf).view(np.uint16).copy()
        bits.flat[-1] ^= 1  # one bit of one element
        changed = jax.tree_util.tree_map_with_path(
            lambda other, x, path=path, bits=bits: bits.view(jnp.bfloat16) if other == path else x, PARAMS
        )
        found.append(page_fingerprint(CONFIG, changed, PAGES))
    swapped = dict(PARAMS["layers"]) | {"wk": PARAMS["layers"]["wv"], "wv": PARAMS["layers"]["wk"]}
    found.append(page_fingerprint(CONFIG, PARAMS | {"layers": swapped}, PAGES))
    reversed_layers = jax.tree.map(lambda x: x[::-1], PARAMS["layers"])
    found.append(page_fingerprint(CONFIG, PARAMS | {"layers": reversed_layers}, PAGES))
    for other in (
        dataclasses.replace(CONFIG, norm_eps=1e-6),
        dataclasses.replace(CONFIG, rope=RopeConfig(theta=5e5)),
    ):
        found.append(page_fingerprint(other, PARAMS, PAGES))
    for name, value in {"page_size": 16, "dtype": "float16", "num_kv_heads": 4}.items():
        found.append(page_fingerprint(CONFIG, PARAMS, PAGES._replace(**{name: value})))
    assert len(set(found)) == len(found) > 15

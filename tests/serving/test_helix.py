"""Engines whose feed-forward is sharded over context ranks too (Helix): tokens of one device, and fewer weights."""

import functools
import math

import jax.numpy as jnp
import pytest
from abstract_step import CONFIG, PAGE_SIZE, abstract_params, abstract_state, compile_step, make_shape
from hlo import collectives
from mesh_workload import STRATEGIES, check_tokens

from longctx.models import LlamaConfig
from longctx.parallel import make_mesh
from longctx.serving import ParallelPlan

GROW, AUTO, PASS_Q, PASS_KV = STRATEGIES
FEW = [((1, 4, 2), GROW), ((1, 3, 1), PASS_KV)]
MORE = [
    (sizes, strategy)
    for sizes in ((1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1), (1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 2, 2), (3, 2, 1))
    for strategy in STRATEGIES
    if (sizes, strategy) not in FEW
]


@pytest.mark.parametrize(("sizes", "strategy"), FEW, ids=str)
def test_tokens_equal_those_of_one_device(sizes: tuple[int, int, int], strategy: tuple[str, str]) -> None:
    """Local, replicated and sharded rows; requests on some of the ranks, on one KV head that devices share."""
    check_tokens(sizes, strategy, events=40, ffn="all")


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "strategy"), MORE, ids=str)
def test_tokens_of_more_plans_equal_those_of_one_device(sizes: tuple[int, int, int], strategy: tuple[str, str]) -> None:
    check_tokens(sizes, strategy, ffn="all")


@functools.cache
def layer_traffic(rows: tuple[int, int, int], ffn: str) -> dict[tuple[str, tuple[str, ...]], list[float]]:
    """Bytes that a device sends in a layer, of each collective, by its opcode and axes."""
    mesh = make_mesh(context=2, tensor=2)
    program = compile_step(mesh, make_shape(mesh, rows, ffn=ffn), jnp.float32, layered=True).layer
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for each in collectives(program.as_text(), mesh.size):
        found.setdefault((each.opcode, each.axes({"context": 2, "tensor": 2})), []).append(each.sent)
    return found


def test_replicated_rows_take_an_all_to_all_and_sums_over_all_devices() -> None:
    """A decode sends no row to be computed elsewhere: states of other ranks' heads, and two all-reduces."""
    heads, size, hidden = CONFIG.num_heads // 2, CONFIG.head_dim, CONFIG.hidden_size
    rows = 16
    sums = [2 * 3 / 4 * rows * hidden * 4] * 2
    assert layer_traffic((0, rows, 0), "all") == {
        ("all-to-all", ("context",)): [rows * heads * (size + 1) * 4 / 2],
        ("all-reduce", ("context", "tensor")): sums,
    }


@pytest.mark.parametrize("rows", [(0, 0, 16), pytest.param((16, 0, 0), marks=pytest.mark.slow)])
def test_rows_of_a_rank_are_gathered_and_their_sums_scattered(rows: tuple[int, int, int]) -> None:
    """As in sequence parallelism; the exchange of sharded rows' keys comes on top."""
    heads, size, hidden = CONFIG.num_heads // 2, CONFIG.head_dim, CONFIG.hidden_size
    more, plain = layer_traffic(rows, "all"), layer_traffic(rows, "tensor")
    added = {kind: sum(sent) - sum(plain.get(kind, [])) for kind, sent in more.items()}
    assert {kind: sent for kind, sent in added.items() if sent} == {
        ("all-to-all", ("context",)): 16 * heads * size * 4 / 2,
        ("all-gather", ("context",)): 16 * hidden * 4,
        ("reduce-scatter", ("context",)): 2 * 16 * hidden * 4,
    }


def test_context_ranks_instead_of_copies_of_kv_heads_halve_the_cache() -> None:
    """8 devices, 4 KV heads: `tensor=8` has each key twice, `context=2, tensor=4` once, with as few of most weights."""
    config, tokens, found = LlamaConfig(64, 32, 48, 2, 8, 4, 8), 1024, []
    for plan in (ParallelPlan(tensor=8), ParallelPlan(context=2, tensor=4, ffn="all")):
        mesh, pages = make_mesh(plan.stage, plan.context, plan.tensor), tokens // PAGE_SIZE // plan.context
        pool = abstract_state(mesh, jnp.bfloat16, config, pages).cache.k
        params = abstract_params(mesh, jnp.bfloat16, config, ffn=plan.ffn)["layers"]
        sizes = {name: math.prod(x.sharding.shard_shape(x.shape)) for name, x in params.items()}
        found.append(sizes | {"pool": math.prod(pool.sharding.shard_shape(pool.shape))})
    copies, ranks = found
    assert {name: ranks[name] / size for name, size in copies.items() if ranks[name] != size} == {
        "pool": 1 / 2,
        "wq": 2,
    }

"""Annotations accept what functions take: the package under `jaxtyping.install_import_hook`, in fresh processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = """
from jaxtyping import install_import_hook
hook = install_import_hook("longctx", "beartype.beartype")
import jax
jax.config.update("jax_num_cpu_devices", 8)
"""

IMPORTS = """
import importlib, pkgutil
import longctx
for module in pkgutil.walk_packages(longctx.__path__, "longctx."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""

CALLS = """
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from longctx.kernels import attention, merge_state, paged_attention, plan_attention, plan_paged_attention, write_pages
from longctx.parallel import *
from longctx.parallel import Device, Hardware, Link, ModelShape, Topology

numpy = np.random.default_rng(0)
q, k, v = (numpy.standard_normal((6, heads, 8), np.float32) for heads in (4, 2, 2))
for scale in (1, np.float32(1)):
    out = attention(q, k, v, scale=scale)[0]
positions, segments = [0, 1, 2, 3, 4, 5], (0, 0, 0, 1, 1, -1)
state = attention(
    q, k, v, q_positions=positions, kv_positions=positions, q_segment_ids=segments, kv_segment_ids=segments
)
merge_state(*state, *state)
plan = plan_attention(jax.ShapeDtypeStruct(q.shape, q.dtype), k, positions, positions)
attention(q, k, v, plan=plan)

hardware = Hardware(500 * 10**12, 25 * 10**9, bytes_per_element=1, latency=0)
for rule in ("predicted", EmpiricalRule(1, 0, -2)):
    print(choose_ring(np.int32(10), 20, 2, ModelShape(4, 2, 8), hardware, rule).explain())
device = Device("mine", {"bfloat16": 10**15}, 10**12, np.float32(8e10), flops_share=1)
topology = Topology(device, {"context": Link("wire", 10**10, 0)})
choose_ring(10, 20, 2, ModelShape(4, 2, 8), topology)
find_topology(make_mesh(context=2))
"""

MESH_CALLS = """
pool = jnp.zeros((8, 4, 2, 8))
k_pages, v_pages = write_pages(pool, pool, k, v, [5, 5, 5, 5, 2, 2], [0, 1, 2, 3, 0, 1])
metadata = [[5, 2]], None, [6], [4, 5], [0, 0]
plan = plan_paged_attention(4, pool, *metadata)
paged_attention(q[4:], k_pages, v_pages, *metadata, scale=1, plan=plan)
paged_attention(q[4:], np.asarray(k_pages), np.asarray(v_pages), *metadata, first_page=0)

mesh = make_mesh(context=2)
context_parallel_attention(q, k, v, mesh=mesh, scale=1, q_positions=positions, kv_positions=positions)
for method in (ring_pass_kv, ring_pass_q, all_gather_kv, kvp_attention, helix_attention, ulysses_attention):
    def local(q, k, v, positions):
        return method(q, k, v, [5, 5, 5], positions, scale=1)[0]
    over = P("context")
    jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)(q, k, v, jnp.arange(6))
x = shard_sequence(jnp.arange(6)[None], np.int32(2), pad_value=0)
unshard_sequence(x, num_shards=2)
plan_varseq([3, 4], None, 2), plan_varseq(np.array([3, 4]), np.array([0, 5]), np.int32(2))
"""

ENGINE = """
from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, SamplingParams
model, params = load_checkpoint(TINY)
config = EngineConfig(max_running=2, max_length=64, num_pages=16, token_budget=16, buckets=(16,))
engine = Engine(model, params, config, tokenizer=load_tokenizer(TINY))
parameters = SamplingParams(max_tokens=2, temperature=1, top_p=1, seed=0)
print(engine.generate(["The pass key of ", [1, 2, 3]], parameters)[0].finish_reason)
"""

EXAMPLES = """
import doctest, os, sys
from public_names import documented
os.chdir(sys.argv[1])
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
for name, item in sorted(documented().items()):
    if item.kind in ("function", "class", "constant"):
        example = doctest.DocTestParser().get_doctest(item.doc, {"__name__": "__main__"}, name, None, 0)
        assert doctest.DocTestRunner(optionflags=flags).run(example).failed == 0, name
"""


def run_under_hook(program: str, *arguments: str) -> str:
    root = Path(__file__).parent
    path = os.pathsep.join([str(root.parent), str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", HOOK + program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_functions_take_lists_and_integers_under_a_type_checker_and_no_strings() -> None:
    refused = """
try:
    attention(q, k, v, scale="1")
except Exception as error:
    print(type(error).__name__)
"""
    printed = run_under_hook(CALLS + refused)
    assert "by empirical" in printed
    assert printed.splitlines()[-1] == "TypeCheckError"


@pytest.mark.slow
def test_functions_of_meshes_and_pages_do_so_too() -> None:
    run_under_hook(CALLS + MESH_CALLS)


@pytest.mark.slow
def test_every_module_is_imported_under_a_type_checker() -> None:
    assert "longctx.simulation.workloads.lengths" in run_under_hook(IMPORTS)


@pytest.mark.slow
def test_an_engine_generates_under_a_type_checker() -> None:
    assert run_under_hook(ENGINE).split() == ["length"]


@pytest.mark.slow
def test_examples_run_under_a_type_checker(tmp_path: Path) -> None:
    run_under_hook(EXAMPLES, str(tmp_path))

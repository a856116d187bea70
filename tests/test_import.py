"""Imports in fresh processes: what they load, and what the packages export."""

import importlib
import re
import subprocess
import sys

import pytest

import longctx

HEAVY = {"torch", "transformers", "tokenizers", "jinja2", "flax", "optax"}


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_import_of_models_loads_nothing_heavy() -> None:
    """The first use of a lazy name comes before any other import."""
    program = f"""
import longctx
print(longctx.Request.__module__, longctx.attention.__name__, longctx.make_mesh.__name__)
import sys
from longctx.models import Llama, load_checkpoint, load_tokenizer
print(*sorted({HEAVY} & set(sys.modules)))
"""
    assert run(program).split()[1:] == ["attention", "make_mesh"]


def test_names_listed_in_the_docstring_of_longctx_are_its_exports() -> None:
    names = set(re.findall(r"`(\w+)`", longctx.__doc__ or ""))
    assert names == set(longctx.__all__)
    assert all(callable(getattr(longctx, name)) for name in names)
    assert longctx.__version__


@pytest.mark.parametrize("package", ["longctx.parallel", "longctx.models", "longctx.cluster.transfer"])
def test_exported_names_resolve(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


PURE = [
    "longctx.models.builtin",
    "longctx.parallel.choose",
    "longctx.parallel.cost",
    "longctx.parallel.varseq",
    "longctx.serving.scheduler.scheduler",
    "longctx.serving.kv_cache.page_pool",
    "longctx.serving.engine.core",
    "longctx.serving.engine.build",
    "longctx.serving.executor.interface",
    "longctx.simulation.event_loop",
    "longctx.simulation.instance.host_times",
    "longctx.simulation.instance.instance",
    "longctx.simulation.simulation",
    "longctx.simulation.replay",
    "longctx.simulation.reports.report",
    "longctx.simulation.reports.html_report",
    "longctx.simulation.planner.search",
    "papers.figures.__main__",
    "longctx.serving.recording.recorder",
    "longctx.simulation.incident.compare",
    "longctx.simulation.incident.explain",
    "longctx.cluster.transfer.zmq_sender",
    "longctx.cluster.transfer.zmq_receiver",
    "longctx.cluster.transfer.local",
    "longctx.cluster.conductor.conductor",
    "longctx.cluster.conductor.costs",
    "longctx.cluster.prefix_index.index",
    "longctx.cluster.prefix_index.reader",
]


def test_deciding_and_simulating_modules_load_no_jax() -> None:
    program = f"""
import longctx
dir(longctx); longctx.xla_flags()
import sys, {", ".join(PURE)}
from longctx.models import ByteTokenizer, LlamaConfig, load_tokenizer
LlamaConfig.preset("llama-3-8b").to_hf()
from longctx.serving import EngineConfig
from longctx.parallel.topology import Topology
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Instance, Simulation
from longctx.simulation.workloads import WorkloadRequest

model = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=131072)
predictor = roofline(model, Topology.preset("h100-nvlink"), 512)
simulation = Simulation([Instance(model, EngineConfig(num_pages=4096), predictor)])
record = simulation.run([WorkloadRequest(0.0, 5000, 20), WorkloadRequest(0.1, 100, 20, number=1)])
assert len(record.served) == 2
print(*(name for name in sys.modules if name.partition(".")[0] == "jax"))
"""
    assert run(program).split() == []

"""The engine's step compiled for 8 and 128 H100: its collectives, their bytes and axes, and its memory.

A case lists all collectives of a program. Their bytes do not depend on the lengths of sequences.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from abstract_step import PAGE_SIZE, TOP, compile_sampling, compile_step, make_shape
from h100 import h100_devices, h100_mesh
from hlo import IN_PLACE, collectives, copied_bytes, opcodes_of_size
from jax.sharding import Mesh

from longctx.models import LlamaConfig
from longctx.models.footprint import cache_bytes, kv_row_bytes
from longctx.models.sharded_params import device_config
from longctx.models.validation import FP8_KV
from longctx.parallel.topology import AXES
from longctx.serving.distributed.mesh import arrange_devices
from longctx.serving.request.sampling_params import SamplingLevel
from longctx.serving.runner.step_inputs import Shape

# With more than 80 % of a device's 85 GB in use, XLA's scheduler has too little memory left to overlap messages.
MEMORY = 68 * 10**9
BF16, F32 = 2, 4  # bytes
STEP, ROUNDS = "step", "body"  # places of collectives: the step itself with its layers, and the rounds of a ring


class Case(NamedTuple):
    model: str
    mesh: tuple[int, int, int]
    rows: tuple[int, int, int]  # sharded, replicated and local, on each rank
    temp: int  # MiB that the program may use besides its arguments
    exchange: str = "pass_q"
    message: int = 0
    rounds: int = 1
    merge: str = "gather"
    num_pages: int = 16384  # of each rank; a million tokens
    kv_dtype: str | None = None
    num_layers: int | None = None  # None: all of the model's
    ffn: Literal["tensor", "all"] = "tensor"

    @property
    def config(self) -> LlamaConfig:
        config = LlamaConfig.preset(self.model)
        return dataclasses.replace(config, num_layers=self.num_layers or config.num_layers)

    def __str__(self) -> str:
        exchange = f"{self.exchange}-{self.message}" if self.rows[0] else ""
        sizes = ("x".join(map(str, self.mesh)), "+".join(map(str, self.rows)))
        helix = "helix" if self.ffn == "all" else ""
        return "-".join(filter(None, [self.model, *sizes, exchange, self.kv_dtype, helix]))


class Sent(NamedTuple):
    where: str
    opcode: str
    axes: tuple[str, ...]
    sent: float


CUBE, POD = (2, 2, 2), (4, 4, 8)
CASES = [
    Case("llama-3-8b", CUBE, (512, 64, 64), 224, num_layers=2),
    Case("llama-3-8b", (1, 2, 4), (0, 64, 64), 224, num_layers=2, ffn="all"),
]
MORE_CASES = [
    Case("llama-3-8b", CUBE, (512, 64, 64), 224),
    # 16 times as many positions, and more pages.
    Case("llama-3.1-8b", CUBE, (512, 1024, 64), 256, "pass_kv", 128, merge="all-to-all", num_pages=24576),
    # What a message has no room for goes round again.
    Case("llama-3-8b", (1, 8, 1), (512, 0, 64), 600, "pass_kv", 64, 8, num_pages=4096),
    # Nothing is cached.
    Case("llama-3-8b", (1, 8, 1), (512, 0, 64), 600, "pass_kv", num_pages=4096),
    Case("llama-3-8b", CUBE, (512, 0, 64), 224, "all_gather"),
    Case("llama-3-8b", CUBE, (512, 0, 64), 224, "all_gather", 64),
    Case("llama-3-8b", CUBE, (0, 64, 64), 192),
    Case("llama-3.1-8b", CUBE, (0, 64, 64), 192, num_pages=24576),
    Case("llama-3-8b", (8, 1, 1), (0, 0, 64), 448),
    Case("llama-3-8b", (1, 8, 1), (512, 64, 64), 512, merge="all-to-all", num_pages=4096),
    Case("llama-3-8b", (1, 1, 8), (0, 0, 64), 64),
    Case("llama-3-70b", (1, 1, 8), (0, 0, 64), 64, num_pages=2048),
    Case("llama-3-70b", POD, (0, 64, 64), 224, num_pages=65536),
    Case("llama-3-70b", POD, (512, 64, 64), 256, num_pages=65536),
    Case("llama-3-70b", POD, (512, 0, 64), 256, "pass_kv", 128, num_pages=65536),
    # Keys travel as e4m3 values and scales.
    Case("llama-3.1-8b", CUBE, (512, 64, 64), 256, "pass_kv", 128, num_pages=24576, kv_dtype=FP8_KV),
    Case("llama-3-8b", (1, 8, 1), (512, 0, 64), 600, "pass_kv", 64, 8, num_pages=4096, kv_dtype=FP8_KV),
    Case("llama-3-8b", CUBE, (512, 0, 64), 224, "all_gather", 64, kv_dtype=FP8_KV),
    Case("llama-3-70b", POD, (512, 64, 64), 320, num_pages=65536, ffn="all"),
    Case("llama-3-70b", (1, 8, 8), (0, 64, 0), 224, num_pages=16384, ffn="all"),
]


def expected(case: Case, mesh: Mesh, shape: Shape) -> Iterator[Sent]:
    """All messages of a device in one step; their bytes are 0 over axes of size 1."""
    config, sizes = device_config(case.config, mesh), dict(mesh.shape)
    stages, ranks, tensor = sizes.values()
    heads, kv_heads, size = config.num_heads // tensor, config.num_kv_heads // tensor, config.head_dim

    def all_reduce(where: str, numbers: int, width: int, *axes: str) -> Sent:
        n = math.prod(sizes[axis] for axis in axes)
        return Sent(where, "all-reduce", axes, 2 * (n - 1) / n * numbers * width)

    def all_gather(where: str, numbers: int, width: int, *axes: str) -> Sent:
        n = math.prod(sizes[axis] for axis in axes)
        return Sent(where, "all-gather", axes, (n - 1) * numbers * width)

    def all_to_all(numbers: int, width: int) -> Sent:
        return Sent(STEP, "all-to-all", ("context",), (ranks - 1) / ranks * numbers * width)

    def ring(where: str, num_bytes: int) -> Iterator[Sent]:
        return itertools.repeat(Sent(where, "collective-permute", ("context",), num_bytes), ranks - 1)

    hidden, state = shape.rows * config.hidden_size, heads * (size + 1)
    token = 2 * kv_heads * kv_row_bytes(size, BF16, case.kv_dtype)
    cached = shape.message * PAGE_SIZE

    def helix() -> Iterator[Sent]:
        own, replicated = ((shape.sharded + shape.local) * config.hidden_size, shape.replicated * config.hidden_size)
        for _ in range(2):  # attention, feed-forward
            yield Sent(STEP, "reduce-scatter", ("context",), (ranks - 1) * own * BF16)
            yield all_reduce(STEP, own, BF16, "tensor")
            yield all_reduce(STEP, replicated, BF16, "context", "tensor")
        yield all_to_all((shape.sharded + shape.local) * heads * size, BF16)
        yield all_gather(STEP, own, BF16, "context")
        yield all_to_all(shape.replicated * state, F32)

    def layer() -> Iterator[Sent]:
        if shape.shares_ffn:
            yield from helix()
        else:
            for _ in range(2):  # attention, feed-forward
                yield all_reduce(STEP, hidden, BF16, "tensor")
        if shape.shares_ffn or not shape.replicated:
            pass
        elif case.merge == "gather":
            yield all_gather(STEP, shape.replicated * state, F32, "context")
        else:
            yield all_to_all(shape.replicated * state, F32)
            yield all_to_all(shape.replicated * heads * size, BF16)
        if not shape.sharded:
            return
        if shape.exchange == "pass_kv":
            yield from ring(STEP, (cached + shape.sharded) * token)
            if shape.rounds > 1:
                yield from ring(ROUNDS, cached * token)
            return
        yield all_gather(STEP, shape.sharded * token, 1, "context")
        if shape.exchange == "all_gather":
            yield all_gather(STEP, cached * token, 1, "context")
        else:
            yield all_to_all(ranks * shape.sharded * state, F32)
            yield from ring(STEP, shape.sharded * heads * size * BF16)

    for _ in range(config.num_layers // stages):
        yield from layer()
    yield all_reduce(STEP, hidden, BF16, "tensor")  # embedding
    yield Sent(STEP, "collective-permute", ("stage",), hidden * BF16 if stages > 1 else 0)
    yield all_reduce(STEP, shape.samples * config.hidden_size, BF16, "stage")
    if shape.sharded and shape.message:
        yield all_gather(STEP, 4 * shape.message * shape.rounds, F32, "context")  # what each page is


def hidden_by_pass_q(case: Case, mesh: Mesh, shape: Shape) -> list[tuple[str, float]]:
    """The gathering of new keys, beside the last queries' attention, and the states' way home, beside that to them."""
    config, others = device_config(case.config, mesh), shape.ranks - 1
    kv_heads, heads = (count // mesh.shape["tensor"] for count in (config.num_kv_heads, config.num_heads))
    token = 2 * kv_heads * kv_row_bytes(config.head_dim, BF16, case.kv_dtype)
    state = heads * (config.head_dim + 1) * F32
    return [("all-gather", others * shape.sharded * token), ("all-to-all", others * shape.sharded * state)]


def check(case: Case) -> None:
    mesh = h100_mesh(**dict(zip(AXES, case.mesh, strict=True)))
    options = {"exchange": case.exchange, "message": case.message, "rounds": case.rounds, "ffn": case.ffn}
    shape = make_shape(mesh, case.rows, case.num_pages, **options)
    options = {"sections": case.rows, "kv_dtype": case.kv_dtype}
    compiled = compile_step(mesh, shape, jnp.bfloat16, case.config, **options)
    memory, text = compiled.memory_analysis(), compiled.as_text()

    found = collectives(text, mesh.size)
    sent = [Sent(" in ".join(x.within) or STEP, x.opcode, x.axes(mesh.shape), x.sent) for x in found]
    axes = {name for name in AXES if mesh.shape[name] > 1}
    wanted = [x._replace(axes=tuple(a for a in x.axes if a in axes)) for x in expected(case, mesh, shape) if x.sent]
    assert sorted(sent) == sorted(wanted)
    for x in found:
        if x.opcode == "collective-permute":
            # The embedding and the attention plan hide the permute of stages; attention to a block hides a ring's.
            work = "fusion" if x.axes(mesh.shape) == ("stage",) else "custom-call"
            assert x.is_async, x
            assert work in x.hidden_by, x
        elif shape.exchange == "pass_q" and (x.opcode, x.sent) in hidden_by_pass_q(case, mesh, shape):
            assert x.is_async, x
            assert "custom-call" in x.hidden_by, x
    assert "mosaic_gpu" in text
    assert copied_bytes(text, "params") == 0

    config = device_config(case.config, mesh)
    width = config.num_kv_heads // mesh.shape["tensor"] * config.head_dim
    sizes = (mesh.shape["stage"], mesh.shape["tensor"])
    cache = cache_bytes(config, case.num_pages * PAGE_SIZE, *sizes, kv_dtype=case.kv_dtype)
    assert memory.alias_size_in_bytes >= cache
    assert opcodes_of_size(text, case.num_pages * PAGE_SIZE * width) <= IN_PLACE
    assert memory.temp_size_in_bytes <= case.temp << 20
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < MEMORY


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_has_the_expected_collectives(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=str)
def test_more_steps_have_the_expected_collectives(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(x, marks=() if x is SamplingLevel.TEMPERATURE else pytest.mark.slow)
        for x in (SamplingLevel.GREEDY, SamplingLevel.TEMPERATURE, SamplingLevel.FILTERS, SamplingLevel.LOGPROBS)
    ],
    ids=lambda level: level.name,
)
def test_only_filters_and_logprobs_gather_logits(level: SamplingLevel) -> None:
    """Sampling by temperature reduces one more number a row than greedy sampling, over the vocabulary's shards."""
    mesh, config = h100_mesh(stage=1, context=2, tensor=4), LlamaConfig.preset("llama-3-8b")
    shape = make_shape(mesh, (0, 0, 64), 4096)
    text = compile_sampling(mesh, shape, jnp.bfloat16, config, [level])[level].as_text()
    assert not re.search(r" (conditional|sort|while)\(", text)
    found = [(x.opcode, x.axes(mesh.shape), x.sent) for x in collectives(text, mesh.size)]
    row, logits = shape.samples * F32, shape.samples * config.vocab_size * F32
    reduced = ("all-reduce", ("tensor",), 2 * 3 / 4 * row)
    tokens = ("all-gather", ("context",), row)
    if level is SamplingLevel.LOGPROBS:  # one all-gather may carry the log probabilities too
        assert sum(sent for _, axes, sent in found if axes == ("context",)) == row * (2 + 2 * TOP)
    else:
        gathered = ("all-gather", ("tensor",), 3 / 4 * logits)
        before = {"GREEDY": [reduced] * 2, "TEMPERATURE": [reduced] * 3, "FILTERS": [gathered]}
        assert found == [*before[level.name], tokens]


def check_host_traffic(mesh: Mesh, rows: tuple[int, int, int]) -> None:
    shape = make_shape(mesh, rows, 4096)
    compiled = compile_step(mesh, shape, jnp.bfloat16, LlamaConfig.preset("llama-3-8b"), sections=rows)
    # Groups contain indices into the devices of the mesh.
    hosts = [device.process_index for device in mesh.devices.flat]
    across = set()
    for x in collectives(compiled.as_text(), mesh.size):
        if any(len({hosts[i] for i in group}) > 1 for group in x.groups or (range(mesh.size),)):
            across.add((x.opcode, x.axes(mesh.shape)))
        elif x.opcode == "all-reduce":
            assert x.axes(mesh.shape) == ("tensor",)
    assert not [axes for opcode, axes in across if axes == ("tensor",)]
    assert ("collective-permute", ("stage",)) in across


@pytest.mark.slow
def test_tensor_stays_inside_a_host() -> None:
    """There are 2 hosts with 8 devices each, listed in reverse."""
    devices = h100_devices(2, 8)
    assert sorted({device.process_index for device in devices}) == [0, 1]
    check_host_traffic(arrange_devices(devices[::-1], ["a", "b"], 2, 1, 8), (0, 0, 64))


@pytest.mark.slow
def test_context_may_span_hosts() -> None:
    check_host_traffic(arrange_devices(h100_devices(2, 8), ["a", "b"], 2, 2, 4), (512, 64, 64))
    # Each host has two processes.
    mesh = arrange_devices(h100_devices(4, 4), ["a", "b", "a", "b"], 2, 1, 8)
    names = np.array(["abab"[device.process_index] for device in mesh.devices.flat]).reshape(2, 8)
    assert names.tolist() == [["a"] * 8, ["b"] * 8]

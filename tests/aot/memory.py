"""Pages that are found for an H100, with more memory or less, leave room for the programs that it runs."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from abstract_step import abstract_params
from h100 import h100_mesh
from jax.sharding import Mesh

from longctx.cli.engine import check_memory
from longctx.cli.terminal import Console
from longctx.models import Llama, LlamaConfig
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.engine import memory
from longctx.serving.executor.page_fit import PageFit
from longctx.serving.executor.step_shapes import StepShapes
from longctx.serving.runner.device_memory import DeviceMemory, MemoryUse
from longctx.serving.runner.model_runner import abstract_state
from longctx.serving.runner.step import step_program
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs

GIB = 2**30
LLAMA = LlamaConfig.preset("llama-3-8b")
PRESETS = {
    "default": EngineConfig(),
    "meta": EngineConfig.meta(),
    "medha": EngineConfig.medha(),
    "sarathi": EngineConfig.sarathi(),
}


def device_memory(physical: int, share: float, used: int = 0) -> DeviceMemory:
    return DeviceMemory(int(share * physical), used, physical, int(0.8 * physical))


@pytest.mark.parametrize("share", [0.75, 0.9])
@pytest.mark.parametrize("physical", [24 * GIB, 80 * GIB])
@pytest.mark.parametrize("preset", PRESETS)
def test_8b_fits_or_is_refused_before_it_is_loaded(
    preset: str, physical: int, share: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An 80 GB device takes every preset."""
    found = device_memory(physical, share)
    monkeypatch.setattr(DeviceMemory, "of", lambda devices: found)
    mesh, config = h100_mesh(stage=1, context=1, tensor=1), PRESETS[preset]
    arguments: Any = Console(False), Llama(LLAMA), config, ParallelPlan(), mesh, jnp.dtype(jnp.bfloat16)
    if preset == "meta" and physical == 24 * GIB:
        with pytest.raises(ValueError, match="token_budget"):
            check_memory(*arguments)
        return
    pages = check_memory(*arguments)
    needed = memory.estimate(Llama(LLAMA), config, mesh, jnp.bfloat16, pages, LLAMA.max_positions)
    assert needed.total <= found.limit
    assert needed.weights + needed.pages <= found.program_limit
    assert pages * config.page_size > (100_000 if physical == 80 * GIB else 8192 if share == 0.9 else 3000)
    assert "by estimation" in capsys.readouterr().err


def compile_step(llama: LlamaConfig, config: EngineConfig, mesh: Mesh, pages: int, length: int) -> list[Any]:
    """The programs of the largest steps, as `ModelRunner` compiles them."""
    entries, dtype = -(-length // config.page_size), jnp.dtype(jnp.bfloat16)
    shapes = StepShapes(llama, config, ParallelPlan(), pages, entries, 2)
    sizes = config.max_running, entries, sum(config.step_rows(ParallelPlan()).largest)
    state = abstract_state(llama, mesh, dtype, dtype, pages, config.page_size, *sizes)
    params, programs, sections = abstract_params(mesh, dtype, llama), [], (0, 0)
    for shape in shapes.largest_shapes():
        inputs = RowInputs.empty(shape)[0][None], SampleInputs.empty(shape)[0]
        with jax.set_mesh(mesh):
            lowered = step_program(mesh).lower(Llama(llama), mesh, params, state, *inputs, shape, sections)
            programs.append(lowered.compile())
    return programs


def check_fit(
    llama: LlamaConfig, config: EngineConfig, physical: int, length: int, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh, rounds = h100_mesh(physical, stage=1, context=1, tensor=1), []
    params = memory.param_bytes(Llama(llama), mesh, jnp.bfloat16)
    found = device_memory(physical, 0.9, params)

    def measure() -> MemoryUse:
        with mock.patch.object(DeviceMemory, "of", return_value=found):
            return memory.estimate(Llama(llama), config, mesh, jnp.bfloat16, 0, length, is_loaded=True)

    fit = PageFit(measure, memory.most_pages(config, length), memory.steps_in_flight(config))

    def compile_largest(pages: int) -> list[Any]:
        capfd.readouterr()
        rounds.append((pages, compile_step(llama, config, mesh, pages, length)))
        return rounds[-1][1]

    pages = fit.choose(None, compile_largest)
    assert pages == rounds[-1][0]
    assert len(rounds) <= 2
    assert "rematerialization" not in capfd.readouterr().err  # XLA had no need to save memory
    assert fit.use is not None
    for program in rounds[-1][1]:
        about = program.memory_analysis()
        assert about.alias_size_in_bytes >= fit.use.pages
        assert about.argument_size_in_bytes + about.temp_size_in_bytes / 0.95 <= 0.8 * physical
        assert about.argument_size_in_bytes + about.temp_size_in_bytes <= found.limit


@pytest.mark.slow
def test_pages_leave_room_for_the_programs_of_a_small_device(capfd: pytest.CaptureFixture[str]) -> None:
    llama = LlamaConfig(1024, 512, 1024, 1, 8, 2, 128, max_positions=8192)
    check_fit(llama, EngineConfig(token_budget=128, max_running=16, max_logprobs=0), GIB // 4, 8192, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("physical", [24 * GIB, 80 * GIB])
def test_pages_leave_room_for_the_programs_of_8b(physical: int, capfd: pytest.CaptureFixture[str]) -> None:
    check_fit(dataclasses.replace(LLAMA, max_positions=131_072), EngineConfig(), physical, 131_072, capfd)

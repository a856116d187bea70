"""Where the memory of an accelerator goes: arithmetic, and engines on CPUs whose memory is taken for a GPU's."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import count_compilations
from dense_oracle import VOCAB, make_engine
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.engine.memory import estimate
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.page_fit import PageFit
from longctx.serving.executor.step_shapes import StepShapes
from longctx.serving.runner.device_memory import DeviceMemory, MemoryUse, ProgramMemory

GPU = DeviceMemory(limit=900, used=300, physical=1000, program_limit=800)
USE = MemoryUse(GPU, 200, 10, 0, page=7, page_tokens=4, temporaries=30, outputs=6, autotuning=40, transfers=5)


def device(limit: int, in_use: int, platform: str = "gpu") -> Any:
    return SimpleNamespace(platform=platform, memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": in_use})


def test_the_least_memory_of_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    devices = [device(900, 100), device(750, 0), device(900, 200)]
    assert DeviceMemory.of(devices) == (750, 50, 1000, 800)  # of 75 %, as JAX takes by itself
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".9")
    assert DeviceMemory.of([device(900, 100)]) == (900, 100, 1000, 800)
    assert DeviceMemory.of([device(900, 100, "tpu")]) == (900, 100, 900, 900)
    assert DeviceMemory.of([device(900, 100, "cpu")]) is None
    assert DeviceMemory.of([SimpleNamespace(platform="gpu", memory_stats=lambda: None)]) is None  # type: ignore[list-item]


@given(
    st.tuples(*[st.integers(0, 10**6)] * 9),
    st.integers(1, 10**4),
    st.integers(5 * 10**6, 10**7),
    st.floats(0.5, 1),
)
def test_as_many_pages_fit_as_leave_room_for_all_else(
    parts: tuple[int, ...], page: int, physical: int, fraction: float
) -> None:
    limit = int(fraction * physical)
    weights, slots, temporaries, outputs, autotuning, transfers, others, arguments, before = parts
    memory = DeviceMemory(limit, weights + others, physical, int(0.8 * physical))
    more = {"temporaries": temporaries, "outputs": outputs, "autotuning": autotuning, "transfers": transfers}
    use = MemoryUse(memory, weights, slots, before, page, 16, arguments=arguments, **more)
    count = use.num_fitting
    found = use.with_pages(count)
    assert found.num_fitting == count  # whatever pages there were
    if not count:
        assert limit - weights - others - slots - sum(more.values()) - use.reserve < page
        return
    total = weights + others + slots + count * page + sum(more.values()) + use.reserve
    assert found.unused == limit - total >= 0
    fast = max(arguments, weights + slots) + outputs + 1.5 * temporaries / 0.95
    if fast + page <= 0.8 * physical - 2:
        assert fast + count * page <= 0.8 * physical
    found.check()
    if found.unused < page:  # nothing else bounds it
        with pytest.raises(ValueError, match="are missing of"):
            found.check(needed=found.unused + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": 700}, r"lower num_pages or page_size; about \d+ pages fit"),
        ({"temporaries": 700}, "lower max_running or token_budget"),
        ({"weights": 900}, "give plan a larger stage or tensor"),
        ({"device": GPU._replace(used=901)}, "delete other arrays"),
        ({"pages": 700, "device": GPU._replace(physical=1200)}, "raise XLA_CLIENT_MEM_FRACTION"),
    ],
)
def test_what_does_not_fit_is_refused_by_what_would_help(change: dict[str, Any], message: str) -> None:
    USE.check()
    with pytest.raises(ValueError, match=message):
        USE._replace(**change).check()


def test_the_text_has_gib_and_tokens_of_all_that_takes_memory() -> None:
    gib = 2**30
    memory = DeviceMemory(72 * gib, 20 * gib, 80 * gib, 64 * gib)
    use = MemoryUse(memory, 15 * gib, gib // 4, 40 * gib, 2**23, 64, 2 * gib, autotuning=gib)
    lines = {line.split()[0]: line.split()[1:] for line in str(use).splitlines()[1:]}
    assert lines["weights"] == ["15.00", "122,880"]
    assert lines["pages"] == ["40.00", "327,680"]
    assert lines["temporaries"] == ["2.00", "16,384"]
    assert lines["others"][0] == "5.00"
    assert lines["reserve"][0] == "1.44"
    assert sum(float(lines[name][0]) for name in lines if name != "for") == pytest.approx(72, abs=0.05)
    assert str(use).endswith("for JAX        72.00  90% of 80.00 GiB")


def program(temporaries: int, outputs: int = 0, arguments: int = 0) -> Any:
    about = SimpleNamespace(
        temp_size_in_bytes=temporaries,
        output_size_in_bytes=outputs + 50,
        alias_size_in_bytes=50,
        argument_size_in_bytes=arguments,
    )
    return SimpleNamespace(memory_analysis=lambda: about)


def test_programs_need_what_the_largest_of_each_kind_does() -> None:
    assert ProgramMemory.of([program(30, 1, 5), program(20, 2, 9)]) == (30, 2, 9)


@pytest.mark.parametrize(
    ("needs", "rounds"),
    [
        (lambda pages: 30, 1),  # as estimated
        (lambda pages: 200, 2),  # more
        (lambda pages: 0, 2),  # less, so that pages would be left
        (lambda pages: 100 + pages, 4),
    ],
)
def test_programs_are_compiled_again_only_where_other_pages_fit(needs: Callable[[int], int], rounds: int) -> None:
    compiled: list[int] = []

    def compile_largest(pages: int) -> list[Any]:
        compiled.append(pages)
        return [program(needs(pages), 3, 210 + 7 * pages), program(0)]

    fit = PageFit(lambda: USE, 10_000, in_flight=2)
    found = fit.choose(None, compile_largest)
    assert compiled[-1] == found
    assert len(compiled) <= rounds
    assert fit.use is not None
    assert fit.use.num_fitting >= found > 0.97 * fit.use.num_fitting
    assert (fit.use.temporaries, fit.use.outputs, fit.use.pages) == (needs(found), 6, 7 * found)


def test_no_more_pages_than_can_be_used_and_none_without_room() -> None:
    assert PageFit(lambda: USE, 5).choose(None, lambda pages: [program(30)]) == 5
    assert PageFit(lambda: USE, 5, agree=lambda pages: min(pages, 3)).choose(None, lambda pages: [program(30)]) == 3
    with pytest.raises(ValueError, match="lower max_running or token_budget"):
        PageFit(lambda: USE, 5).choose(None, lambda pages: [program(800)])
    unsteady = iter([300, 0] * 2)
    with pytest.raises(ValueError, match="num_pages must be given"):
        PageFit(lambda: USE, 500).choose(None, lambda pages: [program(next(unsteady))])


def test_given_pages_are_taken_and_checked_with_all_programs() -> None:
    fit = PageFit(lambda: USE, 5)
    assert fit.choose(60, lambda pages: pytest.fail("nothing is compiled for it")) == 60
    fit.check([program(100)])
    with pytest.raises(ValueError, match="max_running or token_budget"):
        fit.check([program(400), program(100)])


def gpu_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    memory = DeviceMemory(limit, 0, int(limit / 0.9), int(0.8 * limit / 0.9))
    monkeypatch.setattr(DeviceMemory, "of", lambda devices: memory)


@pytest.mark.parametrize(
    "plan", [None, pytest.param(ParallelPlan(2, 2, 1), marks=pytest.mark.slow)], ids=["one device", "stages"]
)
def test_engines_compile_first_and_take_what_is_left(
    plan: ParallelPlan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program is compiled twice, and the programs that were compiled to find the pages are those of steps."""
    prompts = [[(7 * j + i) % VOCAB for j in range(20 + i)] for i in range(3)]
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    sizes = {"token_budget": 8, "buckets": (4, 8), "max_running": 2, "max_length": 48}
    expected = [output.token_ids for output in make_engine(plan=plan, **sizes).generate(prompts, sampling)]
    largest = []
    monkeypatch.setattr(
        StepShapes, "largest_shapes", lambda self, of=StepShapes.largest_shapes: largest.extend(of(self)) or of(self)
    )
    gpu_memory(monkeypatch, 3 << 20)
    engine = make_engine(plan=plan, num_pages=None, **sizes)
    assert engine.num_pages == largest[-1].num_pages
    use = engine.memory
    assert use is not None
    assert use.pages == engine.num_pages * use.page
    with count_compilations() as compiled:
        engine.compile()
    runner = engine.executor.runner  # type: ignore[attr-defined]
    programs = len([*engine.executor.shapes]) * runner.num_programs  # type: ignore[attr-defined]
    assert 0 < len(compiled) < programs  # not those of the largest shapes
    for found in jax.tree.leaves(runner.state.cache):
        assert found.shape[0] % engine.num_pages == 0
    engine.warm_up()
    with count_compilations() as compiled:
        assert [output.token_ids for output in engine.generate(prompts, sampling)] == expected
    assert not compiled
    assert engine.memory is not None
    assert engine.memory.unused >= 0


def test_abstract_state_is_that_of_the_arrays() -> None:
    engine = make_engine(plan=ParallelPlan(2, 2, 1))
    runner = engine.executor.runner  # type: ignore[attr-defined]
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), runner.state)
    assert there == runner.abstract_state(engine.num_pages)


def test_engines_without_room_say_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_memory(monkeypatch, 1 << 16)
    with pytest.raises(ValueError, match=r"lower max_running or token_budget"):
        make_engine(num_pages=None)


def test_engines_on_cpus_keep_no_account() -> None:
    engine = make_engine()
    assert engine.memory is None
    assert isinstance(engine.executor, DeviceExecutor)
    assert isinstance(engine, Engine)


@pytest.mark.slow
def test_no_step_takes_more_than_the_largest_shapes() -> None:
    """As XLA says of the programs of all shapes."""
    engine = make_engine(plan=ParallelPlan(1, 2, 1, exchange="pass_kv"))
    executor: Any = engine.executor
    largest, rest = executor.shapes.largest_shapes(), []
    needed = ProgramMemory.of(program for shape in largest for program in executor.runner.compile(shape))
    rest = [shape for shape in executor.shapes if shape not in largest]
    assert rest
    for shape in rest[:: max(1, len(rest) // 4)]:
        other = ProgramMemory.of(executor.runner.compile(shape))
        assert np.all(np.array(other) <= np.array(needed))


@pytest.mark.parametrize(
    ("running", "windows", "used"), [(1, 19, 119_341_056), (4, 52, 453_771_264), (64, 712, 7_142_375_424)]
)
def test_window_pages_take_a_fifth_of_the_memory_of_gemma_3(running: int, windows: int, used: int) -> None:
    """The figures of docs/engine.md: sequences of 32,768 tokens, with five of six layers of a window of 512."""
    sliding = tuple((layer + 1) % 6 != 0 for layer in range(18))
    full = LlamaConfig(262_144, 640, 2048, 18, 4, 1, 256, max_positions=32_768)
    gemma = dataclasses.replace(full, sliding_window=512, sliding_layers=sliding)
    config = EngineConfig(num_pages=512 * running, max_running=running)
    sizes: Any = config, make_mesh(), jnp.bfloat16, 512 * running, 32_768
    assert estimate(Llama(gemma), *sizes).pages == used
    assert estimate(Llama(full), *sizes).pages == 603_979_776 * running
    assert config.count_window_pages(512, ParallelPlan(), 512 * running, 32_768) == windows


def test_pages_and_window_pages_share_the_memory() -> None:
    use = USE._replace(window_page=5, most_windows=3)
    assert [use.pages_within(room) for room in (0, 11, 12, 36, 42, 43, 50)] == [0, 0, 1, 3, 3, 4, 5]
    assert [use.with_pages(count).pages for count in (2, 3, 10)] == [24, 36, 85]
    assert use._replace(page=0).pages_within(14) == 2
    assert use._replace(page=0).pages_within(15) > 1 << 30, "window pages are all that it takes"

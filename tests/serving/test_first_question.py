"""A chat that comes while a long prompt is read, with the default settings, on machines of any speed."""

import dataclasses

import pytest

from longctx.models.config import LlamaConfig
from longctx.parallel.topology import Topology
from longctx.serving import EngineConfig, Slo
from longctx.serving.predictor import CurvePredictor, Work
from longctx.serving.predictor.roofline import roofline
from longctx.simulation import Instance, Record, Simulation
from longctx.simulation.workloads import WorkloadRequest

PROMPT, ANSWER = 4328, 8  # tokens
SMOLLM2 = LlamaConfig(
    num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64,
    vocab_size=49_152, max_positions=8192, tie_embeddings=True,
)  # fmt: skip


def cpu(config: EngineConfig, slowness: float = 1.0) -> CurvePredictor:
    """Predicts SmolLM2 on a CPU that is slower by a factor than the one in the tables."""
    times = roofline(SMOLLM2, Topology.preset("cpu"), 512, element_bytes=4, buckets=config.row_buckets)
    numbers = {name: slowness * getattr(times, name) for name in ("per_pair", "per_key", "per_sample")}
    return dataclasses.replace(times, linear=tuple(slowness * x for x in times.linear), **numbers)


def serve(config: EngineConfig, slowness: float, chat: bool = True) -> Record:
    requests = [WorkloadRequest(0.0, PROMPT, 1), WorkloadRequest(2.0 * slowness, 40, ANSWER, number=1)]
    return Simulation([Instance(SMOLLM2, config, cpu(config, slowness))]).run(requests[: 1 + chat], keep_steps=True)


@pytest.mark.parametrize("slowness", [0.01, 1.0, 30.0])
def test_a_chat_beside_a_long_prompt_has_short_steps_by_default(slowness: float) -> None:
    """The decode and the chunk beside it fill a small program, whatever the machine can do."""
    config = EngineConfig(num_pages=256)
    times, record = cpu(config, slowness), serve(config, slowness)
    beside = [step for step in record.steps if step.decodes]
    assert len(beside) == ANSWER - 1
    alone, target = times.seconds(Work.of([(40, 1, True)])), config.slo.tpot
    assert target is not None
    for step in beside:
        assert step.chunks or slowness < 1
        rows = step.decodes + step.prompt_tokens
        ends = any(start + count == PROMPT for start, count in step.chunks)
        assert rows in config.row_buckets or ends or not step.chunks
        assert step.seconds <= max(target, 2.1 * alone) or rows <= 64


@pytest.mark.parametrize("slowness", [0.01, 1.0, 30.0])
def test_a_long_prompt_loses_little_to_chunks_that_adapt(slowness: float) -> None:
    for chat in (False, True):
        static, adaptive = (
            next(x.metrics.ttft for x in serve(config, slowness, chat).served if x.metrics.prompt_tokens == PROMPT)
            for config in (EngineConfig(num_pages=256, chunking="static"), EngineConfig(num_pages=256))
        )
        assert static is not None
        assert adaptive is not None
        assert adaptive < 1.15 * static, (chat, adaptive, static)


def test_the_default_target_is_one_that_a_slow_machine_keeps() -> None:
    """Twice a token alone, in two digits; a request's own target stays, and a factor of 1 asks for what there is."""
    slo = Slo()
    assert [slo.tpot_target(x) for x in (0.001, 0.1, 0.1234, 3.0)] == [0.2, 0.2, 0.25, 6.0]
    assert Slo(tpot=None).tpot_target(3.0) is None
    assert Slo(tpot=0.03, tpot_factor=1.0).tpot_target(0.029) == 0.03
    config = EngineConfig(num_pages=256)
    for slowness, target in ((0.1, 0.2), (30.0, None)):
        record = serve(config, slowness)
        alone = cpu(config, slowness).seconds(Work.of([(40, 1, True)]))
        found = next(x.metrics.tpot_target for x in record.served if x.metrics.prompt_tokens == 40)
        assert found == (target or pytest.approx(2 * alone, rel=0.05))
    with pytest.raises(ValueError, match="tpot_factor must be finite and 1 to inf"):
        Slo(tpot_factor=0.5)


def test_predictions_count_the_rows_that_a_program_computes() -> None:
    config = EngineConfig(num_pages=256)
    padded, exact = cpu(config), dataclasses.replace(cpu(config), buckets=())
    for rows, bucket in ((1, 8), (8, 8), (9, 16), (300, 512), (512, 512)):
        assert padded.seconds(Work(rows)) == exact.seconds(Work(bucket))
    assert padded.seconds(Work(600)) == exact.seconds(Work(600))
    assert padded.chunk_curve(Work(1, 1, 40), 100)(64) == padded.seconds(Work(1, 1, 40).with_chunk(100, 64, False))
    for buckets in ((8, 8), (16, 8), (0, 8)):
        with pytest.raises(ValueError, match="buckets must be positive and ascending"):
            dataclasses.replace(exact, buckets=buckets)

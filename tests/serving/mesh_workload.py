"""Random workloads on meshes of CPU devices: engines of every plan, whose tokens are those of one device."""

import functools
import itertools
from typing import Any

import numpy as np
from dense_oracle import LENGTH, Oracle, make_engine, make_model
from workload import Workload

from longctx.serving import Engine, ParallelPlan
from longctx.serving.scheduler.batch import Batch, Chunk

POWERS = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(sizes) <= 8]
ODD = [(3, 1, 1), (5, 1, 1), (1, 3, 1), (1, 5, 1), (1, 1, 3), (1, 1, 5)]
STRATEGIES = [("grow", "kvp"), ("grow", "auto"), ("interleave", "pass_q"), ("interleave", "pass_kv")]
ALL = [(sizes, strategy) for sizes in POWERS + ODD for strategy in (STRATEGIES if sizes[1] > 1 else STRATEGIES[:1])]
ALL += [
    ((1, 2, 1), ("interleave", "auto")),
    ((2, 2, 1), ("interleave", "algorithm_5")),
    ((1, 4, 1), ("grow", "all_gather")),
]
# 5 layers: no stage has as many as the others.
UNEVEN = [
    (sizes, strategy)
    for sizes in ((2, 1, 1), (3, 1, 1), (3, 1, 2), (2, 2, 2), (3, 2, 1))
    for strategy in (STRATEGIES if sizes[1] > 1 else STRATEGIES[:1])
]


@functools.cache
def oracle_of(
    layers: int, tensor: int, kv_dtype: str | None = None, windows: tuple[int, tuple[bool, ...]] | None = None
) -> Oracle:
    """The oracle of a model whose heads a size divides: 2 KV heads, repeated on more devices, or one for each."""
    heads = {3: (6, 3, 48), 5: (5, 1, 60)}.get(tensor, (8, 2, 48))
    return Oracle(make_model(layers, *heads, windows), kv_dtype)


def make_mesh_engine(
    plan: ParallelPlan,
    layers: int | None = None,
    windows: tuple[int, tuple[bool, ...]] | None = None,
    **options: object,
) -> Engine:
    """An engine of a model with so many layers, by default one for each stage."""
    shapes = {"page_size": 8, "num_pages": 24, "token_budget": 16, "buckets": (16,), "max_length": LENGTH}
    kv_dtype: Any = options.get("kv_dtype")
    oracle = oracle_of(layers or plan.stage, plan.tensor * plan.ffn_ranks, kv_dtype, windows)
    return make_engine(None, oracle, plan, **(shapes | options))


class ChunkRecorder:
    """Records the chunks of an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.chunks: list[Chunk] = []
        submit = engine.executor.submit

        def record(batch: Batch) -> Any:
            self.chunks += batch.chunks
            return submit(batch)

        engine.executor.submit = record  # type: ignore[method-assign]

    def grew(self, decodes: bool) -> bool:
        """Whether a sequence grew onto one more rank during its prefill, or during its decodes."""
        ranks: dict[str, tuple[int, ...]] = {}
        for chunk in self.chunks:
            name = chunk.sequence.name
            before = ranks.get(name)
            if chunk.decodes == decodes and before is not None and len(chunk.ranks) > len(before):
                return True
            ranks[name] = chunk.ranks
        return False


def run_workload(engine: Engine, seed: int, events: int, layers: int | None = None) -> None:
    """Run a workload, and check its tokens; those of FP8 pages need only be near the expected ones."""
    plan, kv_dtype, model = engine.plan, engine.config.kv_dtype, engine.model.config
    windows = None if model.sliding_window is None else (model.sliding_window, model.sliding_layers)
    oracle = oracle_of(layers or plan.stage, plan.tensor * plan.ffn_ranks, kv_dtype, windows)
    Workload(engine, seed, oracle.expected_tokens, oracle.follows if kv_dtype else None, oracle.prime).run(events)


def check_tokens(
    sizes: tuple[int, int, int],
    strategy: tuple[str, str],
    seed: int = 0,
    events: int = 150,
    layers: int | None = None,
    ffn: str = "tensor",
    **options: object,
) -> None:
    """Run a workload by a plan, and check its tokens, and that it had the kinds of rows that the plan is for."""
    placement, exchange = strategy
    plan = ParallelPlan(*sizes, exchange=exchange, placement=placement, rank_tokens=16, ffn=ffn)  # type: ignore[arg-type]
    engine = make_mesh_engine(plan, layers, **options)
    recorded = ChunkRecorder(engine)
    run_workload(engine, seed, events, layers)
    kinds = {
        "sharded" if chunk.sharded else "replicated" if len(chunk.ranks) > 1 else "local" for chunk in recorded.chunks
    }
    if plan.context == 1:
        assert kinds == {"local"}
    elif placement == "interleave":
        # Decodes beside a prompt whose keys travel are replicated.
        assert kinds == {"sharded"} if exchange == "pass_q" else {"sharded"} <= kinds <= {"sharded", "replicated"}
    else:
        assert kinds >= {"local", "replicated"}
        assert recorded.grew(decodes=True)
        assert recorded.grew(decodes=False) or exchange == "auto"

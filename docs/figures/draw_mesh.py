"""Draw the figures of docs/parallel_plans.md from runs of the built-in model on 8 CPU devices.

`python docs/figures/draw_mesh.py`, with matplotlib.
"""

import argparse
import itertools
import pathlib
from typing import NamedTuple

import jax
import numpy as np
from draw_exchanges import COLOURS, INK, LINE, MERGED, QUIET, TIMES, box, canvas, ink, tint, write
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from longctx.models import load_checkpoint
from longctx.models.builtin import TINY
from longctx.plotting import save, style
from longctx.serving import Engine, EngineConfig, EngineStats, ParallelPlan, Request, SamplingParams, StepMetrics
from longctx.serving.scheduler.batch import Chunk
from longctx.serving.scheduler.sequence import completion_of

PIPELINE = ParallelPlan(stage=4, tensor=2)
MESH = ParallelPlan(stage=2, context=2, tensor=2, exchange="kvp", placement="grow", rank_tokens=256)
CHUNK, PAGE, LONG = 128, 16, 2048
# After which step of the long prompt's, prompt tokens, and tokens to write.
SHORT = ((2, 90, 4), (3, 40, 5), (5, 120, 3), (7, 64, 3), (9, 100, 2))
REQUESTS = (("A", 400, 20), ("B", 240, 44), ("C", 170, 32), ("D", 90, 32))  # names, prompt tokens, tokens to write
KINDS = {
    "long prompt's chunk": COLOURS[0],
    "short prompts": COLOURS[1],
    "decodes": COLOURS[2],
    "long prompt and others": COLOURS[3],
    "idle": MERGED,
}


class Life(NamedTuple):
    """What a batch computes of a sequence."""

    number: int
    chunk: Chunk


def make_engine(plan: ParallelPlan, budget: int, **more: object) -> Engine:
    model, params = load_checkpoint(TINY)
    config = EngineConfig(
        page_size=PAGE,
        num_pages=160 if plan.context == 1 else 56,
        max_running=8,
        max_length=LONG + 32,
        token_budget=budget,
        buckets=(8, budget),
        prefix_cache=False,
        hash_key=bytes(16),
    )
    clock = itertools.count()  # of its own, so that the figures don't depend on the machine's speed
    return Engine(model, params, config, plan=plan, clock=lambda: 0.005 * next(clock), **more)  # type: ignore[arg-type]


def make_request(name: str, tokens: int, output: int) -> Request:
    prompt = np.random.default_rng(tokens).integers(32, 127, tokens).tolist()
    return Request(prompt, SamplingParams(max_tokens=output, ignore_eos=True), request_id=name)


def run_pipeline(short: tuple[tuple[int, int, int], ...]) -> tuple[list[StepMetrics], EngineStats]:
    """A long prompt through the stages, alone or with others that come while it is read."""
    steps: list[StepMetrics] = []
    engine = make_engine(PIPELINE, CHUNK, monitor=steps.append)
    engine.submit(make_request("long", LONG, 1))
    waiting = list(short)
    while engine.has_work or waiting:
        while waiting and len(steps) >= waiting[0][0]:
            number, tokens, output = waiting.pop(0)
            engine.submit(make_request(f"short-{number}", tokens, output))
        engine.step()
    return steps, engine.stats()


def kind_of(step: StepMetrics) -> str:
    """Short prompts are less than a chunk, so whatever begins after one, or comes first, is the long one's."""
    is_long = any(step.number == 0 or start >= CHUNK for start, _ in step.chunks)
    if is_long:
        return "long prompt's chunk" if len(step.chunks) == 1 and not step.decodes else "long prompt and others"
    return "short prompts" if step.chunks else "decodes"


def draw_gantt() -> Axes:
    runs = [
        (f"A prompt of {LONG:,} tokens alone, in chunks of {CHUNK}", *run_pipeline(())),
        (f"The same, with {len(SHORT)} short requests that come meanwhile", *run_pipeline(SHORT)),
    ]
    stages = PIPELINE.stage
    width = 0.26
    axes = canvas(1.9 + width * max(stats.steps for *_, stats in runs), 4.75, "The sequence pipeline's steps")
    for number, (title, steps, stats) in enumerate(runs):
        top, left = 1.05 + 1.8 * number, 1.2
        cells = {(step.number + stage, stage): step for step in steps for stage in range(stages)}
        ticks = stats.steps
        idle = ticks * stages - len(cells)
        assert idle == stats.idle_stage_steps, "the engine has counted otherwise"
        told = f"{ticks} steps, {idle} of {ticks * stages} stage-steps idle ({idle / ticks / stages:.0%})"
        write(axes, 0.3, top - 0.3, title, 10, "left", weight="bold")
        write(axes, 5.9, top - 0.3, told, 9, "left", color=QUIET)
        for stage in range(stages):
            y = top + 0.29 * stage
            write(axes, 0.3, y + 0.12, f"stage {stage}", 9, "left")
            for tick in range(ticks):
                step = cells.get((tick, stage))
                kind = "idle" if step is None else kind_of(step)
                spot = (left + width * tick + 0.012, y), width - 0.024, 0.24
                axes.add_patch(Rectangle(*spot, fc=KINDS[kind] if step else "white", ec=KINDS[kind], lw=0.6))
                if step is not None:
                    shade = "white" if kind in ("long prompt's chunk", "decodes") else INK
                    write(axes, left + width * (tick + 0.5), y + 0.12, str(step.number), 6.5, color=shade)
    x = 1.2
    for kind, colour in KINDS.items():
        axes.add_patch(Rectangle((x, 4.36), 0.22, 0.2, fc="white" if kind == "idle" else colour, ec=colour, lw=0.6))
        write(axes, x + 0.29, 4.46, kind, 8.5, "left", color=QUIET)
        x += 0.55 + 0.075 * len(kind)
    write(axes, x, 4.46, "number: of the batch", 8.5, "left", color=QUIET)
    return axes


def run_mesh() -> tuple[Engine, int, dict[str, list[int]], dict[str, list[Life]]]:
    """-> the engine; a step, and then the rank of each page of each request; what each batch computes of each."""
    engine = make_engine(MESH, 64)
    lives: dict[str, list[Life]] = {name: [] for name, *_ in REQUESTS}
    schedule = engine.scheduler.schedule

    def recording(now: float):  # type: ignore[no-untyped-def]
        batch = schedule(now)
        for chunk in batch.chunks if batch is not None else []:
            lives[completion_of(chunk.sequence).request_id].append(Life(batch.index, chunk))
        return batch

    engine.scheduler.schedule = recording  # type: ignore[method-assign]
    for request in REQUESTS:
        engine.submit(make_request(*request))
    pages: dict[str, list[int]] = {}
    at = 0
    while engine.has_work:
        engine.step()
        running = list(engine.scheduler.running)
        if len(running) == len(REQUESTS):
            rank_of = engine.scheduler.pool.rank_of
            pages = {completion_of(s).request_id: [rank_of(page) for page in s.pages] for s in running}
            at = engine.stats().steps - 1
    return engine, at, pages, lives


def draw_devices(axes: Axes, engine: Engine, left: float, top: float) -> None:
    """Each device's layers, heads and pages, as its part of the cache tells."""
    plan, config = engine.plan, engine.model.config
    pool = engine.executor.runner.state.cache.k  # type: ignore[attr-defined]
    parts = pool.sharding.devices_indices_map(pool.shape)
    layers, heads = config.num_layers // plan.stage, config.num_heads // plan.tensor
    for (stage, context, tensor), device in np.ndenumerate(engine.mesh.devices):  # type: ignore[union-attr]
        x, y = left + 1.15 + 1.55 * tensor, top + 2.3 * stage + 0.98 * context
        first = parts[device][2].start or 0
        axes.add_patch(Rectangle((x, y), 1.47, 0.9, fc=tint(COLOURS[context]), ec=COLOURS[context], lw=0.9))
        told = (
            f"layers {stage * layers} to {(stage + 1) * layers - 1}",
            f"query heads {tensor * heads} to {(tensor + 1) * heads - 1}",
            f"KV head {first}",
        )
        write(axes, x + 0.08, y + 0.15, f"device {device.id}", 8.5, "left", weight="bold")
        for line, text in enumerate(told):
            write(axes, x + 0.08, y + 0.37 + 0.19 * line, text, 8, "left")
        if tensor == 0:
            write(axes, left + 1.07, y + 0.36, f"context {context}", 8.5, "right", color=ink(COLOURS[context]))
            span = f"{context * engine.num_pages} to {(context + 1) * engine.num_pages - 1}"
            write(axes, left + 1.07, y + 0.56, f"pages {span}", 7.5, "right", color=QUIET)
        if stage == 0 and context == 0:
            write(axes, x + 0.73, top - 0.2, f"tensor {tensor}", 8.5, color=QUIET)
        if context == 0 and tensor == 0:
            write(axes, left, y - 0.2, f"stage {stage}", 10, "left", weight="bold")


def draw_mesh() -> Axes:
    engine, at, pages, lives = run_mesh()
    ranks, left, wide = range(engine.plan.context), 5.75, 7.3
    sizes = TIMES.join(map(str, (engine.plan.stage, engine.plan.context, engine.plan.tensor)))
    axes = canvas(13.4, 6.2, f"A mesh of {sizes} devices, and four requests on it")
    draw_devices(axes, engine, 0.3, 1.3)
    told = f"Of one request a rank has up to {engine.plan.rank_tokens} tokens. Then it takes on the next rank."
    write(axes, 0.3, 5.85, told, 8.5, "left", color=QUIET)

    title = f"On which rank their pages are, after step {at}: in the order of the sequence, {PAGE} tokens a page"
    write(axes, 5.0, 0.95, title, 10, "left", weight="bold")
    for i, (name, prompt, _) in enumerate(REQUESTS):
        y, cell = 1.3 + 0.34 * i, 0.19
        write(axes, 5.0, y, name, 10, "left", weight="bold")
        for number, rank in enumerate(pages[name]):
            spot = (5.35 + cell * number, y - 0.11)
            axes.add_patch(Rectangle(spot, cell - 0.02, 0.22, fc=COLOURS[rank], ec="none"))
        counts = " + ".join(str(pages[name].count(rank)) for rank in ranks)
        told = f"{prompt} tokens of prompt, {counts} pages"
        write(axes, 5.45 + cell * len(pages[name]), y, told, 8, "left", color=QUIET)

    write(axes, 5.0, 2.85, "Which rank computes their rows, from step to step", 10, "left", weight="bold")
    last = max(life.number for each in lives.values() for life in each) + 1
    step = wide / last
    for i, (name, *_) in enumerate(REQUESTS):
        y = 3.2 + 0.6 * i
        write(axes, 5.0, y + 0.12, name, 10, "left", weight="bold")
        for rank in ranks:
            top = y + 0.26 * rank
            write(axes, left - 0.05, top, f"rank {rank}", 7, "right", color=ink(COLOURS[rank]))
            axes.plot([left, left + wide], [top, top], color=LINE, lw=0.6, zorder=0)
            for number, chunk in lives[name]:
                if rank in chunk.ranks:
                    height = 0.1 if chunk.decodes else 0.22
                    colour = COLOURS[rank] if len(chunk.ranks) == 1 else COLOURS[3]
                    spot = (left + step * number, top - height / 2), step * 0.85, height
                    axes.add_patch(Rectangle(*spot, fc=colour, ec="none"))
    for number in range(0, last, 20):
        write(axes, left + step * (number + 0.42), 5.52, str(number), 7.5, color=QUIET)
    marks = [(COLOURS[rank], f"local rows of rank {rank}", 1.55) for rank in ranks]
    marks += [(COLOURS[3], "replicated rows: both compute them, states merge", 3.45)]
    x, y = 5.0, 5.85
    for colour, text, width in marks:
        box(axes, x, y, 0.24, 0.22, "", colour)
        write(axes, x + 0.3, y, text, 8.5, "left", color=QUIET)
        x += width
    write(axes, x, y, "high: chunks, low: decodes", 8.5, "left", color=QUIET)
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    with style(outlines=True):
        for name, axes in {"gantt": draw_gantt(), "mesh": draw_mesh()}.items():
            save(axes.figure, args.directory / f"{name}.{args.format}")


if __name__ == "__main__":
    main()

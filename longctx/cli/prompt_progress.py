"""Progress of compilation and prefill on standard error, and decode rates, for all commands."""

import time
from collections.abc import Callable, Iterable, Iterator

from longctx.cli.terminal import Console
from longctx.serving import Engine, Event, Output
from longctx.serving.executor.interface import Progress


def show_compiling(compile_steps: Callable[[Progress], None], console: Console, engine: Engine | None = None) -> float:
    """Call an engine's `compile` or `warm_up` and show a bar that counts programs; returns the seconds that it took.

    Args:
      engine: of which is printed, after it, where the memory of accelerators goes.
    """
    start = time.perf_counter()
    with console.bar(desc="compiling", unit="program") as bar:
        if bar.disable:  # in a log, minutes of silence look like a hang
            console.note("compiling")

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        compile_steps(show)
    seconds = time.perf_counter() - start
    console.note(f"compiled in {seconds:.1f} s")
    if engine is not None and engine.memory is not None:
        console.note(f"memory\n{engine.memory}")
    return seconds


def steps(engine: Engine, request_id: str, console: Console) -> Iterator[list[Event]]:
    """Run an engine until it has no work, and yield the events of each step.

    A bar on standard error shows how much of this request's prompt has been prefilled; it closes with the request's
    first event.
    """
    done, total = engine.requests[request_id].progress
    with console.bar(total=total, initial=done, desc="reading", unit="tok") as bar:
        is_read = False
        while not is_read:
            events = engine.step()
            is_read = any(event.request_id == request_id for event in events)
            # Plans run ahead of results, so the prompt counts as prefilled only when its first token has come.
            read = total if is_read else min(engine.requests[request_id].progress[0], total - 1)
            bar.update(read - done)
            done = read
            if is_read:
                bar.close()
            yield events
    while engine.has_work:
        yield engine.step()


def decode_rate(outputs: Iterable[Output]) -> str:
    """Tokens per second of outputs generated in one batch, the first token of each not counted."""
    outputs = [output for output in outputs if output.metrics.output_tokens > 1]
    if not outputs:
        return "-"
    tokens = sum(output.metrics.output_tokens - 1 for output in outputs)
    seconds = max(o.metrics.finished or 0 for o in outputs) - min(o.metrics.first_token or 0 for o in outputs)
    return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"

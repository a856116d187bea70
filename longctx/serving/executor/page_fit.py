"""Number of pages that fit into the memory of accelerators beside the programs of a step, which are compiled for it."""

import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from longctx.serving.executor.interface import Progress, ignore_progress
from longctx.serving.runner.device_memory import MemoryUse, ProgramMemory
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.runner.step_inputs import Shape

_MAX_COMPILING = 4  # programs at a time: compiling takes memory
_ROUNDS = 4
_UNUSED = 0.02  # of the pages that fit, which is not worth another compilation


class PageFit:
    """Keeps account of the memory of accelerators, and finds how many pages fit.

    Programs have the number of pages among their shapes, and their temporaries hardly depend on it. So the largest
    programs are compiled for the number that fits by estimation; if another number fits by what XLA says that they
    need, they are compiled for that one, once more. They are the programs that steps run.

    Attributes:
      use: where memory goes; since `check`, with all programs.
    """

    def __init__(
        self,
        measure: Callable[[], MemoryUse],
        most_pages: int,
        in_flight: int = 1,
        agree: Callable[[int], int] = lambda number: number,
    ) -> None:
        self._measure, self._most_pages, self._in_flight, self._agree = measure, most_pages, in_flight, agree
        self.use: MemoryUse | None = None

    def choose(self, num_pages: int | None, compile_largest: Callable[[int], Iterable[Any]]) -> int:
        """The number of pages of each rank: the given one, or as many as there is room for.

        Parameters are on the devices then, and pages are not.
        """
        use = self._measure()
        if num_pages is not None:
            self.use = use.with_pages(num_pages)
            self.use.check()
            return num_pages
        pages = self._fitting(use)
        for _ in range(_ROUNDS):
            needed = ProgramMemory.of(compile_largest(pages))
            self.use = use.with_pages(pages).with_programs(needed, self._in_flight)
            fitting = self._fitting(self.use)
            if pages <= fitting <= pages * (1 + _UNUSED) + 1:
                return pages
            pages = fitting
        raise ValueError(f"num_pages must be given: none is found for which programs leave as much room\n{self.use}")

    def check(self, programs: Iterable[Any]) -> None:
        """Check that the programs of all steps fit beside the pages."""
        assert self.use is not None
        self.use = self.use.with_programs(ProgramMemory.of(programs), self._in_flight)
        self.use.check()

    def _fitting(self, use: MemoryUse) -> int:
        fitting = self._agree(min(use.num_fitting, self._most_pages))
        if not fitting:
            use.with_pages(0).check(needed=use.page)
        return fitting


def compile_shapes(runner: ModelRunner, shapes: List[Shape], progress: Progress = ignore_progress) -> list[Any]:
    """Compile the programs of steps, several at a time, and return them."""
    compiled = SimpleQueue[BaseException | None]()

    def compile_step(shape: Shape) -> List[Any]:
        try:
            return runner.compile(shape, lambda: compiled.put(None))
        except BaseException as error:
            compiled.put(error)
            raise

    total = len(shapes) * runner.num_programs
    # XLA compiles without Python's lock, while another thread traces.
    pool = ThreadPoolExecutor(min(len(shapes), os.cpu_count() or 1, _MAX_COMPILING))
    try:
        steps = [pool.submit(copy_context().run, compile_step, shape) for shape in shapes]
        for done in range(1, total + 1):
            if (error := compiled.get()) is not None:
                raise error
            progress(done, total)
        return [program for step in steps for program in step.result()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

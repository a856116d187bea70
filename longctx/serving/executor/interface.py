"""The interface of executors, without JAX."""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from longctx.serving.kv_cache.connector import Loaded, PageRead, PageSource
from longctx.serving.request.output import TokenLogprob
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence

Progress = Callable[[int, int], object]
"""Is told how many programs are compiled, and of how many."""


def ignore_progress(done: int, total: int) -> None:
    """A `Progress` that does nothing."""


class Results(NamedTuple):
    """The results of a batch, in the order of `Batch.sampled`."""

    tokens: List[int]  # -1: the logits were not finite
    logprobs: List[TokenLogprob | None]
    # Of prompt tokens, with the sequence and the position of the first of them.
    prompt_logprobs: List[tuple[Sequence, int, List[TokenLogprob]]]
    # Sums of pooled rows of prompts, float32 `[D]`, with the sequence and the first position of the chunk.
    hidden: List[tuple[Sequence, int, np.ndarray]] = ()


@runtime_checkable
class Executor(Protocol):
    """Runs batches in the order in which they are submitted. It reads tokens from `Sequence.completion`."""

    def submit(self, batch: Batch) -> Any:
        """Begin a batch, without waiting for it. In a pipeline of S stages S - 1 more bring it to its end."""
        ...

    def wait(self, pending: Any) -> Results:
        """The results of what `submit` returned."""
        ...

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        """Loads that have ended since the last call; meanwhile it moves pages. It waits for one up to `timeout` s."""
        ...

    def read_pages(self, pages: List[int], layers: tuple[int, int], windows: List[int] | None = None) -> PageRead:
        """Begin to read pages of the pool as they are after all submitted batches, of these layers at least.

        `windows`: the window page of each, or -1: then its layers with a window hold anything. None: there are none.
        """
        ...

    @property
    def sources(self) -> dict[str, PageSource]:
        """Sources of loads' pages, by name (`PageLoad.source`)."""
        ...

    def compile(self, progress: Progress = ignore_progress) -> None:
        """Compile the programs of all steps."""
        ...

    def warm_up(self) -> None:
        """Do beforehand what happens once."""
        ...


@dataclass
class MoverStats:
    """Counts of what has been moved since the beginning.

    Attributes:
      stored_pages, stored_bytes: that were read from the devices. dropped_stores: pages that the sink wanted, and for
        which there was no room, or that it failed to take.
      loads: that have ended; of these, short_loads had fewer pages than asked for, failed_loads an error, and
        late_loads no block for too long.
      loaded_pages: that loads ended with. loaded_bytes: that were written to the devices.
    """

    stored_pages: int = 0
    stored_bytes: int = 0
    dropped_stores: int = 0
    loads: int = 0
    short_loads: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0

"""An engine in many processes: what the first one tells the others, and how they see that all decide alike.

Every process runs the same scheduler on the same inputs. Those are requests and cancels, the time at which a step is
planned, and how long the one before took: they go to all others before the step that they matter to. Nothing else that
a decision depends on may differ, as a clock or the order of a set would.

Source: Mnemosyne, 5, and Medha, 4.4.
"""

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.executor.interface import Executor
from longctx.serving.request.request import Request, SamplingParams
from longctx.serving.scheduler.batch import Batch

DIGEST_INTERVAL = 16  # steps after which decisions are compared


class Arrival(NamedTuple):
    request: Request
    request_id: str
    now: float


class Cancel(NamedTuple):
    request_id: str


News = Arrival | Cancel


class StepOrder(NamedTuple):
    """Plan at time `now`; `seconds`: how long the last step that was waited for took, None if nobody knows."""

    now: float
    seconds: float | None
    news: list[News]


class WarmUpOrder(NamedTuple):
    pass


class Lockstep:
    """One process's part in it; alone, it has none.

    Attributes:
      now: on others than the first: its time, as told last.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.decisions, self.now = group, DecisionDigest(), 0.0
        self.is_alone = group.num_processes == 1
        self._news: list[dict[str, Any]] = []
        self._frames: list[bytes] = []
        self._num_steps = 0
        if group.watch is not None:
            group.watch.explain = self.decisions.__str__

    @property
    def leads(self) -> bool:
        return self.group.is_first

    def warm_up(self, executor: Executor) -> None:
        """Compile all, wait until all processes have, then run: JAX's CPU collectives wait 30 s for a late one."""
        executor.compile()
        self.group.barrier("that all is compiled")
        with self.limit("a first run", self.group.join_timeout):
            executor.warm_up()

    def limit(self, what: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """Around what must not take longer, than the failure timeout if nothing is said."""
        watch = self.group.watch
        if watch is None:
            return nullcontext()
        return watch.limit(what, watch.failure_timeout if seconds is None else seconds)

    def note_plan(self, batch: Batch) -> None:
        if not self.is_alone:
            self.decisions.plan(batch)

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        if not self.is_alone:
            self.decisions.draw(batch, tokens)

    # In the first process.

    def note_arrival(self, request: Request, tokens: np.ndarray, request_id: str, now: float) -> None:
        if self.is_alone:
            return
        fields = {name: getattr(request, name) for name in _REQUEST}
        self._news.append(fields | {"sampling": dataclasses.asdict(request.sampling), "id": request_id, "now": now})
        self._frames.append(tokens.astype("<i4").tobytes())

    def note_cancel(self, request_id: str) -> None:
        if self.leads and not self.is_alone:
            self._news.append({"id": request_id})

    def send_step(self, now: float, seconds: float | None) -> None:
        if self.is_alone:
            return
        header: dict[str, Any] = {"kind": "step", "now": now, "seconds": seconds}
        if self._num_steps % DIGEST_INTERVAL == 0:
            header["digest"] = self.decisions.digest
        if self._news:
            header["news"] = self._news
        self.group.tell(header, self._frames)
        self._news, self._frames = [], []
        self._num_steps += 1

    def send_warm_up(self) -> None:
        if not self.is_alone:
            self.group.tell({"kind": "warm_up"})

    # In the others.

    def orders(self) -> Iterator[StepOrder | WarmUpOrder]:
        """What the first process does, until it ends."""
        while True:
            header, frames = self.group.hear()
            if header["kind"] == "end":
                return
            if header["kind"] == "warm_up":
                yield WarmUpOrder()
                continue
            if header.get("digest", self.decisions.digest) != self.decisions.digest:
                self._differ()
            news, rest = [], iter(frames)
            for told in header.get("news", ()):
                news.append(_arrival(told, next(rest)) if "sampling" in told else Cancel(told["id"]))
            self.now = header["now"]
            yield StepOrder(self.now, header["seconds"], news)

    def _differ(self) -> None:
        watch = self.group.watch
        assert watch is not None
        text = (
            f"{watch.me} decided otherwise than process 0 within {DIGEST_INTERVAL} steps. It decided:\n{self.decisions}"
        )
        watch.send(watch.peers[0], "differs", text)
        # Process 0 answers with its own, and ends both.
        watch.wait_for_end(watch.failure_timeout)
        raise RuntimeError(text)


# What a request says besides: its prompt goes as bytes, its sampling as a dictionary, its id as the engine gave it.
_REQUEST = [x.name for x in dataclasses.fields(Request) if x.name not in ("prompt", "sampling", "request_id")]


def _arrival(told: dict[str, Any], tokens: bytes) -> Arrival:
    sampling = SamplingParams(**told["sampling"])
    fields = {name: told[name] for name in _REQUEST}
    prompt: Any = np.frombuffer(tokens, "<i4")
    return Arrival(Request(prompt, sampling, told["id"], **fields), told["id"], told["now"])

"""Keeps the engines of many processes in lockstep: what process 0 sends, and how diverging decisions are noticed.

Every process runs the same scheduler on the same inputs: requests, cancels, the time at which a step is planned, and
how long the step before took. Process 0 sends these before the step that depends on them. Decisions may depend on
nothing that differs between processes, such as a clock or the order of a set.

Source: Mnemosyne, section 5, and Medha, section 4.4.
"""

import math
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.distributed.orders import (
    Arrival,
    Cancel,
    Evict,
    Forget,
    Located,
    Pin,
    Release,
    RequestUpdate,
    SettleOrder,
    StepOrder,
    WarmUpOrder,
    request_from_fields,
    request_to_fields,
)
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.executor.interface import Executor, Progress, ignore_progress
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.request import Request
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence

DIGEST_INTERVAL = 16  # steps from one comparison of decisions to the next


class Lockstep:
    """One process's part in the lockstep of a process group; a process alone does nothing for it.

    Attributes:
      now: the time that process 0 sent last, on the other processes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.decisions, self.now = group, DecisionDigest(), 0.0
        self.is_alone = group.num_processes == 1
        self._updates: list[dict[str, Any]] = []
        self._frames: list[bytes] = []
        self._located: deque[dict[str, Any]] = deque()  # updates from any thread
        self._num_steps = 0
        self._is_settled = True
        self._seconds: float | None = None  # that the last step took
        if group.watchdog is not None:
            group.watchdog.explain = self.decisions.__str__

    @property
    def leads(self) -> bool:
        return self.group.is_first

    def warm_up(self, executor: Executor, progress: Progress = ignore_progress) -> None:
        """Compile all programs, wait for the other processes, then run them.

        The wait is needed as JAX's CPU collectives give up after 30 s, and some processes may compile for longer. It
        has no limit: all are known to compile by then, and the watchdog notices one that is gone.
        """
        self.group.barrier("that it compiles")
        executor.compile(progress)
        self.group.barrier("that all is compiled", math.inf)
        with self.limit("a first run", self.group.join_timeout):
            executor.warm_up()

    def limit(self, what: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """A context that ends the process if its body takes longer, by default than the failure timeout."""
        watchdog = self.group.watchdog
        if watchdog is None:
            return nullcontext()
        return watchdog.limit(what, watchdog.failure_timeout if seconds is None else seconds)

    def note_plan(self, batch: Batch) -> None:
        """Add a planned batch to the digest."""
        if not self.is_alone:
            self.decisions.add_plan(batch)

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch to the digest."""
        if not self.is_alone:
            self.decisions.add_tokens(batch, tokens)

    # In process 0.

    def note_arrival(
        self, request: Request, tokens: np.ndarray, request_id: str, now: float, sequences: List[Sequence] = ()
    ) -> None:
        """Queue a request, with its prompt as tokens, for the next step's message."""
        if self.is_alone:
            return
        available = sequences[0].available if sequences else 0
        self._updates.append(request_to_fields(request) | {"id": request_id, "now": now, "available": available})
        self._frames.append(tokens.astype("<i4").tobytes())

    def note_resumed(self, handoff: Handoff, now: float) -> None:
        """Queue, right after the arrival of a request, what another engine has computed of it."""
        if not self.is_alone:
            self._updates[-1] |= {"handoff": handoff.to_dict(), "resumed": now}

    def note_located(self, lease_id: str, place: dict[str, Any] | None) -> None:
        """Queue where the pages of a lease are fetched for the next step's message, see `Located`; from any thread."""
        if not self.is_alone:
            self._located.append({"located": lease_id, "place": place})

    def note_evicted(self, tier: str, keys: list[bytes]) -> None:
        """Queue pages that have left the devices or host memory on demand for the next step's message."""
        if not self.is_alone:
            self._updates.append({"evicted": [key.hex() for key in keys], "tier": tier})

    def note_cancel(self, request_id: str, now: float, lease: str | None = None) -> None:
        """Queue a cancel for the next step's message."""
        if self.leads and not self.is_alone:
            self._updates.append({"id": request_id, "lease": lease})

    def note_release(self, lease_id: str) -> None:
        """Queue the end of a lease for the next step's message."""
        if self.leads and not self.is_alone:
            self._updates.append({"released": lease_id})

    def note_forgotten(self, keys: list[bytes]) -> None:
        """Queue pages that are to be found no more for the next step's message."""
        if self.leads and not self.is_alone:
            self._updates.append({"forgotten": [key.hex() for key in keys]})

    def note_pinned(self, keys: list[bytes], seconds: float) -> None:
        """Queue pages that tiers are to keep for the next step's message."""
        if self.leads and not self.is_alone:
            self._updates.append({"pinned": [key.hex() for key in keys], "seconds": seconds})

    def note_load(self, loaded: Loaded, now: float) -> None:
        """Queue the end of a load for the next step's message."""
        if not self.is_alone:
            self._updates.append({"loaded": loaded})

    def note_step(self, now: float) -> None:
        """Order all other processes to plan the next step, see `StepOrder`."""
        if self.is_alone:
            return
        header: dict[str, Any] = {"kind": "step", "now": now, "seconds": self._seconds}
        if self._num_steps % DIGEST_INTERVAL == 0:
            header["digest"] = self.decisions.digest
        self._send(header)
        self._is_settled = False
        self._num_steps += 1

    def settle(self, now: float) -> None:
        """Order all other processes to end the last step and apply updates, see `SettleOrder`, if there is need."""
        if self.leads and not self.is_alone and (self._updates or not self._is_settled):
            self._send({"kind": "settle", "now": now, "seconds": self._seconds})
            self._is_settled = True

    def _send(self, header: dict[str, Any]) -> None:
        while self._located:
            self._updates.append(self._located.popleft())
        if self._updates:
            header["news"] = self._updates
        self.group.broadcast(header, self._frames)
        self._updates, self._frames, self._seconds = [], [], None

    def note_end(self, step: EndedStep | None, events: List[object]) -> None:
        """Keep how long a step took for the next step's message."""
        self._seconds = None if step is None else step.seconds

    def note_clear(self) -> None:
        """Nothing: this happens to engines of one process alone."""

    def note_failure(self, cause: str) -> None:
        """Let all other processes end."""
        self.group.fail(cause)

    def send_warm_up(self) -> None:
        """Order all other processes to warm up."""
        if not self.is_alone:
            self.group.broadcast({"kind": "warm_up"})

    # In the other processes.

    def orders(self) -> Iterator[StepOrder | SettleOrder | WarmUpOrder]:
        """The orders of process 0, until it closes its process group."""
        while True:
            header, frames = self.group.receive()
            if header["kind"] == "end":
                return
            if header["kind"] == "warm_up":
                yield WarmUpOrder()
                continue
            if header.get("digest", self.decisions.digest) != self.decisions.digest:
                self._fail_for_difference()
            updates: list[RequestUpdate] = []
            prompts = iter(frames)
            for fields in header.get("news", ()):
                if "sampling" in fields:
                    request = request_from_fields(fields, next(prompts), fields["id"])
                    handoff = Handoff.from_dict(fields["handoff"]) if "handoff" in fields else None
                    arrival = Arrival(request, fields["id"], fields["now"], fields["available"], handoff)
                    updates.append(arrival._replace(resumed=fields.get("resumed", 0.0)))
                elif "loaded" in fields:
                    updates.append(Loaded(*fields["loaded"]))
                elif "released" in fields:
                    updates.append(Release(fields["released"]))
                elif "evicted" in fields:
                    updates.append(Evict(fields["tier"], [bytes.fromhex(key) for key in fields["evicted"]]))
                elif "located" in fields:
                    updates.append(Located(fields["located"], fields["place"]))
                elif "pinned" in fields:
                    updates.append(Pin([bytes.fromhex(key) for key in fields["pinned"]], fields["seconds"]))
                elif "forgotten" in fields:
                    updates.append(Forget([bytes.fromhex(key) for key in fields["forgotten"]]))
                else:
                    updates.append(Cancel(fields["id"], fields["lease"]))
            self.now = header["now"]
            order = SettleOrder if header["kind"] == "settle" else StepOrder
            yield order(self.now, header["seconds"], updates)

    def _fail_for_difference(self) -> None:
        watchdog = self.group.watchdog
        assert watchdog is not None
        text = (
            f"{watchdog.me} decided otherwise than process 0 within {DIGEST_INTERVAL} steps. "
            f"It decided:\n{self.decisions}"
        )
        watchdog.send(watchdog.peers[0], "differs", text)
        # Process 0 adds its own decisions to the message, and ends all processes.
        watchdog.wait_for_end(watchdog.failure_timeout)
        raise RuntimeError(text)

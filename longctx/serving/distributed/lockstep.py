"""Lockstep of the engines of many processes: orders of process 0, and detection of diverging decisions.

Every process runs the same scheduler on the same inputs: requests, cancels, the time at which a step is planned, and
how long the step before took. Process 0 sends these before the step that depends on them. Decisions may depend on
nothing that differs between processes, such as a clock or the order of a set.

Source: Mnemosyne, section 5, and Medha, section 4.4.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import msgspec

from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.distributed.orders import Arrival, Order, RequestUpdate, decode_order, encode_order
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.executor.interface import Executor, Progress, ignore_progress
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.request.output import Event
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence

DIGEST_INTERVAL = 16  # steps from one comparison of decisions to the next


class Lockstep:
    """One process's part in the lockstep of a process group; a process alone does nothing for it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.decisions, self.now = group, DecisionDigest(), 0.0
        self.is_alone = group.num_processes == 1
        self._updates: deque[RequestUpdate] = deque()
        self._ends: dict[str, dict[int, Loaded]] = {}  # of loads, by name and process
        self._asked: set[str] = set()
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
        self.decisions.add_plan(batch)

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """Add the tokens sampled from a batch to the digest."""
        self.decisions.add_tokens(batch, tokens)

    # In process 0.

    def note(self, update: RequestUpdate, sequences: List[Sequence] = ()) -> None:
        """Queue an update for the next step's message; any thread may."""
        if self.leads and not self.is_alone:
            if isinstance(update, Arrival):
                update = msgspec.structs.replace(update, request=dataclasses.replace(update.request, prompt=[]))
            self._updates.append(update)

    def note_step(self, now: float) -> None:
        """Order all other processes to plan the next step."""
        self._send("step", now, self.decisions.digest if self._num_steps % DIGEST_INTERVAL == 0 else None)
        self._is_settled = False
        self._num_steps += 1

    def settle(self, now: float) -> None:
        """Order all other processes to end the last step and apply updates, if there is need."""
        if self.leads and not self.is_alone and (self._updates or not self._is_settled):
            self._send("settle", now)
            self._is_settled = True

    def _send(self, kind: Literal["step", "settle"], now: float, digest: bytes | None = None) -> None:
        updates = [self._updates.popleft() for _ in range(len(self._updates))]
        self.group.broadcast(encode_order(Order(kind, now, self._seconds, updates, digest)))
        self._seconds = None

    def note_end(self, step: EndedStep | None, events: list[Event]) -> None:
        """Keep how long a step took for the next step's message."""
        self._seconds = None if step is None else step.seconds

    def note_failure(self, cause: str) -> None:
        """Let all other processes end."""
        self.group.fail(cause)

    def send_warm_up(self) -> None:
        """Order all other processes to warm up."""
        self.group.broadcast(encode_order(Order("warm_up")))

    # In the other processes.

    def orders(self) -> Iterator[Order]:
        """The orders of process 0, until it closes its process group."""
        while data := self.group.receive():
            order = decode_order(data)
            if order.digest not in (None, self.decisions.digest):
                self._fail_for_difference()
            if order.kind != "warm_up":
                self.now = order.now
            yield order

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

    # Reports of the other processes: loads that have ended there, and leases that are asked for there.

    def report_loads(self, ended: Iterable[Loaded]) -> None:
        """In the other processes: tell process 0 of loads that have ended here."""
        for loaded in ended:
            self.group.report(list(loaded))

    def complete_loads(self, ended: Iterable[Loaded], wanted: Container[str]) -> list[Loaded]:
        """In process 0: loads that have ended in every process, given those that have just ended in this one.

        The pages are those that all have; the time is that of the slowest. Of loads that are not `wanted` any more,
        some process may never tell the end.
        """
        if self.is_alone:
            return list(ended)
        for loaded in ended:
            self._ends.setdefault(loaded.name, {})[0] = loaded
        self._read_reports()
        self._ends = {name: ends for name, ends in self._ends.items() if name in wanted}
        complete = [name for name, ends in self._ends.items() if len(ends) == self.group.num_processes]
        return [
            Loaded(name, min(x.num_pages for x in ends), max(x.seconds for x in ends))
            for name in complete
            for ends in [list(self._ends.pop(name).values())]
        ]

    def report_asked(self, lease_id: str) -> None:
        """In the other processes: tell process 0 that a lease is asked for here."""
        self.group.report(lease_id)

    def take_asked(self) -> set[str]:
        """In process 0: the leases that were asked for elsewhere since the last call."""
        self._read_reports()
        asked, self._asked = self._asked, set()
        return asked

    def _read_reports(self) -> None:
        for process, value in self.group.reports():
            if isinstance(value, str):
                self._asked.add(value)
            else:
                name, num_pages, seconds = value
                self._ends.setdefault(name, {})[process] = Loaded(name, num_pages, seconds)

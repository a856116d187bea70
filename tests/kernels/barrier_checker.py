"""Searches all orders in which the warpgroups of a thread block can run, for deadlocks and races.

A role is a list of operations on barriers and slots of shared memory. Roles run at any speeds. The rules are those of
the hardware: a barrier's phase is complete after a number of arrivals and once the copies that arrived have landed; a
wait knows phases by their parity alone, so it must not be two behind; a copy lands at any time after it was issued; a
slot that something reads (a product does until it is awaited) must hold what is meant, and nothing may change it then.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Slot = tuple[Any, ...]
Barrier = tuple[str, int]


class Wait(NamedTuple):
    """Wait for the next phase of a barrier, counted for each role from the first."""

    barrier: Barrier


class Arrive(NamedTuple):
    barrier: Barrier


class Copy(NamedTuple):
    """Begin to copy: arrives on the barrier, whose phase isn't complete before the slot holds the content."""

    barrier: Barrier
    slot: Slot
    content: Any


class Read(NamedTuple):
    """Begin to read a slot, which holds one of some contents."""

    slot: Slot
    contents: tuple[Any, ...]


class Done(NamedTuple):
    """A read that began before is over."""

    slot: Slot


class Write(NamedTuple):
    """Change a slot's content, visible to whoever is told of it by a barrier."""

    slot: Slot
    before: Any  # ...: anything, all of it is written
    content: Any


Operation = Wait | Arrive | Copy | Read | Done | Write


class Fault(Exception):
    """What is wrong, and after which operations of each role."""


class State(NamedTuple):
    """All else follows: arrivals, phases and accesses from how far each role is."""

    at: tuple[int, ...]  # number of steps that each role has done
    contents: tuple[Any, ...]  # of each slot
    in_flight: frozenset[Slot]  # slots to which a copy is in flight


class Point(NamedTuple):
    """A role between two steps: how often it has arrived at and waited for each barrier, and what it accesses."""

    arrived: dict[Barrier, int]
    waited: dict[Barrier, int]
    reading: frozenset[Slot]
    writing: frozenset[Slot]


class Checker:
    """Checks roles (lists of operations by name) that use barriers (numbers of arrivals by name).

    Unless `exhaustive`, a step of a role is a barrier operation and all that follows up to the next, and its accesses
    last until then: what another role can do at any time in between, it can do while they last. And a copy lands when
    somebody has waited for it: it may be as late as that, and being early breaks no rule. (A test compares both.)
    """

    def __init__(
        self, roles: Mapping[str, Sequence[Operation]], arrivals: Mapping[Barrier, int], exhaustive: bool = False
    ) -> None:
        self.names, self.arrivals, self.exhaustive = list(roles), arrivals, exhaustive
        slots = dict.fromkeys(x.slot for role in roles.values() for x in role if not isinstance(x, Wait | Arrive))
        self.slots = {slot: number for number, slot in enumerate(slots)}
        self.barrier_of = {x.slot: x.barrier for role in roles.values() for x in role if isinstance(x, Copy)}
        self.steps = [self._steps(role) for role in roles.values()]
        self.points = [list(self._points(steps)) for steps in self.steps]

    def _steps(self, role: Sequence[Operation]) -> list[list[Operation]]:
        steps: list[list[Operation]] = []
        for x in role:
            if not steps or self.exhaustive or isinstance(x, Wait | Arrive | Copy):
                steps.append([])
            steps[-1].append(x)
        return steps

    def _points(self, steps: list[list[Operation]]) -> Iterator[Point]:
        """Before the first step, and after each."""
        arrived, waited, reading = dict.fromkeys(self.arrivals, 0), dict.fromkeys(self.arrivals, 0), Counter[Slot]()
        yield Point(arrived.copy(), waited.copy(), frozenset(), frozenset())
        for step in steps:
            read, written = set(reading), set()
            for x in step:
                match x:
                    case Wait():
                        waited[x.barrier] += 1
                    case Arrive() | Copy():
                        arrived[x.barrier] += 1
                    case Read():
                        reading[x.slot] += 1
                        read.add(x.slot)
                    case Done():
                        reading[x.slot] -= 1
                    case Write():
                        written.add(x.slot)
                if isinstance(x, Copy | Write) and reading[x.slot]:
                    raise Fault(f"{x}: this role itself is reading that")
            reading = +reading  # without zeros
            accesses = (set(reading), set()) if self.exhaustive else (read, written)
            yield Point(arrived.copy(), waited.copy(), *map(frozenset, accesses))

    def search(self) -> int:
        """Visit all reachable states; return their number.

        Raises:
          Fault: a rule is broken in some order.
        """
        start = State((0,) * len(self.steps), (None,) * len(self.slots), frozenset())
        seen, stack = {start}, [start]
        while stack:
            state = stack.pop()
            successors = [self._after(state, role) for role in range(len(self.steps))]
            if self.exhaustive:
                successors += [state._replace(in_flight=state.in_flight - {slot}) for slot in state.in_flight]
            if not any(successors) or (state.in_flight and self._at_end(state)):
                self._check_end(state)
            for successor in successors:
                if successor is not None and successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
        return len(seen)

    def _after(self, state: State, role: int) -> State | None:
        """The state after the next step of a role; None if it is at its end or has to wait."""
        at, contents, in_flight = state
        if at[role] == len(self.steps[role]):
            return None
        points = [points[done] for points, done in zip(self.points, at, strict=True)]
        for x in self.steps[role][at[role]]:
            if isinstance(x, Wait | Arrive | Copy):
                landing = {slot for slot in in_flight if self.barrier_of[slot] == x.barrier}
                complete, part = divmod(sum(point.arrived[x.barrier] for point in points), self.arrivals[x.barrier])
            if isinstance(x, Wait):
                phase = points[role].waited[x.barrier]
                if complete - (self.exhaustive and bool(landing) and not part) <= phase:
                    return None
                if complete > phase + 1:
                    self._fail(state, role, x, f"waits for phase {phase}, but phase {phase + 1} is over, too")
                in_flight = in_flight - landing
            elif isinstance(x, Arrive | Copy) and landing and not part:
                self._fail(state, role, x, "arrives where all have arrived and copies are in flight")
            if isinstance(x, Copy | Write | Read):
                self._check_access(state, role, x)
            if isinstance(x, Copy | Write):
                number = self.slots[x.slot]
                contents = (*contents[:number], x.content, *contents[number + 1 :])
            if isinstance(x, Copy):
                in_flight = in_flight | {x.slot}
            state = State(at, contents, in_flight)
        return State((*at[:role], at[role] + 1, *at[role + 1 :]), contents, in_flight)

    def _check_access(self, state: State, role: int, x: Copy | Write | Read) -> None:
        if x.slot in state.in_flight:
            self._fail(state, role, x, "meets a copy in flight")
        found = state.contents[self.slots[x.slot]]
        if (isinstance(x, Read) and found not in x.contents) or (isinstance(x, Write) and x.before not in (..., found)):
            self._fail(state, role, x, f"finds {found}")
        for number, (points, done) in enumerate(zip(self.points, state.at, strict=True)):
            other = points[done]
            if number != role and x.slot in (other.writing if isinstance(x, Read) else other.writing | other.reading):
                self._fail(state, role, x, f"meets an access of {self.names[number]}")

    def _at_end(self, state: State) -> bool:
        return all(done == len(steps) for done, steps in zip(state.at, self.steps, strict=True))

    def _check_end(self, state: State) -> None:
        """Nobody goes on: all must be at their end, and barriers in a state in which a kernel may end.

        Their last phase is complete, and each role that ever waits for one has waited for all of its phases, as Pallas'
        interpreter asks.
        """
        for role, (steps, done) in enumerate(zip(self.steps, state.at, strict=True)):
            if done < len(steps):
                self._fail(state, role, steps[done][0], "waits for ever")
        if state.in_flight:
            raise Fault(f"copies are in flight at the end, to {set(state.in_flight)}")
        ends = [points[-1] for points in self.points]
        for barrier, arrivals in self.arrivals.items():
            complete, part = divmod(sum(end.arrived[barrier] for end in ends), arrivals)
            waits = {end.waited[barrier] for end in ends} - {0}
            if part or waits - {complete} or (complete and not waits):
                raise Fault(f"{barrier} ends in phase {complete} with {part} arrivals, after {waits} waits")

    def _fail(self, state: State, role: int, x: Operation, what: str) -> None:
        raise Fault(f"{self.names[role]}, {x}: {what}; steps done: {dict(zip(self.names, state.at, strict=True))}")

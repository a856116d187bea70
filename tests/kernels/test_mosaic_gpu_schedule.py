"""The forward kernel's schedule in all orders of its warpgroups: no deadlock, no race, and no statement to spare.

`pipeline_roles` runs the kernel's own `schedule` to know what each warpgroup does; `barrier_checker` searches.
"""

import ast
import inspect
import itertools
from types import ModuleType
from typing import Any

import pytest
from barrier_checker import Arrive, Barrier, Checker, Copy, Done, Fault, Operation, Read, Wait, Write
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_roles import Tile, roles_of

from longctx.kernels.mosaic_gpu import schedule
from longctx.kernels.mosaic_gpu.schedule import Pipeline

PIPELINES = [Pipeline(*sizes) for sizes in itertools.product((1, 2), (2, 3, 4), (1, 2))]
FP8_PIPELINES = [Pipeline(*sizes) for sizes in [(1, 2, 2, 2), (1, 2, 1, 1), (1, 3, 1, 2), (1, 2, 1, 3)]]
SMALL_PIPELINES = [Pipeline(1, 2, 1), Pipeline(2, 2, 1), Pipeline(2, 3, 1), Pipeline(1, 2, 1, 2)]
# Blocks of each tile of a worker: first and last tiles without any, fewer and more than there are stages.
FEW_TILES = [*((n,) for n in range(6)), (0, 2, 0, 1), (1, 1, 1), (5, 3), (2, 5, 0)]
# Each role waits twice or more for each barrier.
TILES = (3, 0, 3)
Roles = dict[str, list[Operation]]


def roles_over(pipeline: Pipeline, blocks: tuple[int, ...], module: Any = schedule) -> tuple[Roles, dict[Barrier, int]]:
    """The roles over tiles of so many blocks, of which all, half or none are full."""
    return roles_of(pipeline, [Tile(n, (n, n // 2, 0)[(i + n) % 3]) for i, n in enumerate(blocks)], module)


def fault_in(roles: Roles, arrivals: dict[Barrier, int], exhaustive: bool = False) -> str | None:
    """What is wrong, if anything."""
    try:
        Checker(roles, arrivals, exhaustive).search()
    except Fault as fault:
        return str(fault)
    return None


@pytest.mark.parametrize("pipeline", PIPELINES + FP8_PIPELINES, ids=str)
@pytest.mark.parametrize("blocks", FEW_TILES, ids=str)
def test_all_orders(pipeline: Pipeline, blocks: tuple[int, ...]) -> None:
    assert fault_in(*roles_over(pipeline, blocks)) is None


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [*PIPELINES, *FP8_PIPELINES, Pipeline(2, 2, 1, 2)], ids=str)
def test_all_orders_of_up_to_three_tiles(pipeline: Pipeline) -> None:
    for number in (1, 2, 3):
        for blocks in itertools.product(range(6), repeat=number):
            assert fault_in(*roles_over(pipeline, blocks)) is None, blocks


def without(roles: Roles, name: str, at: int, times: int = 0) -> Roles:
    """The roles with one operation left out, or repeated."""
    operations = roles[name]
    return roles | {name: [*operations[:at], *[operations[at]] * times, *operations[at + 1 :]]}


@pytest.mark.parametrize("pipeline", SMALL_PIPELINES, ids=str)
def test_each_wait_and_arrival_that_is_missing_or_repeated_is_noticed(pipeline: Pipeline) -> None:
    """One wait or arrival of one role, once."""
    roles, arrivals = roles_over(pipeline, TILES)
    for name, operations in roles.items():
        for at, operation in enumerate(operations):
            if isinstance(operation, Wait | Arrive | Copy):
                assert fault_in(without(roles, name, at), arrivals), (name, at, operation)
            if isinstance(operation, Wait | Arrive):
                assert fault_in(without(roles, name, at, 2), arrivals), (name, at, operation)


class Mutate(ast.NodeTransformer):
    """Replaces the n-th pair of statements that call certain functions; notes all such pairs.

    Args:
      number: which pair to replace.
      order: positions in the pair of what is to stand there.
      first, second: calls in the first statement (one of them) and in the second.
    """

    def __init__(self, number: int, order: tuple[int, ...], first: tuple[str, ...], second: str = "") -> None:
        self.number, self.order, self.first, self.second = number, order, first, second
        self.sites: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        bodies = [x for x in (getattr(node, "body", ()), getattr(node, "orelse", ())) if isinstance(x, list)]
        for body, i in [(x, i) for x in bodies for i in range(len(x))]:
            pair = body[i : i + 2]
            texts = [ast.unparse(x.value) if isinstance(x, ast.Expr | ast.Assign) else "" for x in pair]
            if any(call in texts[0] for call in self.first) and self.second in texts[-1]:
                self.sites.append(f"{pair[0].lineno}: {texts[0]}")
                if len(self.sites) - 1 == self.number:
                    body[i : i + 2] = [pair[k] for k in self.order if k < len(pair)] or [ast.Pass()]
                    break
        return super().generic_visit(node)


def mutated(*arguments: Any) -> tuple[ModuleType, list[str]]:
    """The schedule with a pair of statements replaced, and all places where that may be."""
    mutate = Mutate(*arguments)
    tree = ast.fix_missing_locations(mutate.visit(ast.parse(inspect.getsource(schedule))))
    module = ModuleType("mutated")
    exec(compile(tree, "mutated", "exec"), vars(module))
    return module, mutate.sites


BARRIERS = ("machine.wait(", "machine.arrive(")
# What to do with the statement (0) and its successor (1), and where.
MUTATIONS = {
    "missing": ((1,), BARRIERS),
    "repeated": ((0, 0, 1), BARRIERS),
    "arrives before it awaits": ((1, 0), ("machine.awaited(",), "machine.arrive("),
}
SITES = [(kind, number) for kind, mutation in MUTATIONS.items() for number in range(len(mutated(-1, *mutation)[1]))]


def test_all_waits_and_arrivals_of_the_schedule_are_mutated() -> None:
    source = inspect.getsource(schedule)
    calls = sum(source.count(call) for call in BARRIERS)
    assert [kind for kind, _ in SITES].count("missing") == calls > 15
    assert [kind for kind, _ in SITES].count("arrives before it awaits") >= 4


@pytest.mark.parametrize(("kind", "number"), SITES)
def test_each_statement_of_the_schedule_counts(kind: str, number: int) -> None:
    """In every tile, of all roles that execute it."""
    module, sites = mutated(number, *MUTATIONS[kind])

    def is_noticed(pipeline: Pipeline) -> bool:
        try:
            return fault_in(*roles_over(pipeline, TILES, module)) is not None
        except Fault:
            return True

    assert any(map(is_noticed, SMALL_PIPELINES)), sites[number]


@pytest.mark.parametrize("name", sorted(Pipeline(2, 2, 2, 2).barriers))
def test_wrong_numbers_of_arrivals_are_noticed(name: str) -> None:
    pipeline = Pipeline(2, 2, 2, 2 if "fp8" in name else 0)
    roles, arrivals = roles_over(pipeline, TILES)
    for number in {1, 2, 3} - {pipeline.barriers[name].arrivals}:
        wrong = {barrier: number if barrier[0] == name else right for barrier, right in arrivals.items()}
        assert fault_in(roles, wrong)


@given(st.data())
@settings(max_examples=60)
def test_the_search_finds_what_single_steps_find(data: st.DataObject) -> None:
    """Schedules with one or two operations missing, repeated or exchanged; copies that land at any time."""
    pipeline = data.draw(
        st.sampled_from([Pipeline(1, 2, 1), Pipeline(1, 2, 2), Pipeline(2, 2, 1), Pipeline(1, 2, 1, 2)])
    )
    roles, arrivals = roles_over(pipeline, data.draw(st.sampled_from([(1,), (3,), (1, 1)])))
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(roles)))
        at = data.draw(st.integers(0, len(roles[name]) - 2))
        operations = roles[name]
        if data.draw(st.booleans()):
            roles = without(roles, name, at, data.draw(st.sampled_from([0, 2])))
        elif not (isinstance(operations[at], Read) and isinstance(operations[at + 1], Done)):
            roles = roles | {name: [*operations[:at], operations[at + 1], operations[at], *operations[at + 2 :]]}
    fault, single = fault_in(roles, arrivals), fault_in(roles, arrivals, exhaustive=True)
    assert (fault is None) == (single is None), (fault, single)


A, B = ("a", 0), ("b", 0)
X = ("x",)
COPY = [Copy(A, X, 1), Wait(A)]


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (([*COPY, Read(X, (1,)), Done(X)],), None),
        (([Wait(A)], [Wait(B), Arrive(A)]), "waits for ever"),
        (([Copy(A, X, 1), Arrive(B), Wait(A)], [Wait(B), Read(X, (1,)), Done(X)]), "copy in flight"),
        ((COPY, [Read(X, (1,))]), "finds None|copy in flight"),
        (([*COPY, Arrive(B), Copy(A, X, 2), Wait(A)], [Wait(B), Read(X, (1,)), Done(X)]), "finds|access|in flight"),
        (([*COPY, Arrive(B), Write(X, 1, 2)], [Wait(B), Read(X, (1,)), Done(X)]), "finds|access"),
        (([*COPY, Arrive(B), Write(X, 1, 2)], [Wait(B), Read(X, (2,)), Done(X)]), "finds|access"),
        (([*COPY, Write(X, 1, 2), Arrive(B)], [Wait(B), Read(X, (2,)), Done(X)]), None),
        (([*COPY, Read(X, (1,)), Copy(A, X, 2), Wait(A), Done(X)],), "itself is reading"),
        (([Arrive(A), Arrive(A)], [Wait(A), Wait(A)]), "but phase 1 is over"),
        (([Copy(A, X, 1)],), "in flight at the end"),
        (([Copy(A, X, 1), Copy(A, ("y",), 1), Wait(A)],), "where all have arrived"),
        (([Arrive(A)],), "ends in phase 1"),
    ],
)
def test_rules(roles: tuple[list[Operation], ...], message: str | None, exhaustive: bool) -> None:
    names = {str(number): role for number, role in enumerate(roles)}
    used = {x.barrier for role in roles for x in role if isinstance(x, Wait | Arrive | Copy)}
    try:
        Checker(names, dict.fromkeys(sorted(used), 1), exhaustive).search()
        found = None
    except Fault as fault:
        found = str(fault)
    assert (found is None) == (message is None)
    assert message is None or any(part in found for part in message.split("|")), found

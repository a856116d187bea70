"""Roles change by load: not at once, not for long, never the last of a pool, and what was begun is ended."""

from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from conductor_parts import cluster, instance, request

from longctx.cluster.conductor.config import RoleConfig
from longctx.cluster.conductor.overload import Loads
from longctx.cluster.conductor.request import Assignment, RoleChange
from longctx.cluster.conductor.upkeep import RoleRule

CONFIG = RoleConfig(high=0.9, low=0.4, seconds=10.0, cool_down=30.0)
PREFILL_SHORT, DECODE_SHORT, EVEN = Loads(1.5, 0.1), Loads(0.1, 1.5), Loads(0.7, 0.7)


class Worker(NamedTuple):
    """An instance with requests and seconds of its role, and some requests of another one."""

    name: str
    role: str
    requests: int
    seconds: float
    others: int = 0
    is_draining: bool = False
    expected: None = None

    def queue(self, now: float) -> float:
        return self.seconds

    def tbt(self, expected: None) -> float:
        return self.seconds


THREE = [Worker("a", "decode", 5, 0.1), Worker("b", "decode", 2, 0.1), Worker("c", "decode", 2, 0.05)]
POOLS = [*THREE, Worker("p", "prefill", 9, 20.0), Worker("q", "prefill", 9, 10.0)]


def decide(rule: RoleRule, loads: Loads, instances: list[Worker], now: float) -> RoleChange | None:
    prefilling, decoding = [], []
    for each in instances:
        own, other = (prefilling, decoding) if each.role == "prefill" else (decoding, prefilling)
        for some, count in ((own, each.requests), (other, each.others)):
            name = {"prefill": each.name, "decode": "-"} if some is prefilling else {"decode": each.name}
            some += [SimpleNamespace(assignment=SimpleNamespace(**name))] * count
    state = SimpleNamespace(instances={each.name: each for each in instances})
    state.prefilling, state.decoding = dict(enumerate(prefilling)), dict(enumerate(decoding))
    with mock.patch("longctx.cluster.conductor.upkeep.loads", return_value=loads):
        return rule.change(state, now)  # type: ignore[arg-type]


def changes(rule: RoleRule, loads: Loads, seconds: range, instances: list[Worker] = POOLS) -> list[RoleChange]:
    found = [decide(rule, loads, instances, float(now)) for now in seconds]
    return [each for each in found if each is not None]


def test_the_instance_with_least_to_lose_changes_after_a_while() -> None:
    assert changes(RoleRule(CONFIG), PREFILL_SHORT, range(10)) == []
    assert changes(RoleRule(CONFIG), PREFILL_SHORT, range(11)) == [RoleChange("c", "prefill")]
    assert changes(RoleRule(CONFIG), DECODE_SHORT, range(11)) == [RoleChange("q", "decode")]


def test_a_moment_between_the_marks_begins_the_count_anew() -> None:
    rule = RoleRule(CONFIG)
    assert changes(rule, PREFILL_SHORT, range(9)) == []
    assert changes(rule, EVEN, range(9, 10)) == []
    assert changes(rule, PREFILL_SHORT, range(10, 20)) == []
    assert changes(rule, DECODE_SHORT, range(20, 30)) == []
    assert changes(rule, DECODE_SHORT, range(30, 31)) == [RoleChange("q", "decode")]


def test_nothing_changes_for_a_while_after_a_change() -> None:
    rule = RoleRule(CONFIG)
    found = [now for now in range(100) if decide(rule, PREFILL_SHORT, POOLS, float(now)) is not None]
    assert found == [10, 40, 70]


@pytest.mark.parametrize(
    "instances",
    [
        POOLS[2:],  # "c" is the last one that decodes
        [each._replace(is_draining=each.name != "a") for each in POOLS],  # the others drain
        [each._replace(others=int(each.name == "p")) for each in POOLS],  # "p" still decodes for some
    ],
)
def test_a_pool_keeps_its_last_and_a_change_ends_before_the_next(instances: list[Worker]) -> None:
    assert changes(RoleRule(CONFIG), PREFILL_SHORT, range(60), instances) == []


def test_a_pool_gives_nothing_that_it_would_miss() -> None:
    two = [POOLS[0], POOLS[1], *POOLS[3:]]
    assert changes(RoleRule(CONFIG), Loads(1.5, 0.39), range(11), two) == [RoleChange("b", "prefill")]
    strict = RoleConfig(high=0.7, low=0.4, seconds=10.0)
    assert changes(RoleRule(strict), Loads(1.5, 0.39), range(60), two) == []  # 0.78 on the one that is left


def test_a_pool_of_which_all_have_died_gets_one() -> None:
    assert changes(RoleRule(CONFIG), Loads(float("inf"), 0.1), range(11), THREE) == [RoleChange("c", "prefill")]


def test_a_conductor_changes_roles_and_the_old_work_goes_on() -> None:
    names = [instance("p"), instance("d", "decode"), instance("e", "decode")]
    conductor = cluster(*names, ttft=10.0, tpot=1.0, admission="none", roles=RoleConfig(0.9, 0.4, 2.0, 0.0))
    first = conductor.assign(request("r0", (0, 19)), 0.0)
    assert isinstance(first, Assignment)
    conductor.prefilled("r0", 0.0)
    for i in range(1, 9):
        conductor.assign(request(f"r{i}", (i, 19)), 0.0)
    found = [conductor.role_change(now) for now in (0.0, 1.0, 2.0)]
    assert found[:2] == [None, None]
    change = found[2]
    assert change is not None
    # Of both that decode, the one that has fewer.
    work = [
        each.assignment.decode for each in (*conductor.state.decoding.values(), *conductor.state.prefilling.values())
    ]
    assert work.count(change.instance) == min(work.count("d"), work.count("e"))
    conductor.set_role(change.instance, change.role, 2.0)
    left = {"d", "e"} - {change.instance}
    new = conductor.assign(request("new", (50, 19)), 2.0)
    assert isinstance(new, Assignment)
    assert (new.prefill, {new.decode}) == (change.instance, left)
    # Those that decode there, or will, are not moved; and until they have ended there is no other change.
    assert all(conductor.role_change(float(now)) is None for now in range(3, 30))
    for i in range(9):
        conductor.prefilled(f"r{i}", 30.0)
        conductor.finished(f"r{i}", 30.0)
    assert change.instance not in {each.assignment.decode for each in conductor.state.decoding.values()}


@pytest.mark.parametrize(
    ("field", "value"), [("high", -1.0), ("low", 2.0), ("seconds", float("nan")), ("cool_down", float("inf"))]
)
def test_settings_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        RoleConfig(**{field: value})

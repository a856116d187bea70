"""Random clusters, requests, deaths, reports and hostile input: what holds at every moment, and in the end."""

from typing import Any

import pytest
from conductor_parts import BLOCK, RoundCosts, instance, keys_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import POLICIES, ROLES, ConductorConfig, Role
from longctx.cluster.conductor.instance import Report
from longctx.cluster.conductor.overload import ADMISSION_RULES
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection
from longctx.cluster.conductor.state import NO_DECODES
from longctx.cluster.prefix_index.index import PrefixIndex

NAMES = [f"i{i}" for i in range(5)]
names = st.sampled_from(NAMES)
some_names = st.frozensets(names, max_size=3)
nonsense = st.sampled_from([float("nan"), float("inf"), -1.0, "1", None, 1.5])


class RandomCluster(RuleBasedStateMachine):
    """Whoever drives a conductor knows which requests are open, and who is there; both have to agree at all times."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from([*ADMISSION_RULES]),
        threshold=st.sampled_from([1.0, 2.0, 4.0]),
        defer=st.sampled_from([0.0, 5.0]),
    )
    def begin(self, policy: str, admission: Any, threshold: float, defer: float) -> None:
        config = ConductorConfig(
            policy, admission, 2.0, 0.02, balancing_threshold=threshold, defer_seconds=defer, swap_seconds=1.0
        )
        self.index = PrefixIndex()
        self.conductor = Conductor(config, self.index)
        self.now, self.count = 0.0, 0
        self.roles: dict[str, Role] = {}
        self.draining: set[str] = set()
        self.reported: set[str] = set()
        self.open: dict[str, Assignment] = {}
        self.decodes: set[str] = set()
        self.lost: list[ClusterRequest] = []
        self.requests: dict[str, ClusterRequest] = {}

    @rule(seconds=st.sampled_from([0.001, 0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        name=names, role=st.sampled_from(ROLES), tokens=st.sampled_from([500, 2000, 100_000]), slots=st.integers(1, 9)
    )
    def join(self, name: str, role: Role, tokens: int, slots: int) -> None:
        costs, fits = RoundCosts(speed=1.0 + slots), (9, 0, 0)
        spec = instance(name, role, costs=costs, decode_tokens=tokens, max_running=slots, cache_blocks=fits)
        if name in self.roles:
            with pytest.raises(ValueError, match="no other instance"):
                self.conductor.join(spec, self.now)
        else:
            self.conductor.join(spec, self.now)
            self.roles[name] = role

    @rule(name=names, restores=st.booleans())
    def drain(self, name: str, restores: bool) -> None:
        if name in self.roles:
            self.conductor.drain(name, self.now, not restores)
            (self.draining.discard if restores else self.draining.add)(name)

    @rule(name=names, role=st.sampled_from(ROLES))
    def set_role(self, name: str, role: Role) -> None:
        if name in self.roles:
            self.conductor.set_role(name, role, self.now)
            self.roles[name] = role

    @rule(name=names)
    def fail(self, name: str) -> None:
        if name not in self.roles:
            with pytest.raises(ValueError, match="no instance"):
                self.conductor.remove(name, self.now)
            return
        ids = self.conductor.remove(name, self.now)
        needed = {
            request_id
            for request_id, each in self.open.items()
            if each.decode == name or (each.prefill == name and request_id not in self.decodes)
        }
        assert set(ids) == needed
        assert len(ids) == len(needed)
        self.lost += [self.requests[request_id] for request_id in ids]
        for request_id in ids:
            self.close(request_id)
        del self.roles[name]
        self.draining.discard(name)
        self.reported.discard(name)

    @rule(
        blocks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=3),
        rest=st.integers(1, 99),
        max_tokens=st.sampled_from([1, 100, 3000]),
        ttft=st.sampled_from([None, 1e-9, 1e9]),
        priority=st.integers(-2, 2),
        exclude=some_names,
        waited=st.sampled_from([0.0, 4.0]),
    )
    def come(
        self, blocks: Any, rest: int, max_tokens: int, ttft: Any, priority: int, exclude: frozenset[str], waited: float
    ) -> None:
        keys, self.count = keys_of(*blocks), self.count + 1
        tokens = len(keys) * BLOCK + rest
        request = ClusterRequest(f"r{self.count}", tokens, max_tokens, keys, ttft, None, priority)
        self.assign(request, exclude, 0, waited)

    @precondition(lambda self: self.lost)
    @rule(generated=st.integers(1, 200), exclude=some_names)
    def go_on(self, generated: int, exclude: frozenset[str]) -> None:
        request = self.lost.pop(0)
        if self.assign(request, exclude, generated, 0.0) is None:
            self.lost.append(request)

    def assign(
        self, request: ClusterRequest, exclude: frozenset[str], generated: int, waited: float
    ) -> Assignment | None:
        found = self.conductor.assign(request, self.now, exclude, generated, waited)
        assert found.request_id == request.request_id
        if isinstance(found, Rejection):
            assert found.stage == "prefill"
            assert found.retry_after >= 0
            if generated:
                assert found.bound in ("memory", "no_instance")
            return None
        is_open = {name: name not in self.draining | exclude for name in self.roles}
        assert is_open[found.prefill]
        assert is_open[found.decode]
        assert self.roles[found.decode] != "prefill"
        if self.roles[found.prefill] == "decode":  # which reads prompts itself where nobody else can
            assert not any(is_open[name] for name, role in self.roles.items() if role != "decode")
        if self.roles[found.prefill] == "both":
            assert found.decode == found.prefill
        assert 0 <= found.cached < request.prompt_tokens
        assert found.ttft == pytest.approx(found.queue + found.transfer_seconds + found.prefill_seconds)
        if found.transfer is not None:
            assert found.transfer.source in self.roles
            assert found.transfer.source != found.prefill
            assert 0 <= found.transfer.first < found.transfer.stop == found.cached
        self.open[request.request_id], self.requests[request.request_id] = found, request
        return found

    def close(self, request_id: str) -> None:
        del self.open[request_id]
        self.decodes.discard(request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), by=st.sampled_from(["prefilled", "prefilled", "finished", "cancelled"]))
    def progress(self, data: st.DataObject, by: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        placed = self.open[request_id]
        if by == "prefilled":
            rejected = self.conductor.prefilled(request_id, self.now)
            if rejected is None:
                self.decodes.add(request_id)
                if placed.prefill in self.roles:
                    self.index.store(placed.prefill, "device", self.requests[request_id].keys)
            else:
                assert rejected.stage == "decode"
                assert not any(each.request_id == request_id for each in self.lost)
                self.close(request_id)
        elif by == "cancelled" or request_id in self.decodes:
            self.end(request_id, by)

    def end(self, request_id: str, by: str) -> None:
        if by == "finished":
            self.conductor.finished(request_id, self.now)
        else:
            self.conductor.cancelled(request_id, self.now)
        self.close(request_id)

    @rule(request_id=st.sampled_from(["", "r1", "nobody"]))
    def hear_of_what_is_not_open(self, request_id: str) -> None:
        if request_id not in self.open:
            assert self.conductor.prefilled(request_id, self.now) is None
            self.conductor.first_token(request_id, self.now)
            self.conductor.finished(request_id, self.now)
            self.conductor.cancelled(request_id, self.now)

    @rule(
        name=names,
        seconds=st.floats(0, 1e6),
        decoding=st.integers(0, 100),
        tokens=st.integers(0, 10**7),
        share=st.floats(0, 1),
        others=st.sampled_from([frozenset[str](), frozenset({"x", "y"})]),
    )
    def report(
        self, name: str, seconds: float, decoding: int, tokens: int, share: float, others: frozenset[str]
    ) -> None:
        if name in self.roles:
            known = frozenset(sorted(self.open)[: round(share * len(self.open))]) | others
            self.conductor.report(name, Report(seconds, decoding, tokens, known), self.now)
            self.reported.add(name)

    @rule(name=names, figures=st.tuples(nonsense, nonsense, nonsense))
    def report_nonsense(self, name: str, figures: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            self.conductor.report(name, Report(*figures), self.now)

    @rule()
    def look(self) -> None:
        assert [each.name for each in self.conductor.instances(self.now)] == [*self.conductor.state.instances]
        assert min(self.conductor.loads(self.now)) >= 0
        for swap in self.conductor.swaps(self.now):
            assert len(swap.keys) <= self.index.blocks(swap.instance, swap.tier)
            self.index.remove(swap.instance, swap.tier, swap.keys)

    @invariant()
    def no_request_is_lost(self) -> None:
        state = self.conductor.state
        assert state.prefilling.keys() | state.decoding.keys() == self.open.keys()
        assert state.decoding.keys() == self.decodes
        assert {*state.instances} == {*self.roles}

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        state = self.conductor.state
        for name, each in state.instances.items():
            decodes = [one for one in state.decoding.values() if one.assignment.decode == name]
            held = [one for one in state.prefilling.values() if one.assignment.decode == name and one.is_held]
            assert sum(one.reserved for one in decodes + held) <= each.spec.decode_tokens
            assert len(decodes + held) <= each.spec.max_running

    @invariant()
    def estimates_are_finite_and_not_negative(self) -> None:
        for each in self.conductor.instances(self.now):
            figures = [figure for figure in each if isinstance(figure, float | int)]
            assert all(0 <= figure < float("inf") for figure in figures), each

    def teardown(self) -> None:
        """Every request ends; instances that have ever said what they do say that they do nothing."""
        if not hasattr(self, "conductor"):
            return
        for request_id in [*self.open]:
            self.end(request_id, "finished" if request_id in self.decodes else "cancelled")
        for each in self.conductor.state.instances.values():
            if each.name in self.reported:
                self.conductor.report(each.name, Report(0.0, 0, 0), self.now)
            assert each.queue(self.now) == each.sending(self.now) == 0.0
            assert each.decoding == each.coming == each.held == each.others == NO_DECODES
            assert each.view(self.now).open_requests == 0
        assert not self.conductor.state.prefilling
        assert not self.conductor.state.decoding
        assert len(self.conductor.state.pending) == 0


RandomCluster.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestRandomCluster = RandomCluster.TestCase

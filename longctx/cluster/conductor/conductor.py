"""`Conductor`: the global scheduler of a cluster of engines."""

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Literal

from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.instance import InstanceSpec, Report, check_joins, check_report, check_role
from longctx.cluster.conductor.overload import Admission, Loads, Verdict, loads
from longctx.cluster.conductor.policy import (
    POLICY_FUNCTIONS,
    Policy,
    PolicyContext,
    check_choice,
    coupled_choice,
    select_decode,
    send_seconds,
)
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Decision, Rejection, RoleChange
from longctx.cluster.conductor.state import ClusterState, InstanceState, InstanceView, OpenRequest
from longctx.cluster.conductor.upkeep import RoleRule, Swap, Swapper
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.validation import check_integer, check_real

_LATEST = 2**32 - 1  # seconds: an index keeps 32 bits of them


class Conductor:
    """Global scheduler of a cluster: it places requests on instances, and keeps estimates of their work.

    Its driver calls it from one thread, with seconds of a clock that does not go back.

    Args:
      config: how it decides.
      index: which instance has which blocks; its driver keeps it up to date.

    Source:
      Mooncake, sections 3, 5 and 6.

    Examples:
      >>> import numpy as np
      >>> from longctx.cluster.conductor.conductor import Conductor
      >>> from longctx.cluster.conductor.config import ConductorConfig
      >>> from longctx.cluster.conductor.costs import PredictorCosts
      >>> from longctx.cluster.conductor.instance import InstanceSpec
      >>> from longctx.cluster.conductor.request import ClusterRequest
      >>> from longctx.cluster.prefix_index.index import PrefixIndex
      >>> from longctx.models import LlamaConfig
      >>> from longctx.simulation.hardware import predictor
      >>> model = LlamaConfig.preset("llama-3-8b")
      >>> costs = PredictorCosts.of_model(predictor(model, "h100-rdma"), model, chunk=2048)
      >>> index = PrefixIndex()
      >>> conductor = Conductor(ConductorConfig(), index)
      >>> for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
      ...     conductor.join(InstanceSpec(name, role, costs, 512, 1_000_000, 64, bandwidth=50e9), now=0.0)
      >>> index.store("p1", "device", range(20))  # it has the first 20 blocks of what comes
      >>> request = ClusterRequest("mine", 40 * 512, 100, np.arange(40, dtype=np.uint64))
      >>> assignment = conductor.assign(request, now=1.0)
      >>> assignment.prefill, assignment.decode, assignment.cached
      ('p1', 'd0', 10240)
    """

    def __init__(self, config: ConductorConfig, index: PrefixIndex) -> None:
        self.config, self.index, self.state = config, index, ClusterState(config)
        self._policy: Policy = POLICY_FUNCTIONS[config.policy] if isinstance(config.policy, str) else config.policy
        self._swapper = Swapper(config)
        self._admission = Admission(config)
        self._roles = None if config.roles is None else RoleRule(config.roles)

    @property
    def policy_name(self) -> str:
        """Name of the policy."""
        policy = self.config.policy
        return policy if isinstance(policy, str) else getattr(policy, "__name__", "own")

    # Instances.

    def join(self, spec: InstanceSpec, now: float) -> None:
        """Add an instance, or one that has been removed and comes back.

        Args:
          spec: what it is.
          now: seconds of the driver's clock.

        Raises:
          TypeError, ValueError: the spec is out of range, an instance of its name is there, or it is of another
            fingerprint or block size than those that are.
        """
        check_joins(spec, [each.spec for each in self.state.instances.values()])
        self.state.add(InstanceState(spec, spec.role))

    def drain(self, name: str, now: float, is_draining: bool = True) -> None:
        """Assign nothing more to an instance, or (False) something again; its open requests go on.

        Args:
          name: of the instance.
          now: seconds of the driver's clock.
          is_draining: from now on.

        Raises:
          ValueError: there is none of this name.
        """
        self._instance(name).is_draining = is_draining
        self.state.sort()

    def remove(self, name: str, now: float) -> list[str]:
        """Forget an instance that is dead, and the blocks that it held.

        Args:
          name: of the instance.
          now: seconds of the driver's clock.

        Returns:
          Ids of requests that it prefilled or decoded. They are not open any more: the driver assigns them again.

        Raises:
          ValueError: there is none of this name.
        """
        self._instance(name)
        requests = [*self.state.prefilling.values(), *self.state.decoding.values()]
        ended = [each for each in requests if _depends_on(each, name)]
        for each in ended:
            self._end(each, now)
        self.state.remove(name)
        self.index.clear(name)
        return [each.request.request_id for each in ended]

    def set_role(self, name: str, role: Role, now: float) -> None:
        """Change the role of an instance; its open requests go on.

        Args:
          name: of the instance.
          role: from now on.
          now: seconds of the driver's clock.

        Raises:
          TypeError, ValueError: there is no such instance or role.
        """
        check_role(role)
        self._instance(name).role = role
        self.state.sort()

    def report(self, name: str, report: Report, now: float, costs: PredictorCosts | None = None) -> None:
        """Correct the estimates of an instance by its own report.

        Args:
          name: of the instance.
          report: of the instance.
          now: seconds of the driver's clock.
          costs: from now on, such as those of a predictor that has been corrected since; None: as before.

        Raises:
          TypeError, ValueError: there is none of this name, or a figure is not finite or negative; nothing is changed.
        """
        instance = self._instance(name)
        check_report(report)
        if costs is not None:
            instance.spec = replace(instance.spec, costs=costs)
        instance.correct(report, self._open, now)

    # Requests.

    def assign(
        self,
        request: ClusterRequest,
        now: float,
        exclude: Collection[str] = frozenset(),
        generated: int = 0,
        waited: float = 0.0,
    ) -> Decision:
        """Choose the instances that serve a request, or reject it.

        Args:
          request: its lengths and keys.
          now: seconds of the driver's clock.
          exclude: names of instances that must have no part in it, as they have just failed.
          generated: tokens that it has had, if it goes on after a failure: then no load forbids it.
          waited: seconds for which it has been kept since it was rejected first.

        Returns:
          Where it is served, or why it is not.

        Raises:
          TypeError, ValueError: a request of this id is open, it has more keys than full blocks, an argument is out of
            range, or one's own policy chose what can't be. Nothing is changed.
        """
        check_real("now", now, 0, _LATEST)
        self._check_new(request)
        if check_integer("generated", generated, 0):
            # Its tokens are a part of its prompt now.
            tokens, rest = request.prompt_tokens + generated, max(1, request.max_tokens - generated)
            request = replace(request, prompt_tokens=tokens, max_tokens=rest)
        decision, placed = self._decide(request, now, exclude, generated, check_real("waited", waited, 0))
        if placed is not None and placed.assignment is decision:
            self._begin(placed, now)
        return decision

    def attach(self, request: ClusterRequest, name: str, now: float) -> Assignment:
        """Count a request that an instance has been given already, by another router.

        Args:
          request: its lengths and keys.
          name: of the instance, which decodes it.
          now: seconds of the driver's clock.

        Returns:
          Where it is: no load forbids it later.

        Raises:
          ValueError: there is none of this name, or a request of this id is open.
        """
        block_size = self._instance(name).spec.block_size
        self._check_new(request)
        placed = Assignment(request.request_id, name, name, 0, None, 0.0, 0.0, 0.0, 0.0, 0.0)
        reserved = _reserved_tokens(request, block_size)
        self._begin(OpenRequest(request, placed, 1, now, request.prompt_tokens, reserved, True), now)
        return placed

    def prefilled(self, request_id: str, now: float, has_memory: bool = False) -> Rejection | None:
        """Check whether a request may decode, whose prompt is computed (3, step 4).

        Args:
          request_id: of the request.
          now: seconds of the driver's clock.
          has_memory: the instance where it decodes has let it in already: memory can't forbid it any more.

        Returns:
          A rejection: the request is not open any more. None: it decodes; or it is not open, or did so already.
        """
        open_request = self.state.prefilling.get(request_id)
        if open_request is None:
            return None
        verdict = None if open_request.generated else self._admission.check("decode", self.state, open_request, now)
        if has_memory:
            verdict = None if verdict is None or verdict.bound == "memory" else verdict
        elif verdict is None and not open_request.is_held:
            decode = self.state.instances[open_request.assignment.decode]
            if not decode.has_room(open_request.reserved):
                load = decode.decoding.reserved / decode.spec.decode_tokens
                verdict = self._no_memory(open_request.reserved, load, now)
        if verdict is None:
            self.first_token(request_id, now)
            return None
        rejection = self._rejection(open_request.request, verdict, "decode", open_request.assignment, 0.0)
        self._end(open_request, now, was_computed=True)
        return rejection

    def first_token(self, request_id: str, now: float) -> None:
        """Note that the first token of a request has come; unlike `prefilled` it checks no room.

        Nothing happens if it is not open, or had one.

        Args:
          request_id: of the request.
          now: seconds of the driver's clock.
        """
        open_request = self.state.prefilling.get(request_id)
        if open_request is not None:
            self._end_prefill(open_request, now, was_computed=True)
            self.state.instances[open_request.assignment.decode].join_batch(open_request)
            open_request.decode_since = now
            self.state.decoding[request_id] = open_request

    def finished(self, request_id: str, now: float) -> None:
        """Forget a request that has had its last token. Nothing happens if it is not open.

        Args:
          request_id: of the request.
          now: seconds of the driver's clock.
        """
        open_request = self.state.find(request_id)
        if open_request is None:
            return
        begun = open_request.decode_since
        self._end(open_request, now, was_computed=True)
        if begun is None or open_request.generated:
            return
        self._admission.learn(now - begun)

    def cancelled(self, request_id: str, now: float) -> None:
        """Forget a request that was given up. Nothing happens if it is not open.

        Args:
          request_id: of the request.
          now: seconds of the driver's clock.
        """
        open_request = self.state.find(request_id)
        if open_request is not None:
            self._end(open_request, now)

    def instances(self, now: float) -> list[InstanceView]:
        """Return all instances, for metrics and pages."""
        return [each.view(now) for each in self.state.instances.values()]

    def swaps(self, now: float) -> list[Swap]:
        """Return the cold blocks that instances should swap out; the driver asks every second, and passes them on."""
        return self._swapper.swaps([each.spec for each in self.state.instances.values()], self.index, now)

    def loads(self, now: float) -> Loads:
        """Return the loads of both pools."""
        return loads(self.state, now)

    def role_change(self, now: float) -> RoleChange | None:
        """Return the change of a role by load, if there is one; the driver asks every second, and makes the change."""
        return None if self._roles is None else self._roles.change(self.state, now)

    # Parts of the above.

    def _instance(self, name: str) -> InstanceState:
        try:
            return self.state.instances[name]
        except KeyError:
            raise ValueError(f"there is no instance {name!r}") from None

    def _check_new(self, request: ClusterRequest) -> None:
        if self.state.find(request.request_id) is not None:
            raise ValueError(f"request_id must be of no open request, got {request.request_id!r}")

    def _open(self, request_id: str) -> OpenRequest:
        found = self.state.find(request_id)
        assert found is not None
        return found

    def _decide(
        self, request: ClusterRequest, now: float, exclude: Collection[str], generated: int, waited: float
    ) -> tuple[Decision, OpenRequest | None]:
        """Return the decision, and the request as the policy would place it, if it could be anywhere."""
        prefills, decodes = self.state.prefill_pool(exclude), self.state.decode_pool(exclude)
        if not prefills or not decodes:
            return self._rejection(request, Verdict("no_instance", inf, 1.0), "prefill", None, waited), None
        reserved = _reserved_tokens(request, prefills[0].spec.block_size)
        # Otherwise what is free now matters once its prompt is computed.
        is_held = self.config.admission == "none" or generated > 0
        rooms = [e for e in decodes if (e.has_room(reserved) if is_held else reserved <= e.spec.decode_tokens)]
        with_room = {each.name for each in rooms}
        pool = [each for each in prefills if each.role == "prefill" or each.name in with_room]
        if not rooms or not pool:
            return self._rejection(request, self._no_memory(reserved, inf, now), "prefill", None, waited), None
        matches, policy_context = self._matches(request, pool, exclude)
        choice = self._policy(request, matches, pool, now, policy_context)
        if callable(self.config.policy):
            check_choice(choice, request, pool, policy_context)
        instances, context = self.state.instances, request.prompt_tokens
        decode, tbt = select_decode(instances[choice.instance], rooms, context, reserved, policy_context.tpot)
        if self.config.is_inline and instances[choice.instance].role == "prefill":
            lacks = context - matches.get(decode.name, 0) * policy_context.block_size
            split = choice.ttft + send_seconds(instances[choice.instance], lacks, now)
            free = [each for each in rooms if each.has_room(reserved)]
            coupled = coupled_choice(request, matches, free, split, now, policy_context)
            slo = self.config.ttft if request.ttft is None else request.ttft
            if coupled is not None and coupled.ttft <= max(slo, choice.ttft):  # else it would be rejected
                choice, is_held = coupled, True
                decode = instances[choice.instance]
                tbt = decode.tbt_with(context)
        assignment = Assignment(
            request.request_id, choice.instance, decode.name, choice.cached, choice.transfer, choice.ttft, tbt,
            choice.queue, choice.transfer_seconds, choice.prefill_seconds,
        )  # fmt: skip
        placed = OpenRequest(request, assignment, generated, now, context, reserved, is_held)
        verdict = None if generated else self._admission.check("prefill", self.state, placed, now)
        if verdict is not None:
            return self._rejection(request, verdict, "prefill", assignment, waited), placed
        return assignment, placed

    def _matches(
        self, request: ClusterRequest, pool: list[InstanceState], exclude: Collection[str]
    ) -> tuple[dict[str, int], PolicyContext]:
        """Return the leading blocks that instances have or will have, and the context of a policy."""
        block_size = pool[0].spec.block_size
        usable = (request.prompt_tokens - 1) // block_size  # the last token is computed in any case
        keys = request.keys[:usable]
        held = self.index.match(keys)
        matches = dict(held)
        for name, blocks in self.state.pending.match(keys).items():
            if blocks > matches.get(name, 0):
                matches[name] = blocks
        seed, senders = f"{self.config.seed} {request.request_id}", self.state.senders
        if exclude:
            senders = {name: each for name, each in senders.items() if name not in exclude}
        threshold, tpot = self.config.balancing_threshold, min(request.tpot or inf, self.config.tpot)
        return matches, PolicyContext(block_size, threshold, senders, seed, held, tpot)

    def _no_memory(self, reserved: int, load: float, now: float) -> Verdict:
        return Verdict("memory", load, self._admission.memory_seconds(self.state, reserved, now))

    def _rejection(
        self,
        request: ClusterRequest,
        verdict: Verdict,
        stage: Literal["prefill", "decode"],
        placed: Assignment | None,
        waited: float,
    ) -> Rejection:
        ttft, tbt = (placed.ttft, placed.tbt) if placed is not None else (inf, inf)
        # Without a rule no request is rejected for which there will be memory.
        always_waits = self.config.admission == "none" and verdict.bound == "memory"
        most = _LATEST if always_waits else self.config.defer_seconds
        is_deferred = waited + verdict.retry_after <= most and stage == "prefill"
        return Rejection(
            request.request_id, verdict.bound, stage, ttft, tbt, verdict.load, verdict.retry_after, is_deferred
        )

    def _begin(self, open_request: OpenRequest, now: float) -> None:
        """Update all estimates at once."""
        placed, request = open_request.assignment, open_request.request
        instances = self.state.instances
        ready = now
        if placed.transfer is not None:
            ready = now + placed.transfer_seconds
            instances[placed.transfer.source].sends[request.request_id] = ready
        instances[placed.prefill].begin_prefill(open_request, now, ready)
        instances[placed.decode].begin_decode(open_request)
        self.state.pending.add(placed.prefill, request.keys)
        self.index.touch(request.keys, now)
        self.state.prefilling[request.request_id] = open_request

    def _end_prefill(self, open_request: OpenRequest, now: float, was_computed: bool) -> None:
        placed, request = open_request.assignment, open_request.request
        self.state.instances[placed.prefill].end_prefill(request.request_id, now, was_computed)
        self.state.pending.remove(placed.prefill, request.keys)
        if placed.transfer is not None and placed.transfer.source in self.state.instances:
            self.state.instances[placed.transfer.source].sends.pop(request.request_id, None)
        del self.state.prefilling[request.request_id]

    def _end(self, open_request: OpenRequest, now: float, was_computed: bool = False) -> None:
        """Take a request out of all estimates."""
        if open_request.decode_since is None:
            self._end_prefill(open_request, now, was_computed)
        self.state.instances[open_request.assignment.decode].end_decode(open_request)
        self.state.decoding.pop(open_request.request.request_id, None)


def _depends_on(open_request: OpenRequest, name: str) -> bool:
    """Return whether a request still needs an instance, to decode or to compute its prompt."""
    placed = open_request.assignment
    return placed.decode == name or (placed.prefill == name and open_request.decode_since is None)


def _reserved_tokens(request: ClusterRequest, block_size: int) -> int:
    """Compute the tokens of KV cache that a request may need to decode, in whole blocks."""
    if len(request.keys) > request.prompt_tokens // block_size:
        raise ValueError(
            f"keys must be of full blocks of {block_size} tokens: {request.prompt_tokens // block_size} at most, "
            f"got {len(request.keys)}"
        )
    return -(-(request.prompt_tokens + request.max_tokens) // block_size) * block_size

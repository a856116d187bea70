"""`Conductor`: the global scheduler of a cluster of engines."""

import random
from collections.abc import Collection

from longctx.cluster.conductor.block_index import BlockIndex
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.decision import Assignment, Bound, Decision, Rejection
from longctx.cluster.conductor.instance import InstanceSpec, Report, Role
from longctx.cluster.conductor.membership import check_joins, check_report, check_role
from longctx.cluster.conductor.overload import Admission
from longctx.cluster.conductor.pending_blocks import PendingBlocks
from longctx.cluster.conductor.policy import POLICY_FUNCTIONS, Choice, Policy, PolicyContext
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.conductor.state import ClusterState, InstanceState, InstanceView, OpenRequest


class Conductor:
    """Places requests on instances, and keeps estimates of what they do.

    Whoever drives it calls it from one thread, with seconds of a clock that does not go back.

    Args:
      index: which instance has which blocks; whoever drives the conductor feeds it.

    Source: Mooncake, sections 3, 5 and 6.
    """

    def __init__(self, config: ConductorConfig, index: BlockIndex) -> None:
        self.config, self.index, self.state = config, index, ClusterState(config)
        self._policy: Policy = POLICY_FUNCTIONS[config.policy] if isinstance(config.policy, str) else config.policy
        self._random, self._pending, self._admission = random.Random(config.seed), PendingBlocks(), Admission(config)

    # Instances.

    def join(self, spec: InstanceSpec, now: float) -> None:
        """Add an instance, or one that has been removed and comes back.

        Raises:
          TypeError, ValueError: the spec is out of range, an instance of its name is there, or it is of another
            fingerprint or block size than those that are.
        """
        check_joins(spec, self.state.instances.values())
        self.state.instances[spec.name] = InstanceState(spec, spec.role)

    def drain(self, name: str, now: float) -> None:
        """Assign nothing more to an instance; what it has goes on. ValueError: there is none of this name."""
        self._instance(name).is_draining = True

    def restore(self, name: str, now: float) -> None:
        """The opposite of `drain`. ValueError: there is none of this name."""
        self._instance(name).is_draining = False

    def remove(self, name: str, now: float) -> list[str]:
        """Forget an instance that is dead, and what it held.

        Returns:
          Ids of requests that it prefilled or decoded. They are not open any more: whoever drives assigns them anew.

        Raises:
          ValueError: there is none of this name.
        """
        self._instance(name)
        ended = [each for each in self.state.requests.values() if _depends_on(each, name)]
        for each in ended:
            self._end(each, now)
        del self.state.instances[name]
        self.index.clear(name)
        return [each.request.request_id for each in ended]

    def set_role(self, name: str, role: Role, now: float) -> None:
        """Change what an instance does; what it has goes on. ValueError: there is no such instance or role."""
        check_role(role)
        self._instance(name).role = role

    def report(self, name: str, report: Report, now: float) -> None:
        """Correct the estimates of an instance by what it says of itself.

        Raises:
          TypeError, ValueError: there is none of this name, or a figure is not finite or negative; nothing is changed.
        """
        instance = self._instance(name)
        check_report(report)
        instance.correct(report, self.state.requests, now)

    # Requests.

    def assign(
        self, request: ClusterRequest, now: float, exclude: Collection[str] = frozenset(), generated: int = 0
    ) -> Decision:
        """Choose the instances that serve a request, or reject it.

        Args:
          exclude: names of instances that it must not go to.
          generated: tokens that it has had, if it goes on after a failure: then no load forbids it.

        Raises:
          ValueError: a request of this id is open, or it has more keys than full blocks, or one's own policy chose
            what can't be.
        """
        if request.request_id in self.state.requests:
            raise ValueError(f"request_id must be of no open request, got {request.request_id!r}")
        prefills, decodes = self.state.prefill_pool(exclude), self.state.decode_pool(exclude)
        if not prefills or not decodes:
            return self._rejection(request, "no_instance")
        context, reserved = self._sizes(request, generated, prefills[0].spec.block_size)
        rooms = [each for each in decodes if each.has_room(reserved)]
        pool = [each for each in prefills if each.role == "prefill" or each in rooms]
        if not rooms or not pool:
            return self._rejection(request, "memory")
        choice = self._choose(request, pool, now)
        prefill = self.state.instances[choice.instance]
        decode, tbt = _select_decode(prefill, rooms, context)
        assignment = Assignment(
            request.request_id, prefill.name, decode.name, choice.cached, choice.transfer, choice.ttft, tbt,
            choice.queue, choice.transfer_seconds, choice.prefill_seconds,
        )  # fmt: skip
        if not generated:
            verdict = self._admission.before_prefill(self.state, request, assignment, now)
            if verdict is not None:
                return Rejection(
                    request.request_id, verdict.bound, "prefill", assignment.ttft, tbt, verdict.load,
                    verdict.retry_after, self.config.defer_seconds > 0,
                )  # fmt: skip
        self._begin(OpenRequest(request, assignment, generated, now, choice.prefill_seconds, context, reserved), now)
        return assignment

    def prefilled(self, request_id: str, now: float) -> Rejection | None:
        """The prompt of a request is computed: check whether it may decode (3, step 4).

        Returns:
          A rejection: the request is not open any more. None: it decodes; or it is not open, or did so already.
        """
        open_request = self.state.requests.get(request_id)
        if open_request is None or open_request.decode_since is not None:
            return None
        verdict = None if open_request.generated else self._admission.before_decode(self.state, open_request, now)
        if verdict is None:
            self.first_token(request_id, now)
            return None
        self._end(open_request, now, was_computed=True)
        placed = open_request.assignment
        return Rejection(
            request_id, verdict.bound, "decode", placed.ttft, placed.tbt, verdict.load, verdict.retry_after,
            self.config.defer_seconds > 0,
        )  # fmt: skip

    def first_token(self, request_id: str, now: float) -> None:
        """The first token of a request has come. Nothing happens if it is not open, or had one."""
        open_request = self.state.requests.get(request_id)
        if open_request is not None and open_request.decode_since is None:
            self._end_prefill(open_request, now, was_computed=True)
            self.state.instances[open_request.assignment.decode].join_batch(open_request)
            open_request.decode_since = now

    def finished(self, request_id: str, now: float, output_tokens: int) -> None:
        """A request has had its last token. Nothing happens if it is not open."""
        open_request = self.state.requests.get(request_id)
        if open_request is not None:
            self._end(open_request, now, was_computed=True)

    def cancelled(self, request_id: str, now: float) -> None:
        """A request was given up. Nothing happens if it is not open."""
        open_request = self.state.requests.get(request_id)
        if open_request is not None:
            self._end(open_request, now)

    def instances(self, now: float) -> list[InstanceView]:
        """What is known of all instances, for metrics and pages."""
        return [
            InstanceView(
                each.name, each.role, each.is_draining, each.queue(now), *each.decoding, each.reserved,
                each.spec.decode_tokens, each.tbt(each.decoding), each.sending(now), len(each.open),
            )
            for each in self.state.instances.values()
        ]  # fmt: skip

    # Parts of the above.

    def _instance(self, name: str) -> InstanceState:
        try:
            return self.state.instances[name]
        except KeyError:
            raise ValueError(f"there is no instance {name!r}") from None

    def _sizes(self, request: ClusterRequest, generated: int, block_size: int) -> tuple[int, int]:
        """Tokens of a request's context when it begins to decode, and of the KV cache to keep: whole blocks."""
        if len(request.keys) > request.prompt_tokens // block_size:
            raise ValueError(
                f"keys must be of full blocks of {block_size} tokens: {request.prompt_tokens // block_size} at most, "
                f"got {len(request.keys)}"
            )
        tokens = request.prompt_tokens + request.max_tokens
        return request.prompt_tokens + generated, -(-tokens // block_size) * block_size

    def _choose(self, request: ClusterRequest, pool: list[InstanceState], now: float) -> Choice:
        """Ask the policy."""
        block_size = pool[0].spec.block_size
        usable = (request.prompt_tokens - 1) // block_size  # the last token is computed in any case
        matches = {name: match.blocks for name, match in self.index.match(request.keys).items()}
        for name, blocks in self._pending.match(request.keys).items():
            matches[name] = max(blocks, matches.get(name, 0))
        matches = {name: min(usable, blocks) for name, blocks in matches.items()}
        senders = {each.name: each for each in self.state.instances.values() if each.does_prefill}
        context = PolicyContext(block_size, self.config.balancing_threshold, senders, self._random)
        return self._policy(request, matches, pool, now, context)

    def _rejection(self, request: ClusterRequest, bound: Bound) -> Rejection:
        """Nobody can serve it now, whatever the load."""
        inf = float("inf")
        return Rejection(request.request_id, bound, "prefill", inf, inf, inf, 1.0, self.config.defer_seconds > 0)

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
        self._pending.add(placed.prefill, request.keys)
        self.state.requests[request.request_id] = open_request

    def _end_prefill(self, open_request: OpenRequest, now: float, was_computed: bool) -> None:
        placed, request = open_request.assignment, open_request.request
        self.state.instances[placed.prefill].end_prefill(request.request_id, now, was_computed)
        self._pending.remove(placed.prefill, request.keys)
        if placed.transfer is not None and placed.transfer.source in self.state.instances:
            self.state.instances[placed.transfer.source].sends.pop(request.request_id, None)

    def _end(self, open_request: OpenRequest, now: float, was_computed: bool = False) -> None:
        """A request is not open any more: take it out of all estimates."""
        if open_request.decode_since is None:
            self._end_prefill(open_request, now, was_computed)
        self.state.instances[open_request.assignment.decode].end_decode(open_request)
        del self.state.requests[open_request.request.request_id]


def _depends_on(open_request: OpenRequest, name: str) -> bool:
    """Whether a request needs an instance still: where it decodes, or where its prompt is being computed."""
    placed = open_request.assignment
    return placed.decode == name or (placed.prefill == name and open_request.decode_since is None)


def _select_decode(prefill: InstanceState, rooms: list[InstanceState], context: int) -> tuple[InstanceState, float]:
    """Choose where a request decodes, of instances that have room for it: the least predicted TBT."""
    if prefill.role == "both":
        return prefill, prefill.tbt(prefill.expected.plus(1, context))
    tbts = [(each.tbt(each.expected.plus(1, context)), i) for i, each in enumerate(rooms)]
    tbt, at = min(tbts)
    return rooms[at], tbt

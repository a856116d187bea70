"""`PrefixTreeRoute`: cache-aware routing as vllm-router has it, for comparison.

Source: vllm-router's policy `cache_aware` and its defaults (0.1.15), which is that of SGLang's gateway.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

from longctx.cluster.conductor.policy import Choice, PolicyContext, local_choice
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.conductor.state import InstanceState
from longctx.serving.validation import check_integer, check_real


class PrefixTreeRoute:
    """A policy of the conductor that remembers which prompts went where, and hears nothing of caches.

    A prompt goes to the instance whose past prompts have the longest prefix in common with it, if that is more than a
    share of it; else to the one of which least is remembered. While the instances' numbers of open requests differ by
    more than both thresholds, it goes to the one with the fewest. Its tree is one of text; here it is one of blocks.

    Args:
      cache_threshold: that share of a prompt.
      balance_abs: requests that the busiest instance has more than the idlest.
      balance_rel: times as many as the idlest that the busiest has.
      max_blocks: that are remembered of each instance; the least recently used go first.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Source:
      vllm-router's policy `cache_aware` (0.1.15), which is that of SGLang's gateway.

    Examples:
      >>> from longctx.cluster.conductor.config import ConductorConfig
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.cluster import ClusterDeployment, PrefixTreeRoute
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import Lengths, arrive_at_rate, make_conversations
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> config = ConductorConfig(policy=PrefixTreeRoute(cache_threshold=0.3))
      >>> turns = make_conversations(20, Lengths(4, 4), Lengths(4000, 8000), Lengths(500, 500), Lengths(50, 50))
      >>> record = ClusterDeployment(model, topology, plan, coupled=4, config=config).run(arrive_at_rate(turns, 2.0))
      >>> round(record.hit_rate, 2)
      0.7
    """

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
        max_blocks: int = 1 << 17,
    ) -> None:
        self._share = check_real("cache_threshold", cache_threshold, 0, 1)
        self._abs, self._rel = check_integer("balance_abs", balance_abs, 0), check_real("balance_rel", balance_rel, 1)
        self._max_blocks = check_integer("max_blocks", max_blocks, 1)
        self._known: dict[str, OrderedDict[int, None]] = {}

    def __call__(
        self,
        request: ClusterRequest,
        matches: Mapping[str, int],
        pool: Sequence[InstanceState],
        now: float,
        context: PolicyContext,
    ) -> Choice:
        """Choose an instance, as policies of the conductor do.

        Args:
          request: to place.
          matches: by instance, leading blocks of the request that it holds; not heeded.
          pool: the instances to choose from.
          now: seconds of the driver's clock.
          context: further arguments of policies.

        Returns:
          Who prefills it, and what that is predicted to take.
        """
        keys = request.keys.tolist()
        state = self._choose(keys, pool, request.prompt_tokens / context.block_size)
        known = self._known.setdefault(state.name, OrderedDict())
        for key in reversed(keys):  # the beginning of a prompt is used last, and forgotten last
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_blocks:
            known.popitem(last=False)
        return local_choice(request, matches, state, now, context)

    def _choose(self, keys: list[int], pool: Sequence[InstanceState], num_blocks: float) -> InstanceState:
        loads = [len(each.open) for each in pool]
        if max(loads) - min(loads) > self._abs and max(loads) > self._rel * min(loads):
            return pool[loads.index(min(loads))]
        found = [self._match(each.name, keys) for each in pool]
        if max(found) > self._share * num_blocks:
            return pool[found.index(max(found))]
        sizes = [len(self._known.get(each.name, ())) for each in pool]
        return pool[sizes.index(min(sizes))]

    def _match(self, name: str, keys: list[int]) -> int:
        """Leading blocks that past prompts of an instance had."""
        known: Container[int] = self._known.get(name, ())
        return next((i for i, key in enumerate(keys) if key not in known), len(keys))

"""Two prefill and two decode servers on this machine behind one address: `python -m benchmarks.cluster --trace FILE`.

Four processes of `longctx serve`, a prefill and a decode server on each of two cores, get 200 requests of a trace that
is scaled down (an eighth of the lengths, conversations drawn so that they share as much as in the whole trace; without
`--trace` made-up ones). Prompts are real text, so that what is reused is real keys and values. Parts:

- `policies`: `longctx serve --cluster` with each policy, in turns, and routers of others before the same four servers:
  TTFT, and the share of the prompts' tokens that nobody computed. The simulator serves the same trace with the same
  conductor, by a predictor that was measured on this machine while it did nothing else, on cores that are shared as
  here. What servers, router and clients take beside steps is fitted to the seconds of processors that they used.
- `failures`: a decode server is drained, and gets requests again; then a prefill server and the other decode server are
  killed (SIGKILL) and started again. Every request must be answered once, at its first attempt, with the tokens that
  one engine by itself gives.
- `router`: the router is killed and started again. Streams of its clients break; they ask again.
- `cost`: the CPU that each router takes by itself, for a request, for a longer prompt, and for a stream.

The exit status is 1 if an answer was wrong or missing.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.arms import (
    OURS,
    PEERS,
    Instance,
    make_instances,
    measure,
    our_router,
    peer_router,
    started,
)
from benchmarks.cluster.checks import reference, wrong_answers
from benchmarks.cluster.failures import run_failures, run_router_death
from benchmarks.cluster.report import tables
from benchmarks.cluster.runs import measure_cost, model_of, run
from benchmarks.cluster.simulated import Prediction
from benchmarks.cluster.trace import agent_sessions, reusable, scaled_trace
from benchmarks.server_process import Process
from longctx.simulation.workloads import WorkloadRequest

PARTS = ("policies", "failures", "router", "cost")


class Bench(NamedTuple):
    """What all runs share."""

    instances: list[Instance]
    requests: list[WorkloadRequest]
    folder: Path

    @contextmanager
    def router(self, arm: str) -> Iterator[Process]:
        """A router that knows all servers."""
        if arm in OURS:
            router: Process | None = our_router(arm, self.instances, self.folder)
        else:
            router = peer_router(arm, self.instances, self.folder)
        assert router is not None
        with router:
            if arm in OURS:
                wait_for_members(router, len(self.instances))
            yield router


def wait_for_members(router: Process, count: int, seconds: float = 30.0) -> None:
    """Until a router of ours has let so many servers in; RuntimeError if they don't come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = router.get("/cluster/instances")["instances"]
        if sum(each["state"] == "open" for each in found) == count:
            return
        time.sleep(0.1)
    raise RuntimeError(f"{router.name} has not let all servers in: {found}")


def run_policies(bench: Bench, rounds: int, arms: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """All arms in turns; each round turns their order."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            seed = 100 + sum(map(len, found.values()))  # prompts of its own, as servers keep what earlier arms sent
            with bench.router(arm) as router:
                one = run(router, bench.instances, bench.requests, seed)
            found[arm].append(one)
            tell(f"{arm}: TTFT {one['ttft']:.3f} s, hits {one['hit_rate']:.1%}, others {one['others']:.2f} cores")
    return found


def run_cost(bench: Bench, arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """The CPU of each router."""
    found = {}
    for number, arm in enumerate(arms):
        with bench.router(arm) as router:
            found[arm] = measure_cost(router, bench.instances, 1000 * (number + 1))
        tell(f"{arm}: " + ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in found[arm].items()))
    return found


def run_with_reference(bench: Bench, part: str, seed: int) -> dict[str, Any]:
    """Failures or the router's death, and whether all answers were right."""
    with bench.router("kvcache_centric") as router:
        how = run_failures if part == "failures" else run_router_death
        found, answers = how(router, bench.instances, bench.requests, seed)
        model = model_of(router)
    url = bench.instances[0].process.url
    expected = reference(url, bench.requests, seed, model)
    found["wrong"] = wrong_answers(answers, bench.requests, expected)
    told = f"{len(bench.requests) - len(found['wrong'])} of {len(bench.requests)} right"
    tell(f"{part}: {told}, {found['retried']} asked again, longest gap {found['longest_gap']:.2f} s")
    return found


def save(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, help="JSON lines with hash_ids, such as Mooncake's, or `agents`: made-up sessions"
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=36.0, help="from the first arrival to the last")
    parser.add_argument("--rounds", type=int, default=2, help="of all policies and routers")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--arms", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--repeats", type=int, default=3, help="of each step while a profile is measured")
    parser.add_argument("--longest", type=int, default=16_000, help="tokens of the longest prompt")
    parser.add_argument("--logs", type=Path, help="folder for what all processes write")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.trace == Path("agents"):
        requests = agent_sessions(options.requests, options.seconds)
    else:
        requests = scaled_trace(options.trace, options.requests, options.seconds, longest=options.longest)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.logs or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tell("measures a server's steps ...")
        measure(folder, options.repeats)
        instances = make_instances(folder)
        bench = Bench(instances, requests, folder)
        cores = {each.name: each.process.core for each in instances}
        prediction = Prediction(requests, {each.name: each.role for each in instances}, cores, folder)
        missing = [arm for arm in options.arms if arm in PEERS and peer_router(arm, instances, folder) is None]
        arms = [arm for arm in options.arms if arm not in missing]
        for arm in missing:
            tell(f"{arm} is left out: it is not installed (make .venv/installed-routers)")
        found: dict[str, Any] = {"requests": len(requests), "seconds": options.seconds, "reusable": reusable(requests)}
        with started(instances):
            if "policies" in options.parts:
                found["policies"] = run_policies(bench, options.rounds, arms)
            for seed, part in enumerate(PARTS[1:3]):
                if part in options.parts:
                    found[part] = run_with_reference(bench, part, seed)
            if "cost" in options.parts:
                found["cost"] = run_cost(bench, arms)
        save(found, options.json)
        for arm in set(found.get("policies", {})) & set(OURS):
            for one in found["policies"][arm]:
                one["simulated"] = prediction.beside(arm, one)
    save(found, options.json)
    print(tables(found))
    return 1 if any(found.get(part, {}).get("wrong") for part in PARTS[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())

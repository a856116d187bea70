"""Main program of a process in `test_processes`: `process_main.py SCENARIO COORDINATOR PROCESSES ID JSON`."""

import functools
import json
import sys
import time
from typing import Any

import jax
import numpy as np

from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup, describe_mesh, initialize, make_process_mesh
from longctx.serving.kv_cache.tiers.config import TierConfig


def make_engine(group: ProcessGroup, options: dict[str, Any], tokenizer: Any = None, **more: Any) -> tuple[Engine, Any]:
    from dense_oracle import LENGTH, Oracle, make_model

    plan = ParallelPlan(**options["plan"])
    oracle = Oracle(make_model(plan.stage, 8, 2, 48))
    config = {"page_size": 8, "num_pages": 24, "token_budget": 16, "buckets": (16,), "max_length": LENGTH}
    config |= {"chunking": "static"}
    config |= {"max_running": 6} | options.get("config", {}) | more
    settings = EngineConfig(**config)
    return Engine(oracle.model, oracle.params, settings, None, tokenizer, plan=plan, process_group=group), oracle


def workload(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Run random requests, sessions and cancels, and compare every token with the dense oracle's."""
    engine, oracle = make_engine(group, options)
    if not group.is_first:
        engine.follow()
        print(json.dumps({"steps": engine.stats().steps}))
        return
    from workload import Workload

    print(describe_mesh(engine.mesh, group), file=sys.stderr)
    # Processes share cores here, so compiling all shapes would take minutes: "cold" compiles those that come up.
    if options.get("cold"):
        engine.executor.compile = engine.executor.warm_up = lambda *_: None  # type: ignore[method-assign]
    Workload(engine, options["seed"], oracle.expected_tokens, prime=oracle.prime).run(options["events"])
    print(json.dumps({"steps": engine.stats().steps}))


def embeds(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Pool prompts beside others that generate, and compare with a dense computation."""
    engine, oracle = make_engine(group, options)
    if not group.is_first:
        engine.follow()
        return
    random, size = np.random.default_rng(0), oracle.model.config.hidden_size
    prompts = [random.integers(0, 50, length).tolist() for length in (3, 45, 30, 61)]
    generating = SamplingParams(max_tokens=9, ignore_eos=True)
    params = [generating, *(SamplingParams(max_tokens=1, pooling=x) for x in ("mean", "last", "mean"))]  # type: ignore[arg-type]
    outputs = engine.generate(prompts, params)
    assert outputs[0].token_ids == oracle.expected_tokens(prompts[0], generating)
    for prompt, sampling, output in zip(prompts[1:], params[1:], outputs[1:], strict=True):
        hidden = oracle.model(oracle.params | {"lm_head": np.eye(size, dtype=np.float32)}, np.array(prompt))
        expected = np.mean(hidden, 0) if sampling.pooling == "mean" else np.asarray(hidden)[-1]
        assert output.embedding is not None
        np.testing.assert_allclose(output.embedding, expected, atol=1e-4)


def masks(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Complete prompts under masks of tokens beside others without, and compare with an engine of one device."""
    from test_token_masks import PERSON, Letters

    from longctx.serving.request.grammar import from_choices, from_json_schema, from_regex

    engine, oracle = make_engine(group, options, tokenizer=Letters())
    if not group.is_first:
        engine.follow()
        return
    alone = Engine(oracle.model, oracle.params, engine.config, tokenizer=Letters(), plan=ParallelPlan())
    random = np.random.default_rng(options["seed"])
    prompts = [random.integers(0, 50, length).tolist() for length in (3, 45, 30, 61, 17, 24, 5, 38)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=40, grammar=from_json_schema(PERSON)),
        SamplingParams(max_tokens=20, grammar=from_regex("[a-c]{3,9}x")),
        SamplingParams(max_tokens=9, allowed_token_ids=[3, 5, 8]),
        SamplingParams(max_tokens=12, min_tokens=9, bad_words=["ab", "c"]),
        SamplingParams(max_tokens=40, grammar=from_json_schema(PERSON), temperature=1.0, seed=5, n=2),
        SamplingParams(max_tokens=8, grammar=from_choices(["yes", "no"]), logprobs=2),
        SamplingParams(max_tokens=14, temperature=0.7, seed=3, top_k=9),
    ]
    for output, expected in zip(engine.generate(prompts, params), alone.generate(prompts, params), strict=True):
        assert output.token_ids == expected.token_ids, (output.request_id, output.token_ids, expected.token_ids)


def tiers(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Ask about documents again that the devices have forgotten; print how many tokens of them were loaded."""
    tier_config = TierConfig(host_bytes=1 << 20, disk_bytes=1 << 20, disk=options["disk"])
    engine, oracle = make_engine(group, options, tiers=tier_config, hash_key=bytes(16))
    store: Any = engine.pages.store
    if not group.is_first:
        engine.follow()
        print(json.dumps({"hits": store.stats.host.hits + store.stats.disk.hits, "part": store.part}))
        return
    random, params, loaded = np.random.default_rng(0), SamplingParams(max_tokens=4, ignore_eos=True), 0
    documents = [random.integers(0, 50, 60).tolist() for _ in range(5)]
    for number in range(12):
        prompts = [[*documents[(number + i) % 5], *random.integers(0, 50, 5).tolist()] for i in range(2)]
        for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
            assert output.token_ids == oracle.expected_tokens(prompt, params), (number, prompt)
            loaded += output.metrics.loaded_tokens
        while engine.has_work:
            engine.step()
        engine.scheduler.loads.seconds_per_page = None
    print(json.dumps({"loaded": loaded, "part": store.part}))


def moves(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Move requests from this engine to one of the first process alone, and back; print what each process has moved."""
    from longctx.cluster.engine_messenger import EngineMessenger

    engine, oracle = make_engine(group, options, transfers=True, hash_key=bytes(16))
    messenger = EngineMessenger(engine, "127.0.0.1", 0, "s" * 40)
    if group.is_first:
        import test_moving_engines

        def forget(*engines: Engine) -> None:
            """What earlier requests left, in all processes."""
            for each in engines:
                each.pages.evict("device", lambda key: True)

        test_moving_engines.forget = forget
        other = Engine(oracle.model, oracle.params, engine.config, plan=ParallelPlan())
        alone = EngineMessenger(other, "127.0.0.1", 0, "s" * 40)
        ours, theirs = ([each.sender.address, *each.followers] for each in (messenger, alone))
        random, loaded = np.random.default_rng(options.get("seed", 0)), []
        for number, (count, is_out) in enumerate((count, is_out) for count in (1, 7) for is_out in (True, False)):
            first, second, source = (engine, other, alone) if is_out else (other, engine, messenger)
            sampling = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.5 * (number % 2), seed=number)
            prompts = [random.integers(0, 50, length).tolist() for length in (45, 21, 30)]
            requests = [Request(prompt, sampling, f"{number}/{i}") for i, prompt in enumerate(prompts)]
            get = functools.partial(source.source, ours if is_out else theirs)
            outputs = test_moving_engines.move(first, second, requests, count, get)
            for request, prompt in zip(requests, prompts, strict=True):
                [output] = outputs[str(request.request_id)]
                assert output.token_ids == oracle.expected_tokens(prompt, sampling), (number, request.request_id)
            loaded.append(sum(output.metrics.loaded_tokens for [output] in outputs.values()))
            until = time.monotonic() + 10
            while (engine.core.leases or other.core.leases) and time.monotonic() < until:
                engine.step()
                other.step()
            assert engine.core.pool.num_held == other.core.pool.num_held == 0
        alone.close()
        found: dict[str, Any] = {"loaded": loaded}
    else:
        engine.follow(messenger)
        found = {"leases": len(engine.core.leases), "held": engine.core.pool.num_held}
    messenger.close()
    sent, received = messenger.sender.stats, messenger.receiver.stats
    moved = {"sent": sent.bytes, "received": received.bytes, "ends": received.outcomes}
    print(json.dumps(found | moved))


def forever(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Generate until the process is ended; print "running" after the first `events` events of a workload."""
    engine, oracle = make_engine(group, options)
    if not group.is_first:
        engine.follow()
        return
    if "events" in options:
        from workload import Workload

        workload = Workload(engine, 0, oracle.expected_tokens, prime=oracle.prime)
        workload.act(options["events"])
        while engine.has_work:  # without `finish`, which would empty the cache in this process only
            workload.step()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.generate(Request([1, 2, 3], params))
    print("running", flush=True)
    while not options.get("idle"):
        engine.generate(Request([1, 2, 3], params))
    time.sleep(1000)


def breaks(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Raise an error in one process, or let it stand still."""
    engine, _ = make_engine(group, options)
    if group.process_id == options["who"]:
        wait, count = engine.executor.wait, iter(range(1000))

        def fail(pending: Any) -> Any:
            if next(count) == 5:
                if options.get("stand_still"):
                    time.sleep(1000)
                raise RuntimeError("the roof is on fire")
            return wait(pending)

        engine.executor.wait = fail  # type: ignore[method-assign]
    if not group.is_first:
        engine.follow()
        return
    engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=60, ignore_eos=True))


def contradicts(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Give the processes different configurations."""
    more = options["more"][group.process_id]
    make_engine(group, options, **more)


def reads(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Load a checkpoint; print how many bytes this process reads, how many its devices hold, and its size."""
    from longctx.models import checkpoint_fingerprint, load_checkpoint
    from longctx.models.builtin import TINY
    from longctx.models.safetensors_reader import SafetensorsReader

    counted, read = [], SafetensorsReader.read

    def count(self: SafetensorsReader, *arguments: Any) -> Any:
        counted.append(read(self, *arguments))
        return counted[-1]

    SafetensorsReader.read = count  # type: ignore[method-assign]
    plan = ParallelPlan(**options["plan"])
    mesh = make_process_mesh(group, plan.stage, plan.context, plan.tensor)
    group.agree("checkpoint", checkpoint_fingerprint(TINY))
    model, params = load_checkpoint(TINY, mesh, ffn=plan.ffn)
    here = 0
    for leaf in jax.tree.leaves(params):
        here += sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    config = EngineConfig(token_budget=16, buckets=(16,), max_running=2)
    engine = Engine(model, params, config, mesh, plan=plan, process_group=group)
    if group.is_first:
        engine.generate([[1, 2, 3]])
    else:
        engine.follow()
    print(json.dumps({"read": sum(x.nbytes for x in counted), "here": here, "whole": whole}))


def main() -> int:
    scenario, coordinator, processes, process, text = sys.argv[1:]
    options = json.loads(text)
    plan = ParallelPlan(**options["plan"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", plan.num_devices // int(processes))
    timeouts = {"failure_timeout": options.get("failure_timeout", 30), "join_timeout": options.get("join_timeout", 60)}
    with initialize(coordinator, int(processes), int(process), **timeouts) as group:
        globals()[scenario](group, options)
    if group.is_first:
        time.sleep(options.get("afterwards", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())

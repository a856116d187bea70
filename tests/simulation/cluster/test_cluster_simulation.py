"""Simulated clusters: every request ends once, runs are deterministic, pages move as arithmetic says."""

import dataclasses
from typing import Any

import pytest
from cluster_cases import (
    PAGE,
    PREDICTOR,
    TOKEN_BYTES,
    check_each_once,
    coupled,
    decode,
    prefill,
    serve,
    two_and_two,
    workload,
)

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.simulation import Instance, Simulation
from longctx.simulation.cluster import ClusterSettings
from longctx.simulation.workloads import WorkloadRequest


@pytest.mark.parametrize("policy", ["random", "least_loaded", "cache_aware", "kvcache_centric"])
def test_every_request_is_served_once_and_whole(policy: object) -> None:
    requests = workload(80)
    for instances in (two_and_two(), [coupled("a"), coupled("b")]):
        record = serve(instances, requests, policy=policy)
        check_each_once(record, requests)
        assert len(record.served) == len(requests)
        assert record.hit_rate > 0


def test_two_runs_are_the_same() -> None:
    requests = workload(60)
    first, second = (serve(two_and_two(), requests, policy="random") for _ in range(2))
    assert first.served == second.served
    assert first.moved == second.moved
    assert first.loads == second.loads
    assert (
        serve(two_and_two(), requests, policy="random", seed=0).served
        != serve(two_and_two(), requests, policy="least_loaded").served
    )


def test_a_prompt_is_read_where_it_was_assigned_and_its_pages_move_once() -> None:
    requests = workload(50)
    record = serve(two_and_two(), requests)
    pages = {each.number: each for each in record.moved if each.kind == "pages"}
    lengths = {each.number: each for each in requests}
    for served, placed in zip(record.served, record.placed, strict=True):
        if lengths[served.number].output_tokens == 1:
            continue
        moved = pages.pop(served.number)
        assert (moved.source, moved.target) == (placed.assignment.prefill, placed.assignment.decode)
        assert moved.num_bytes == pytest.approx(lengths[served.number].prompt_tokens * TOKEN_BYTES)
        assert moved.ended - moved.exposed <= served.metrics.first_token + 1e-9
    assert not pages


@pytest.mark.parametrize("overlap", ["layer", "chunk", "end"])
def test_pages_that_leave_late_are_waited_for(overlap: str) -> None:
    # Prompts of two chunks; a chunk takes long enough to hide what leaves before it ends.
    bandwidth = 10e9
    instances = [prefill("p", bandwidth=bandwidth), decode("d")]
    request = WorkloadRequest(0.0, 1000, 10, number=7)
    record = serve(instances, [request], settings=ClusterSettings(overlap=overlap))  # type: ignore[arg-type]
    (moved,) = record.moved
    layers, last_chunk = 32, 1000 - 512
    late = {"layer": last_chunk / layers, "chunk": last_chunk, "end": 1000}[overlap]
    assert moved.exposed == pytest.approx(late * TOKEN_BYTES / bandwidth)
    assert moved.num_bytes == pytest.approx(1000 * TOKEN_BYTES)


def test_where_a_request_decodes_its_first_token_is_drawn_as_longctx_servers_do() -> None:
    # 1,000 tokens are 15 full pages of 64 tokens, which come; the other 40 are computed there, once all have come.
    settings = ClusterSettings(first_token="decode", overlap="end", call_seconds=0.01)
    request = WorkloadRequest(0.0, 1000, 10, number=7)
    instances = [prefill("p", bandwidth=1e9), decode("d")]
    record = serve(instances, [request], settings=settings)
    (moved,), (served,) = record.moved, record.served
    assert moved.num_bytes == 15 * PAGE * TOKEN_BYTES
    assert moved.exposed == pytest.approx(moved.num_bytes / 1e9)
    loading, tail = moved.num_bytes / instances[1].host_bandwidth, PREDICTOR.prefill_seconds(960, 1000, 512)
    assert served.ttft == pytest.approx(moved.ended + loading + tail, abs=2e-3)
    assert served.metrics.output_tokens == 10
    rows = {each.name: each.totals.rows for each in record.instances}
    assert rows == {"p": 1000, "d": 40 + 9}


def test_a_request_whose_prompt_is_read_elsewhere_takes_no_slot_where_it_decodes() -> None:
    """There is one slot, and a request which comes later, and whose prompt is short, has it meanwhile (3, step 4)."""
    long, short = WorkloadRequest(0.0, 20_000, 5, number=0), WorkloadRequest(0.1, 300, 5, number=1)
    settings = ClusterSettings(first_token="decode", overlap="chunk")
    instances = [prefill("p0"), prefill("p1"), decode("d", config={"max_running": 1})]
    record = serve(instances, [long, short], settings=settings, policy="least_loaded", admission="baseline")
    served = {each.number: each for each in record.served}
    assert served[1].metrics.finished < served[0].metrics.first_token
    moved = {each.number: each for each in record.moved if each.kind == "pages"}
    # The pages of the long one's 312 full pages are loaded from the host's memory when it joins a batch.
    full = 20_000 // PAGE * PAGE
    loading = full * TOKEN_BYTES / instances[2].host_bandwidth
    tail = PREDICTOR.prefill_seconds(full, 20_000, 512)
    assert served[0].ttft == pytest.approx(moved[0].ended + loading + tail, abs=3e-3)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
def test_short_prompts_are_read_where_they_decode_if_that_keeps_the_slo(first_token: Any) -> None:
    settings, requests = ClusterSettings(first_token=first_token), workload(60)
    record = serve(two_and_two(), requests, settings=settings, is_inline=True)
    check_each_once(record, requests)
    inline = {
        each.number
        for each, placed in zip(record.served, record.placed, strict=True)
        if placed.assignment.prefill == placed.assignment.decode
    }
    of_number = {each.number: each for each in requests}
    assert 0 < len(inline) < len(requests)
    assert max(of_number[number].prompt_tokens for number in inline) <= 512  # not in chunks
    assert not inline & {each.number for each in record.moved}
    assert max(each.tpot or 0.0 for each in record.served) <= 0.1


def test_calls_take_their_time() -> None:
    request = WorkloadRequest(0.0, 100, 10)
    quick, slow = (
        serve(two_and_two(), [request], settings=ClusterSettings(call_seconds=seconds)) for seconds in (0.0, 0.2)
    )
    assert slow.served[0].ttft == pytest.approx(quick.served[0].ttft + 2 * 0.2)  # the one that decodes asks the other


def test_cold_blocks_are_dropped_before_memory_is_full() -> None:
    def prompt(number: int) -> WorkloadRequest:
        blocks = tuple(100 * number + i for i in range(30))
        return WorkloadRequest(5.0 * number, 30 * PAGE, 2, blocks, PAGE, number)

    requests = [prompt(number) for number in range(8)]
    kept = {}
    for swaps in (False, True):
        config = ConductorConfig(admission="none", swap_above=0.5, swap_below=0.3, swap_seconds=1.0)
        instances, conductor = [prefill("p", host_pages=100), decode("d")], Conductor(config, PrefixIndex())
        simulation = Simulation(instances, conductor, ClusterSettings(swaps=swaps))
        simulation.run(requests)
        kept[swaps] = conductor.index.blocks("p", "host")
    assert kept[False] == 100
    assert kept[True] <= 50


def test_transfers_share_the_card_of_their_sender() -> None:
    # All of the pages of two prompts leave at once, at the end, from one instance.
    bandwidth = 1e9
    whole = {"token_budget": 2048, "chunking": "static"}
    instances = [prefill("p", bandwidth=bandwidth, config=whole), decode("d0"), decode("d1")]
    requests = [WorkloadRequest(0.0, 1000, 10, number=number) for number in range(2)]
    record = serve(instances, requests, settings=ClusterSettings(overlap="end"))
    alone = 1000 * TOKEN_BYTES / bandwidth
    assert [each.exposed for each in record.moved] == pytest.approx([2 * alone] * 2)


def test_a_prefix_is_fetched_from_where_it_is_and_stays_there() -> None:
    blocks = tuple(range(40))
    first = WorkloadRequest(0.0, 40 * PAGE, 5, blocks, PAGE, 0)
    again = [WorkloadRequest(5.0 + number * 1e-3, 40 * PAGE, 5, blocks, PAGE, 1 + number) for number in range(8)]
    latency = 0.01
    instances = [prefill("p0", latency=latency), prefill("p1", latency=latency), decode("d")]
    record = serve(instances, [first, *again])
    (moved,) = [each for each in record.moved if each.kind == "prefix"]
    assert {moved.source, moved.target} == {"p0", "p1"}
    assert moved.num_bytes == 39 * PAGE * TOKEN_BYTES  # the last page is computed, for its token
    alone = moved.num_bytes / 100e9  # the sender's own prompts leave over the same card
    assert alone + latency <= moved.ended - moved.begun <= 3 * alone + latency
    used = {each.assignment.prefill for each in record.placed}
    assert used == {"p0", "p1"}
    assert sum(each.metrics.cached_tokens for each in record.served) == 8 * 39 * PAGE


def test_host_memory_finds_what_devices_have_evicted() -> None:
    def prompt(number: int, topic: int) -> WorkloadRequest:
        return WorkloadRequest(number * 10.0, 20 * PAGE, 2, tuple(100 * topic + i for i in range(20)), PAGE, number)

    requests = [prompt(number, topic) for number, topic in enumerate([0, 1, 2, 3, 0])]
    small = {"num_pages": 30}
    kept = serve([prefill("p", config=small), decode("d")], requests)
    assert kept.served[-1].metrics.loaded_tokens == 19 * PAGE
    lost = serve([prefill("p", host_pages=0, config=small), decode("d")], requests)
    assert lost.served[-1].metrics.cached_tokens == 0
    assert lost.served[-1].ttft > kept.served[-1].ttft


def test_the_conductor_knows_what_caches_hold() -> None:
    # Predicted hits are real ones, where events take no time.
    requests = workload(60, rate=2.0)
    record = serve(two_and_two(), requests)
    for served, placed in zip(record.served, record.placed, strict=True):
        assert served.metrics.cached_tokens == placed.assignment.cached


def test_late_events_hide_what_caches_hold() -> None:
    blocks = tuple(range(20))
    requests = [WorkloadRequest(at, 20 * PAGE, 2, blocks, PAGE, i) for i, at in enumerate([0.0, 5.0, 20.0])]
    record = serve([prefill("p"), decode("d")], requests, settings=ClusterSettings(event_seconds=8.0))
    assert [each.assignment.cached for each in record.placed] == [0, 0, 19 * PAGE]
    assert [each.metrics.cached_tokens for each in record.served] == [0, 19 * PAGE, 19 * PAGE]


def test_a_coupled_instance_needs_no_network() -> None:
    requests = workload(30)
    record = serve([coupled("a"), coupled("b")], requests, policy="cache_aware")
    assert not record.moved


def test_one_at_a_time_is_slower_and_even() -> None:
    requests = workload(30, rate=20.0)
    batched = serve([coupled("a")], requests)
    alone = serve([coupled("a", config={"max_running": 1})], requests)
    check_each_once(alone, requests)
    assert alone.seconds > batched.seconds
    assert max(each.tbt or 0.0 for each in alone.placed) < max(each.tbt or 0.0 for each in batched.placed)


def test_follow_ups_come_after_the_request_they_follow() -> None:
    first = WorkloadRequest(0.0, 100, 10, number=0)
    second = WorkloadRequest(0.0, 200, 10, number=1, after=0, delay=3.0)
    record = serve(two_and_two(), [first, second])
    one, two = record.served
    assert two.due == pytest.approx(one.metrics.finished + 3.0)


def test_a_window_leaves_requests_open() -> None:
    requests = workload(40)
    simulation = Simulation(two_and_two(), Conductor(ConductorConfig(admission="none"), PrefixIndex()))
    record = simulation.run(requests, until=3.0)
    assert record.seconds == 3.0
    assert record.open
    come = [each for each in requests if each.arrival <= 3.0]
    check_each_once(record, come)
    stopped = simulation.run(requests, progress=lambda record: len(record.served) >= 5)
    assert len(stopped.served) == 5


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        serve([prefill("p"), decode("p")], workload(1))
    with pytest.raises(ValueError, match="pages of one size"):
        serve([prefill("p"), decode("d", config={"page_size": 32})], workload(1))
    with pytest.raises(ValueError, match=r"requests\[0\] .* \(p\)"):
        serve([prefill("p", config={"num_pages": 3}), decode("d")], [WorkloadRequest(0.0, 1000, 10)])
    with pytest.raises(ValueError, match="must arrive at"):
        serve(two_and_two(), [WorkloadRequest(1.0, 10, 1), WorkloadRequest(0.5, 10, 1)])
    with pytest.raises(ValueError, match="overlap"):
        ClusterSettings(overlap="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth"):
        dataclasses.replace(prefill("p"), bandwidth=0.0)


def test_one_coupled_instance_serves_as_it_does_without_a_cluster() -> None:
    requests = workload(60, rate=8.0)
    spec = coupled("a")
    alone = Simulation([Instance(spec.model, spec.config, spec.predictor, spec.plan)]).run(requests, keep_steps=False)
    record = serve([spec], requests)
    assert [(each.number, each.ttft, each.tpot) for each in record.served] == [
        (each.number, each.ttft, each.tpot) for each in alone.served
    ]
    assert record.totals.rows == alone.totals.rows
    assert record.totals.busy == pytest.approx(alone.totals.busy)


def test_a_prompt_whose_pages_are_where_it_decodes_is_read_by_nobody_else() -> None:
    # The conductor does not know it yet, and the prefill instance is busy.
    blocks = tuple(range(30))
    decoding = dataclasses.replace(prefill("d"), role="decode")
    first = WorkloadRequest(0.0, 30 * PAGE + 1, 3, blocks, PAGE, 0)
    long, again = WorkloadRequest(2.0, 20_000, 3, number=1), WorkloadRequest(2.01, 30 * PAGE + 1, 3, blocks, PAGE, 2)
    settings = ClusterSettings(first_token="decode", event_seconds=30.0)
    record = serve([prefill("p"), decoding], [first, long, again], settings=settings, policy="random")
    served = {each.number: each for each in record.served}
    assert served[2].metrics.finished < served[1].metrics.first_token
    rows = {each.name: each.totals.rows for each in record.instances}
    assert rows["p"] == 30 * PAGE + 1 + 20_000

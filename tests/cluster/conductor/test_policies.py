"""Where requests are placed: algorithm 1 by hand, the other policies, and one's own."""

from typing import Any

import numpy as np
import pytest
from conductor_parts import BLOCK, RoundCosts, cluster, instance, keys_of, request

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.policy import Choice, cache_aware
from longctx.cluster.conductor.request import Assignment, Rejection, Transfer


def assigned(conductor: Conductor, *args: Any, **fields: Any) -> Assignment:
    decision = conductor.assign(*args, **fields)
    assert isinstance(decision, Assignment)
    return decision


def two_prefills(**settings: Any) -> Conductor:
    """Two prefill instances and one that decodes; nobody has a queue or a block."""
    parts = (instance("p0"), instance("p1"), instance("d0", "decode"))
    return cluster(*parts, **{"admission": "none"} | settings)


def store(conductor: Conductor, name: str, *parts: tuple[int, int]) -> None:
    conductor.index.store(name, "device", keys_of(*parts))


def busy(conductor: Conductor, name: str, seconds: float) -> None:
    """Give an instance a prompt of so many seconds."""
    others = {each for each in conductor.state.instances if each != name and each[0] == "p"}
    tokens = round(seconds * 1000)
    long = request(f"busy-{name}", rest=tokens)
    assert assigned(conductor, long, 0.0, exclude=others).prefill == name


def test_ttft_is_queue_plus_transfer_plus_prefill() -> None:
    """A millisecond a token, 10 us to send one."""
    conductor = two_prefills()
    busy(conductor, "p0", 2.0)
    busy(conductor, "p1", 1.0)
    store(conductor, "p0", (1, 20))
    found = assigned(conductor, request("a", (1, 20), (2, 5)), 0.0)
    assert found.prefill == "p1"
    assert found.transfer == Transfer("p0", 0, 20 * BLOCK)
    assert found.cached == 20 * BLOCK
    assert (found.queue, found.transfer_seconds, found.prefill_seconds) == pytest.approx((1.0, 0.02, 0.55))
    assert found.ttft == pytest.approx(1.57)


def test_prompt_goes_to_its_prefix_while_the_queue_there_is_shorter_than_a_transfer() -> None:
    conductor = two_prefills()
    store(conductor, "p1", (1, 20))
    found = assigned(conductor, request("a", (1, 20)), 0.0)
    assert (found.prefill, found.transfer, found.cached) == ("p1", None, 2000)
    assert found.ttft == pytest.approx(0.05)


@pytest.mark.parametrize(("local", "fetches"), [(6, False), (5, True), (4, True), (0, True)])
def test_prefix_is_fetched_where_it_is_longer_by_the_threshold_or_more(local: int, fetches: bool) -> None:
    """Algorithm 1: `best / local < threshold` computes; an infinite ratio, where nothing is local, fetches."""
    conductor = two_prefills(balancing_threshold=4.0)
    busy(conductor, "p0", 100.0)
    store(conductor, "p0", (1, 20))
    store(conductor, "p1", (1, local))
    found = assigned(conductor, request("a", (1, 20), (2, 5)), 0.0)
    assert found.prefill == "p1"
    if fetches:
        assert found.transfer == Transfer("p0", local * BLOCK, 2000)
        assert (found.cached, found.prefill_seconds) == (2000, pytest.approx(0.55))
        assert found.transfer_seconds == pytest.approx((2000 - local * BLOCK) * 1e-5)
    else:
        assert (found.transfer, found.cached) == (None, local * BLOCK)
        assert found.prefill_seconds == pytest.approx((2550 - local * BLOCK) / 1000)


def test_nothing_is_fetched_where_nobody_has_anything() -> None:
    found = assigned(two_prefills(), request("a", (1, 20)), 0.0)
    assert (found.transfer, found.cached, found.ttft) == (None, 0, pytest.approx(2.05))


def test_fetched_prefix_is_a_replica_for_the_next_request() -> None:
    """Hot-spot replication: both instances have it after the transfer, so the third request fetches nothing."""
    conductor = two_prefills()
    store(conductor, "p0", (1, 20))
    busy(conductor, "p0", 1.0)
    assert assigned(conductor, request("a", (1, 20), (2, 5)), 0.0).transfer is not None
    found = assigned(conductor, request("b", (1, 20), (3, 5)), 0.0)
    assert (found.prefill, found.transfer, found.cached) == ("p1", None, 2000)


def test_blocks_of_assigned_prompts_count_at_once() -> None:
    conductor = two_prefills()
    assert assigned(conductor, request("other", (9, 5)), 0.0).prefill == "p0"
    assert assigned(conductor, request("a", (1, 20)), 0.0).prefill == "p1"
    second = assigned(conductor, request("b", (1, 20), (2, 3)), 0.0)
    assert (second.prefill, second.cached, second.transfer) == ("p1", 2000, None)
    for name in ("a", "b"):
        conductor.cancelled(name, 0.0)
    assert assigned(conductor, request("c", (1, 20)), 0.0).cached == 0


def test_blocks_that_are_not_computed_yet_are_not_sent() -> None:
    conductor = two_prefills()
    assert assigned(conductor, request("a", (1, 20)), 0.0).prefill == "p0"
    second = assigned(conductor, request("b", (1, 20), (2, 3)), 0.0)
    # What "a" computes is there after 2.05 s: to fetch it now for 0.02 s would be a prediction of 0.37 s.
    assert (second.prefill, second.cached, second.transfer, second.ttft) == ("p1", 0, None, pytest.approx(2.35))
    store(conductor, "p0", (1, 20))
    conductor.first_token("a", 2.1)
    third = assigned(conductor, request("c", (1, 20), (3, 90)), 2.1)
    assert (third.prefill, third.cached) == ("p0", 2000)


def test_senders_that_are_congested_take_longer() -> None:
    """What a sender has to send goes before; so the prompt that could be fetched is computed in the end."""
    slow = {"bandwidth": 2_000_000.0}  # 2,000 tokens a second, twice what computing does
    parts = [instance("p0", **slow), *(instance(f"p{i}") for i in range(1, 4)), instance("d0", "decode")]
    conductor = cluster(*parts, admission="none")
    store(conductor, "p0", (1, 20))
    busy(conductor, "p0", 100.0)
    seconds = []
    for i in range(3):
        found = assigned(
            conductor, request(f"{i}", (1, 20), (10 + i, 5)), 0.0, exclude={f"p{j}" for j in range(1, i + 1)}
        )
        assert found.transfer is not None
        seconds.append(found.transfer_seconds)
    assert seconds[:2] == pytest.approx([1.0, 2.0])


def test_latency_of_the_sender_counts() -> None:
    conductor = cluster(instance("p0", latency=0.5), instance("p1"), instance("d0", "decode"), admission="none")
    store(conductor, "p0", (1, 20))
    busy(conductor, "p0", 100.0)
    assert assigned(conductor, request("a", (1, 20)), 0.0).transfer_seconds == pytest.approx(0.52)


def test_last_token_of_a_prompt_is_computed_even_if_all_blocks_are_cached() -> None:
    conductor = two_prefills()
    store(conductor, "p0", (1, 20))
    found = assigned(conductor, request("a", (1, 20), rest=0), 0.0)
    assert (found.cached, found.prefill_seconds) == (1900, pytest.approx(0.1))


def test_cache_aware_never_fetches() -> None:
    conductor = two_prefills(policy="cache_aware")
    store(conductor, "p0", (1, 20))
    busy(conductor, "p0", 1.0)
    found = assigned(conductor, request("a", (1, 20)), 0.0)
    assert (found.prefill, found.transfer, found.ttft) == ("p0", None, pytest.approx(1.05))
    assert assigned(conductor, request("b", (1, 20)), 0.0).prefill == "p0"


def test_least_loaded_ignores_caches() -> None:
    conductor = two_prefills(policy="least_loaded")
    store(conductor, "p0", (1, 20))
    busy(conductor, "p0", 0.001)
    found = assigned(conductor, request("a", (1, 20)), 0.0)
    assert (found.prefill, found.cached) == ("p1", 0)


def test_least_loaded_takes_turns_while_nobody_has_a_queue() -> None:
    conductor = two_prefills(policy="least_loaded")
    names = []
    for i in range(4):
        names.append(assigned(conductor, request(str(i)), float(i)).prefill)
        conductor.first_token(str(i), i + 0.5)
    assert names == ["p0", "p1", "p0", "p1"]


def test_random_uses_all_and_depends_on_seed_and_request_only() -> None:
    def names(seed: int, rejected: int = 0) -> list[str]:
        conductor = cluster(
            *(instance(f"p{i}") for i in range(4)), instance("d0", "decode"), policy="random", seed=seed
        )
        for i in range(rejected):
            assert isinstance(conductor.assign(request(f"x{i}", ttft=1e-9), 0.0), Rejection)
        return [assigned(conductor, request(str(i)), float(i)).prefill for i in range(40)]

    assert set(names(0)) == {"p0", "p1", "p2", "p3"}
    assert names(0) == names(0, rejected=7)
    assert names(0) != names(1)


def test_ones_own_policy_is_called_and_checked() -> None:
    def last(request: Any, matches: Any, pool: Any, now: float, context: Any) -> Choice:
        assert matches == {"p0": 20}
        return cache_aware(request, matches, pool[-1:], now, context)

    conductor = two_prefills(policy=last)
    store(conductor, "p0", (1, 20))
    assert assigned(conductor, request("a", (1, 20)), 0.0).prefill == "p1"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("d0", 0, None, 0.0, 0.0, 1.0), "one of"),
        (Choice("p1", 50, None, 0.0, 0.0, 1.0), "blocks of 100"),
        (Choice("p1", 9900, None, 0.0, 0.0, 1.0), "below the prompt"),
        (Choice("p1", 0, None, float("nan"), 0.0, 1.0), "finite seconds"),
        (Choice("p1", 100, Transfer("p1", 0, 100), 0.0, 0.0, 1.0), "another instance"),
        (Choice("p1", 100, Transfer("p0", 100, 100), 0.0, 0.0, 1.0), "blocks up to the cached"),
    ],
)
def test_what_ones_own_policy_can_not_choose(choice: Choice, message: str) -> None:
    conductor = two_prefills(policy=lambda *_: choice)
    with pytest.raises(ValueError, match=message):
        conductor.assign(request("a", (1, 3)), 0.0)
    assert conductor.state.find("a") is None
    assert all(not each.open_requests for each in conductor.instances(0.0))


def test_decode_goes_where_tbt_is_least() -> None:
    parts = (instance("p0"), instance("d0", "decode"), instance("d1", "decode", costs=RoundCosts(speed=2.0)))
    conductor = cluster(*parts, admission="none")
    found = [assigned(conductor, request(str(i)), 0.0) for i in range(6)]
    assert [each.decode for each in found] == ["d1", "d1", "d0", "d1", "d1", "d0"]
    assert found[0].tbt == pytest.approx((1 + 1 + 50 / 10_000) / 2000)
    assert found[1].tbt == pytest.approx((1 + 2 + 100 / 10_000) / 2000)


def test_decode_goes_where_memory_is_even_if_tbt_is_more() -> None:
    parts = (instance("p0"), instance("d0", "decode", decode_tokens=2000), instance("d1", "decode"))
    conductor = cluster(*parts, admission="none")
    slow = request("x", rest=5000)
    assert assigned(conductor, slow, 0.0).decode == "d1"  # 5,200 tokens don't fit on d0
    assert assigned(conductor, request("y", rest=1500), 0.0).decode == "d0"
    assert assigned(conductor, request("z", rest=1500), 0.0).decode == "d1"


def test_request_that_fits_nowhere_is_rejected_for_memory() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode", decode_tokens=2000), admission="none")
    too_long = conductor.assign(request("a", max_tokens=1951), 0.0)
    assert isinstance(too_long, Rejection)
    assert (too_long.bound, too_long.stage) == ("memory", "prefill")
    assert assigned(conductor, request("b", max_tokens=1950), 0.0).decode == "d0"
    assert isinstance(conductor.assign(request("c"), 0.0), Rejection)
    conductor.finished("b", 1.0)
    assert assigned(conductor, request("c"), 1.0).decode == "d0"


def test_slots_are_a_part_of_memory() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode", max_running=2), admission="none")
    decisions = [conductor.assign(request(str(i)), 0.0) for i in range(3)]
    assert isinstance(decisions[2], Rejection)
    assert decisions[2].bound == "memory"


def test_coupled_instances_decode_what_they_prefill() -> None:
    conductor = cluster(*(instance(f"c{i}", "both") for i in range(3)), admission="none")
    for i in range(6):
        found = assigned(conductor, request(str(i), (i % 3, 5)), 0.0)
        assert found.decode == found.prefill


def test_coupled_instance_without_memory_gets_nothing() -> None:
    conductor = cluster(instance("c0", "both", decode_tokens=100), instance("c1", "both"), admission="none")
    store(conductor, "c0", (1, 20))
    assert assigned(conductor, request("a", (1, 20)), 0.0).prefill == "c1"


def mixed(**settings: Any) -> Conductor:
    """An instance that prefills, one that does both and one that decodes; the first two have 20 blocks of a prompt."""
    parts = (instance("p"), instance("b", "both"), instance("d", "decode"))
    conductor = cluster(*parts, **{"admission": "none"} | settings)
    for name in "pb":
        store(conductor, name, (1, 20))
    return conductor


def test_splitting_pays_where_reading_and_sending_are_sooner_than_the_queue_of_what_does_both() -> None:
    found = assigned(mixed(), request("a", (1, 20)), 0.0)  # where it would be read as soon, but had to be sent
    assert (found.prefill, found.decode, found.transfer, found.ttft) == ("b", "b", None, pytest.approx(0.05))
    assert assigned(mixed(is_inline=False), request("a", (1, 20)), 0.0).prefill == "p"
    for queue, reads in ((10, "b"), (40, "p")):  # 2,050 tokens take 20.5 ms from one to the other
        conductor = mixed()
        busy = assigned(conductor, request("busy", (2, 0), rest=queue), 0.0, exclude="pd")
        assert busy.prefill == "b"
        found = assigned(conductor, request("a", (1, 20)), 0.0)
        assert (found.prefill, found.decode) == (reads, "b" if reads == "b" else "d")


def test_what_would_come_too_late_where_it_is_decoded_is_split() -> None:
    found = [
        assigned(late, request("a", (1, 20), ttft=ttft), 0.0)
        for ttft in (0.1, 0.055)
        for late in [mixed(admission="early_rejection")]
        if assigned(late, request("busy", (2, 0), rest=10), 0.0, exclude="pd").prefill == "b"
    ]
    assert [each.prefill for each in found] == ["b", "p"]  # in 60 ms, or in 50 ms and 20 ms for keys and values


def test_what_is_read_by_one_that_does_both_is_decoded_elsewhere_if_that_alone_keeps_the_slo() -> None:
    conductor = mixed(tpot=0.0035)  # a step of two decodes takes a little over 3 ms, of three over 4 ms
    first = [assigned(conductor, request(name, (1, 20)), 0.0, exclude="p") for name in "xy"]
    assert [each.decode for each in first] == ["b", "b"]
    third = assigned(conductor, request("z", (1, 20)), 0.0, exclude="p")
    assert (third.prefill, third.decode) == ("b", "d")


def test_config_is_checked() -> None:
    for settings, message in [
        ({"policy": "best"}, "policy must be one of random"),
        ({"admission": "never"}, "admission must be one of none"),
        ({"ttft": 0}, "ttft must be above 0"),
        ({"tpot": float("nan")}, "tpot must be above 0"),
        ({"balancing_threshold": 0.5}, "balancing_threshold"),
        ({"swap_below": 0.99}, "swap_below"),
        ({"seed": -1}, "seed"),
        ({"decode_seconds": 0}, "decode_seconds must be above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ConductorConfig(**settings)  # type: ignore[arg-type]


def test_more_keys_than_full_blocks_are_an_error() -> None:
    conductor = two_prefills()
    wrong = request("a", (1, 3), rest=50, prompt_tokens=299)
    with pytest.raises(ValueError, match="full blocks of 100 tokens: 2 at most, got 3"):
        conductor.assign(wrong, 0.0)
    assert np.array_equal(wrong.keys, keys_of((1, 3)))


def inline_pools(**settings: object) -> Conductor:
    """A prefill and a decode instance, whose step takes 2 ms and has room for 300 tokens of prompts."""
    costs = RoundCosts(step_tokens=300)
    return cluster(instance("p"), instance("d", "decode", costs=costs), admission="none", **settings)


def test_a_prompt_that_fits_into_a_step_within_the_slo_is_computed_where_it_decodes() -> None:
    conductor = inline_pools(tpot=0.32)
    first, second = (conductor.assign(request(name, (i, 2)), 0.0) for i, name in enumerate("ab"))
    assert (first.prefill, first.decode, first.cached, first.transfer) == ("d", "d", 0, None)
    assert (first.queue, first.ttft) == (0.0, pytest.approx(0.251))
    assert (second.prefill, second.decode) == ("p", "d")  # one prompt at a time
    conductor.prefilled("a", 0.3)
    assert conductor.assign(request("c", (3, 2)), 0.3).prefill == "d"
    assert conductor.assign(request("long", (4, 3)), 0.6).prefill == "p"  # it would have to be chunked
    for name in "abc":
        conductor.finished(name, 1.0)


def test_of_those_that_decode_the_one_that_has_most_of_a_prompt_reads_it() -> None:
    costs = RoundCosts(step_tokens=300)
    decodes = (instance(name, "decode", costs=costs) for name in ("d0", "d1"))
    conductor = cluster(instance("p"), *decodes, admission="none", tpot=0.32)
    store(conductor, "d1", (0, 1))
    found = assigned(conductor, request("a", (0, 2)), 0.0)
    assert (found.prefill, found.decode, found.cached) == ("d1", "d1", 100)


def test_a_prompt_is_not_inlined_where_it_breaks_the_slo_or_finds_no_memory() -> None:
    assert inline_pools(tpot=0.25).assign(request("r", (0, 2)), 0.0).prefill == "p"
    assert inline_pools(tpot=0.32).assign(request("r", (0, 2), tpot=0.25), 0.0).prefill == "p"
    assert inline_pools(tpot=0.32, is_inline=False).assign(request("r", (0, 2)), 0.0).prefill == "p"
    cached = inline_pools(tpot=0.06)  # the rest of a prompt counts
    cached.index.store("d", "device", keys_of((0, 2)))
    found = cached.assign(request("r", (0, 2)), 0.0)
    assert (found.prefill, found.cached) == ("d", 200)

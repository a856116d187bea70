"""Instances that join, drain, fail, come back and change roles while requests are open."""

from typing import Any

import pytest
from conductor_parts import RoundCosts, cluster, instance, keys_of, request

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.instance import InstanceSpec, Report
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection
from longctx.cluster.prefix_index.index import PrefixIndex


def test_nobody_there_is_a_rejection() -> None:
    conductor = cluster()
    found = conductor.assign(request("a"), 0.0)
    assert isinstance(found, Rejection)
    assert found.bound == "no_instance"
    conductor.join(instance("p0"), 0.0)
    assert isinstance(conductor.assign(request("a"), 0.0), Rejection)
    conductor.join(instance("d0", "decode"), 0.0)
    assert isinstance(conductor.assign(request("a"), 0.0), Assignment)


def test_draining_instance_gets_nothing_and_may_send_what_it_has() -> None:
    conductor = cluster(instance("p0"), instance("p1"), instance("d0", "decode"), admission="none")
    conductor.index.store("p0", "device", keys_of((1, 20)).tolist())
    conductor.drain("p0", 0.0)
    found = conductor.assign(request("a", (1, 20)), 0.0)
    assert isinstance(found, Assignment)
    assert found.prefill == "p1"
    assert found.transfer is not None
    assert found.transfer.source == "p0"
    conductor.drain("p0", 0.0, False)
    again = conductor.assign(request("b", (1, 20)), 0.0)
    assert isinstance(again, Assignment)
    assert again.prefill == "p0"


def test_draining_the_last_one_leaves_nobody() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode"), admission="none")
    conductor.assign(request("a"), 0.0)
    conductor.drain("d0", 0.0)
    found = conductor.assign(request("b"), 0.0)
    assert isinstance(found, Rejection)
    assert found.bound == "no_instance"
    assert conductor.instances(0.0)[1].open_requests == 1  # what it has goes on
    conductor.first_token("a", 1.0)
    conductor.finished("a", 1.0)
    assert conductor.instances(0.0)[1].open_requests == 0


def test_instances_that_decode_read_prompts_while_no_other_one_does() -> None:
    parts = [instance("p0"), instance("d0", "decode"), instance("d1", "decode")]
    conductor = cluster(*parts, admission="none", is_inline=False)
    conductor.index.store("d1", "device", keys_of((1, 20)).tolist())
    for gone in ("removed", "excluded", "draining"):
        if gone == "removed":
            conductor.remove("p0", 0.0)
        elif gone == "draining":
            conductor.drain("p0", 0.0)
        found = conductor.assign(request("a", (1, 20)), 0.0, exclude={"p0"} if gone == "excluded" else ())
        assert isinstance(found, Assignment)
        assert (found.prefill, found.decode, found.transfer) == ("d1", "d1", None)
        assert found.cached > 0
        other = conductor.assign(request("b", (2, 20)), 0.0, exclude={"d1"} | ({"p0"} if gone == "excluded" else set()))
        assert isinstance(other, Assignment)
        assert (other.prefill, other.decode) == ("d0", "d0")
        for name in "ab":
            conductor.cancelled(name, 0.0)
        if gone == "removed":
            conductor.join(parts[0], 0.0)
    conductor.drain("p0", 0.0, False)
    found = conductor.assign(request("c"), 0.0)
    assert isinstance(found, Assignment)
    assert found.prefill == "p0"  # it is back
    conductor.cancelled("c", 0.0)
    assert all(not each.open_requests for each in conductor.instances(0.0))


def test_requests_of_a_dead_instance_are_told_and_can_be_assigned_anew() -> None:
    parts = [instance("p0"), instance("p1"), instance("d0", "decode"), instance("d1", "decode")]
    conductor = cluster(*parts, admission="none")
    placed = {}
    for i in range(8):
        found = conductor.assign(request(str(i)), 0.0)
        assert isinstance(found, Assignment)
        placed[str(i)] = found
    for i in range(4):
        conductor.first_token(str(i), 1.0)
    lost = conductor.remove("p0", 1.0)
    # What p0 has computed has been sent: only prompts that it had not computed are lost.
    assert lost == [name for name, each in placed.items() if each.prefill == "p0" and int(name) >= 4]
    lost_decodes = conductor.remove("d0", 1.0)
    assert set(lost_decodes) == {name for name, each in placed.items() if each.decode == "d0"} - set(lost)
    for name in lost + lost_decodes:
        found = conductor.assign(request(name), 1.0, generated=5)
        assert isinstance(found, Assignment)
        assert (found.prefill, found.decode) == ("p1", "d1")
    for name in placed:
        conductor.finished(name, 2.0)
    assert all(each.open_requests == each.reserved_tokens == 0 for each in conductor.instances(2.0))


def test_what_a_dead_instance_held_is_forgotten_and_it_comes_back_empty() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode"), admission="none")
    conductor.index.store("p0", "device", keys_of((1, 20)).tolist())
    conductor.assign(request("b", (2, 20)), 0.0)
    conductor.remove("p0", 0.0)
    conductor.join(instance("p0"), 1.0)
    for parts in ((1, 20), (2, 20)):
        found = conductor.assign(request("a", parts), 1.0)
        assert isinstance(found, Assignment)
        assert found.cached == 0
        conductor.cancelled("a", 1.0)


def test_source_of_a_transfer_dies() -> None:
    """The prompt is computed where it was to be: its request stays open."""
    conductor = cluster(instance("p0"), instance("p1"), instance("d0", "decode"), admission="none")
    conductor.index.store("p0", "device", keys_of((1, 20)).tolist())
    conductor.assign(request("busy", rest=9000), 0.0, exclude={"p1"})
    found = conductor.assign(request("a", (1, 20)), 0.0)
    assert isinstance(found, Assignment)
    assert (found.prefill, found.transfer is not None) == ("p1", True)
    assert conductor.remove("p0", 0.0) == ["busy"]
    conductor.first_token("a", 1.0)
    conductor.finished("a", 1.0)
    assert all(not each.open_requests for each in conductor.instances(1.0))


def test_excluded_instance_sends_nothing_either() -> None:
    conductor = cluster(instance("p0"), instance("p1"), instance("d0", "decode"), admission="none")
    conductor.index.store("p0", "device", keys_of((1, 20)).tolist())
    found = conductor.assign(request("a", (1, 20)), 0.0, exclude={"p0"})
    assert isinstance(found, Assignment)
    assert (found.prefill, found.transfer, found.cached) == ("p1", None, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "llama-8b"}, "one fingerprint, got '' of 'p0' and 'llama-8b' of 'p1'"),
        ({"kv_dtype": "bfloat16"}, "one kv_dtype, got '' of 'p0' and 'bfloat16' of 'p1'"),
        ({"block_size": 64}, "one block_size, got 100 of 'p0' and 64 of 'p1'"),
        ({"name": "p0"}, "name must be of no other instance, got 'p0'"),
        ({"name": ""}, "name must not be empty"),
        ({"role": "router"}, "role must be one of prefill, decode, both, got 'router'"),
        ({"bandwidth": 0.0}, "bandwidth must be above 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be above 0"),
        ({"max_running": 0}, "max_running"),
        ({"decode_tokens": -1}, "decode_tokens"),
        ({"decode_tokens": 10**400}, "decode_tokens"),
        ({"max_running": 10**400}, "max_running"),
        ({"cache_blocks": (1, 2)}, "cache_blocks must be of device, host, disk"),
        ({"costs": RoundCosts(speed=float("nan"))}, "prefill_seconds of 100 tokens must be finite"),
        ({"costs": RoundCosts(speed=-1.0)}, "prefill_seconds of 100 tokens must be finite"),
    ],
)
def test_instances_that_may_not_join(changes: dict[str, Any], message: str) -> None:
    conductor = cluster(instance("p0"))
    fields = {"name": "p1", "role": "prefill"} | changes
    with pytest.raises(ValueError, match=message):
        conductor.join(instance(**fields), 0.0)
    assert [each.name for each in conductor.instances(0.0)] == ["p0"]


def test_names_that_are_not_there_are_named() -> None:
    conductor = cluster(instance("p0"))
    for call in (conductor.drain, conductor.remove):
        with pytest.raises(ValueError, match="no instance 'p1'"):
            call("p1", 0.0)
    with pytest.raises(ValueError, match="no instance 'p1'"):
        conductor.report("p1", Report(0.0, 0, 0), 0.0)
    with pytest.raises(ValueError, match="no instance 'p1'"):
        conductor.set_role("p1", "decode", 0.0)
    with pytest.raises(ValueError, match="role must be one of"):
        conductor.set_role("p0", "idle", 0.0)  # type: ignore[arg-type]


def test_role_changes_for_what_comes_and_what_is_there_goes_on() -> None:
    conductor = cluster(instance("p0"), instance("p1"), instance("d0", "decode"), admission="none")
    conductor.assign(request("a"), 0.0, exclude={"p0"})
    conductor.set_role("p1", "decode", 0.0)
    found = conductor.assign(request("b"), 0.0, exclude={"d0"})
    assert isinstance(found, Assignment)
    assert (found.prefill, found.decode) == ("p0", "p1")
    conductor.first_token("a", 1.0)
    conductor.set_role("p1", "prefill", 1.0)
    for name in ("a", "b"):
        conductor.finished(name, 2.0)
    assert all(each.open_requests == each.reserved_tokens == 0 for each in conductor.instances(2.0))


def test_id_of_an_open_request_can_not_be_assigned_twice() -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode"))
    conductor.assign(request("a"), 0.0)
    with pytest.raises(ValueError, match="no open request, got 'a'"):
        conductor.assign(request("a"), 0.0)


def full(name: str, **fields: Any) -> InstanceSpec:
    return instance(name, cache_blocks=(100, 0, 0), **fields)


def test_cold_blocks_leave_a_full_instance_replicas_first() -> None:
    conductor = cluster(full("p0"), full("p1"), swap_above=0.9, swap_below=0.5, swap_seconds=60.0)
    index = conductor.index
    cold, replica, warm = keys_of((1, 40)), keys_of((2, 30)), keys_of((3, 25))
    index.store("p0", "device", [*cold, *replica, *warm])
    index.store("p1", "device", replica)
    index.touch(cold, 10.0)
    index.touch(replica, 20.0)
    index.touch(warm, 50.0)
    swaps = conductor.swaps(100.0)
    assert [(each.instance, each.tier) for each in swaps] == [("p0", "device")]
    assert set(replica.tolist()) < set(swaps[0].keys.tolist()) < {*replica.tolist(), *cold.tolist()}
    assert len(swaps[0].keys) == 45  # of 95; and p1 is not full


def test_last_replica_stays_when_both_holders_are_full() -> None:
    conductor = cluster(full("p0"), full("p1"), swap_above=0.9, swap_below=0.5)
    index = conductor.index
    for name in ("p0", "p1"):
        index.store(name, "device", keys_of((1, 95)))
    swaps = conductor.swaps(1000.0)
    assert [len(each.keys) for each in swaps] == [45, 45]
    assert not set(swaps[0].keys.tolist()) & set(swaps[1].keys.tolist())


def test_nothing_is_swapped_where_there_is_room_or_nobody_knows() -> None:
    conductor = cluster(full("p0"), instance("p1"), swap_above=0.9)
    index = conductor.index
    index.store("p0", "device", keys_of((1, 90)))
    index.store("p1", "device", keys_of((1, 1000)))
    assert conductor.swaps(1000.0) == []


@pytest.mark.parametrize("what", ["decoding", "decode_tokens"])
def test_a_report_that_no_float_holds_changes_nothing(what: str) -> None:
    conductor = cluster(instance("p0"), instance("d0", "decode"))
    with pytest.raises(ValueError, match=what):
        conductor.report("d0", Report(0.0, 1, 1)._replace(**{what: 10**400}), 0.0)
    assert isinstance(conductor.assign(request("a"), 0.0), Assignment)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"priority": 10**400}, ValueError, "priority"),
        ({"priority": "high"}, TypeError, "priority"),
        ({"ttft": "1"}, TypeError, "ttft"),
        ({"tpot": float("nan")}, ValueError, "tpot"),
        ({"ttft": 0.0}, ValueError, "ttft must be seconds"),
        ({"keys": [1, 2]}, TypeError, "keys must be uint64"),
    ],
)
def test_requests_out_of_range_are_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ClusterRequest(**{"request_id": "a", "prompt_tokens": 10, "max_tokens": 1, "keys": keys_of()} | fields)


@pytest.mark.parametrize("now", [float("nan"), float("inf"), -1.0, 2.0**32])
def test_a_time_that_is_none_changes_nothing(now: float) -> None:
    conductor = Conductor(ConductorConfig(), PrefixIndex())
    for spec in (instance("p0"), instance("d0", "decode")):
        conductor.join(spec, 0.0)
    conductor.index.store("p0", "device", keys_of((1, 20)).tolist())
    with pytest.raises(ValueError, match="now must be"):
        conductor.assign(request("a", (1, 20)), now)
    assert [each.open_requests for each in conductor.instances(0.0)] == [0, 0]
    assert isinstance(conductor.assign(request("a", (1, 20)), 1.0), Assignment)

"""Instances that die, hang, drain, come back or lie, while clients read."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from disaggregated import body, post
from routed import TEXT, Door, Liar, Routed, members_of, routed
from served import Served

from longctx.cluster.launcher.launcher import Address

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": 2, "frequency_penalty": 0.5},
]


def sent_of(number: int, salt: str, **more: Any) -> dict[str, Any]:
    options = {"prompt": f"{number} {TEXT * 4}"} | OPTIONS[number] | more
    return body(**{"max_tokens": 100, "cache_salt": salt} | options)


Found = dict[int, tuple[str, str, list[int]]]


def choices(answers: Any, on_first: Callable[[], object] = lambda: None) -> Found:
    """Text, reason and tokens of each choice of an answer or of chunks."""
    found: Found = {}
    for answer in answers:
        assert "error" not in answer, answer
        for choice in answer["choices"]:
            text, reason, tokens = found.get(choice["index"], ("", "", []))
            tokens = tokens + choice["token_ids"]
            found[choice["index"]] = text + choice["text"], choice["finish_reason"] or reason, tokens
        if len(found) and all(len(tokens) >= 3 for _, _, tokens in found.values()):
            on_first()
            on_first = lambda: None  # noqa: E731
    return found


def chunks(url: str, sent: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.stream("POST", f"{url}/v1/completions", json=sent | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [""]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield msgspec.json.decode(line[6:])
            if line:
                lines.append(line)
        assert lines[-1] == "data: [DONE]"


def expected_of(instance: Served, number: int, **more: Any) -> Found:
    return choices([post(instance, sent_of(number, "alone", **more)).json()])


@pytest.fixture(scope="module")
def expected(three: list[Served]) -> list[Found]:
    return [expected_of(three[0], number) for number in range(len(OPTIONS))]


def busiest(router: Routed) -> str:
    """The instance from which most is read."""
    return max(router.server.instances, key=lambda each: len(each.followers)).name


def test_streams_go_on_elsewhere_when_instances_die(three: list[Served], expected: list[Found]) -> None:
    doors = [Door(each) for each in three]
    begun = threading.Barrier(len(OPTIONS) + 1, timeout=60)
    with routed(members_of(doors, "bbb")) as router:
        with ThreadPoolExecutor(2 * len(OPTIONS)) as pool:
            streams = [
                pool.submit(lambda i=i: choices(chunks(router.url, sent_of(i, "stream")), begun.wait))
                for i in range(len(OPTIONS))
            ]
            whole = [
                pool.submit(lambda i=i: httpx.post(f"{router.url}/v1/completions", json=sent_of(i, "w"), timeout=60))
                for i in range(len(OPTIONS))
            ]
            begun.wait()
            doors[0].kill()
            router.wait_state("b0", "dead", 5)
            doors[1].kill()
            router.wait_state("b1", "dead", 5)
            doors[0].revive()
            for future, there in zip(streams, expected, strict=True):
                assert future.result(60) == there
            for answer, there in zip(whole, expected, strict=True):
                assert answer.result(60).status_code == 200
                assert choices([answer.result().json()]) == there
        assert router.server.cluster.stats.retries > 0
        router.wait_state("b0", "open")  # it comes back by itself
        answer = router.client().post("/v1/completions", json=sent_of(0, "again"))
        assert choices([answer.json()]) == expected[0]
        router.wait_idle()
        reasons = router.instances()["b1"]
        assert reasons["state"] == "dead"
        assert "does not answer" in reasons["reason"]
        doors[0].kill()
        doors[2].kill()
    for each in three:
        each.wait_idle()


def test_a_drained_instance_ends_what_it_has(three: list[Served], expected: list[Found]) -> None:
    with routed(members_of(three[:2])) as router, router.client() as client:

        def drain() -> None:
            name = drained.append(busiest(router)) or drained[0]
            assert client.post("/cluster/drain", json={"name": name}).json()["state"] == "draining"

        drained: list[str] = []
        assert choices(chunks(router.url, sent_of(1, "drained")), drain) == expected[1]
        assert router.server.cluster.stats.retries == 0
        other = next(name for name in ("b0", "b1") if name not in drained)
        for _ in range(3):
            assert client.post("/v1/completions", json=body(max_tokens=2)).status_code == 200
        taken = router.server.cluster.stats.assignments
        assert taken[other, other] >= 3
        assert client.post("/cluster/restore", json={"name": drained[0]}).json()["state"] == "open"
        router.wait_idle()


def events(*tokens: int, reason: str | None = "length", **more: Any) -> bytes:
    """Event lines of a completion."""
    lines = [[0, [token], "x", [], None] for token in tokens]
    if reason is not None:
        lines[-1][-1] = [reason, None, None, 0]
    return b"\n" + b"".join(msgspec.json.encode([line]) + b"\n" for line in lines)


IMPOSSIBLE = [
    ([b"\n<html>\n"], "events are none"),
    ([b'\n{"a": 1}\n'], "events are none"),
    ([events(100_000)], "not in the vocabulary"),
    ([events(3, 4, 5)], "by length"),
    ([events(*range(13))], "more than the 12 tokens"),
    ([b'\n[[7, [1], "x", [], null]]\n'], "not of this request"),
    ([b'\n[[0, [], "much text", [], null]]\n'], "text without tokens"),
]


def test_who_sends_what_cannot_be_is_excluded(three: list[Served]) -> None:
    real = three[0]
    there = post(real, body()).json()["choices"][0]
    with Liar(real) as liar, routed([Address("liar", "both", liar.url)]) as router, router.client() as client:
        for lines, reason in IMPOSSIBLE:
            liar.lines = lines
            client.post("/cluster/restore", json={"name": "liar"})
            router.wait_state("liar", "open")
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(lambda: router.client().post("/v1/completions", json=body()))
                router.wait_state("liar", "excluded")
                assert reason in router.instances()["liar"]["reason"]
                # The request waits for somebody else.
                router.register(real.url, "real")
                answer = asked.result(30)
            assert answer.status_code == 200, answer.text
            found = answer.json()["choices"][0]
            assert len(found["token_ids"]) == len(there["token_ids"])
            if "length" not in reason and "more" not in reason:  # there the first tokens could have been true
                assert (found["token_ids"], found["text"]) == (there["token_ids"], there["text"])
            router.wait_idle()
            client.post("/cluster/remove", json={"name": "real"})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (events(1, 2, 3, reason=None), "does not repeat"),
        (b'\n[[0, [], "", [], ["stop", null, null, 0]]]\n', "before it has repeated"),
    ],
)
def test_who_does_not_repeat_what_it_was_given_is_excluded(
    three: list[Served], expected: list[Found], line: bytes, reason: str
) -> None:
    door = Door(three[0])
    with Liar(three[1]) as liar, routed([Address("real", "both", door.url)]) as router, router.client():
        liar.lines = [line]

        def fail() -> None:
            router.register(liar.url, "liar")
            router.wait_state("liar", "open")
            door.kill()
            router.wait_state("liar", "excluded")
            door.revive()

        assert choices(chunks(router.url, sent_of(0, reason)), fail) == expected[0]
        assert reason in router.instances()["liar"]["reason"]
        given = liar.asked[0]["kv_transfer_params"]["handoff"]["completions"][0]["tokens"]
        assert given == expected[0][0][2][: len(given)]
        assert len(given) >= 3
        router.wait_idle()
        door.kill()


def test_no_token_before_what_cannot_be_is_lost(three: list[Served]) -> None:
    """A line whose second event can't be: the first one's token is the client's, and is not sent again."""
    sent = body(n=2, temperature=1.0, seed=3, max_tokens=8)
    there = choices([post(three[0], sent).json()])
    text, _, tokens = there[0]
    with Liar(three[0]) as liar, routed([Address("liar", "both", liar.url)]) as router, router.client():
        first, second = [0, tokens[:1], text[:1], [], None], [1, [100_000], "x", [], None]
        liar.lines = [b"\n" + msgspec.json.encode([first, second]) + b"\n"]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: choices(chunks(router.url, sent)))
            router.wait_state("liar", "excluded")
            router.register(three[0].url, "real")
            assert asked.result(30) == there
        router.wait_idle()


ODD: list[tuple[dict[str, Any], str]] = [
    ({"/server_info": {"kv_transfer": {"fingerprint": "another", "kv_dtype": "float32"}}}, "one fingerprint"),
    (
        {"/server_info": {"kv_transfer": {"fingerprint": "another", "kv_dtype": "float8_e4m3fn"}}},
        "one kv_dtype, got 'float32' of ",
    ),
    ({"/server_info": {"keys": "another"}}, "another secret"),
    ({"/server_info": {"page_size": 32}}, "pages have 32 tokens"),
    ({"/server_info": {"vocab_size": 3}}, "3 tokens"),
    ({"/server_info": {"time": 0.0}}, "clock"),
    ({"/server_info": {"max_model_len": 100}}, "longest sequence has 100 tokens"),
    ({"/server_info": {"max_running": "many"}}, "can't be"),
    ({"/server_info": b"[]"}, "can't be"),
    ({"/predictor": {"predictor": {"kind": "Oracle"}}}, "predictor"),
    ({"/predictor": {"prompt_factor": -1}}, "predictor"),
    ({"/load": {"backlog_seconds": -1.0}}, "queue_seconds"),
    ({"/load": {"decoding": 10_000}}, "10000 requests"),
    ({"/load": {"request_ids": 3}}, "can't be"),
    ({"/load": b"\xff"}, "can't be"),
]


def test_instances_that_cannot_be_do_not_join(cluster: Routed, three: list[Served]) -> None:
    with Liar(three[1]) as liar, cluster.client() as client:
        liar.said = ODD[0][0]
        cluster.register(liar.url, "odd")
        odd = cluster.server.instances.by_name["odd"]
        for said, reason in ODD:
            liar.said = said
            client.post("/cluster/restore", json={"name": "odd"})
            cluster.wait_until(reason, lambda reason=reason: odd.state == "excluded" and reason in odd.reason)
        assert client.post("/v1/completions", json=body(max_tokens=2)).status_code == 200  # the others go on
        liar.said = {}
        client.post("/cluster/restore", json={"name": "odd"})
        cluster.wait_state("odd", "open")
        liar.said = {"/load": {"decoding": 10_000}}  # a member is watched, too
        cluster.wait_state("odd", "excluded")
        assert client.post("/cluster/remove", json={"url": liar.url}).status_code == 200
        assert "odd" not in cluster.instances()


@pytest.fixture(scope="module")
def cluster(three: list[Served]) -> Any:
    with routed(members_of(three[:1])) as running:
        yield running


def test_one_that_compiles_says_so(cluster: Routed, three: list[Served]) -> None:
    with Liar(three[1]) as liar, cluster.client() as client:
        liar.said, liar.ready = {"/ready": {"status": "the server is not ready yet"}}, 503
        cluster.register(liar.url, "slow")
        cluster.wait_until(
            "it was asked", lambda: cluster.instances()["slow"]["reason"] == "the server is not ready yet"
        )
        assert cluster.instances()["slow"]["state"] == "joining"
        liar.ready = 200
        cluster.wait_state("slow", "open")
        client.post("/cluster/remove", json={"name": "slow"})


def test_one_that_hangs_is_noticed(three: list[Served], expected: list[Found]) -> None:
    door = Door(three[0])
    with routed([Address("hangs", "both", door.url)]) as router, router.client():

        def hang() -> None:
            door.stall(True)
            router.register(three[1].url, "other")

        since = time.monotonic()
        assert choices(chunks(router.url, sent_of(0, "hung")), hang) == expected[0]
        assert time.monotonic() - since < 30
        assert router.server.instances.by_name["hangs"].state == "dead"
        door.stall(False)
        router.wait_idle()
        door.kill()


def test_an_instance_by_two_addresses_is_one(three: list[Served]) -> None:
    """Its memory would count twice."""
    with routed(members_of(three[:1])) as router:
        known = router.register(Door(three[0]).url, "twin")
        assert known.status_code == 200
        router.wait_state("twin", "excluded", 10)
        assert "it is b0 by another address" in router.instances()["twin"]["reason"]
        assert router.client().post("/v1/completions", json=body(max_tokens=2)).status_code == 200

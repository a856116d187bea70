"""Streams whose router or connection is lost: clients go on with them at another router, from the event they had."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import httpx
import msgspec
import pytest
from disaggregated import NAME, body
from hypothesis import given, settings
from hypothesis import strategies as st
from link_proxy import LinkProxy
from routed import TEXT, Routed, members_of, routed
from served import Served

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2},
    {"n": 2, "stream_options": {"include_usage": True}},
    {"prompt": [TEXT * 2, "abc " + TEXT], "temperature": 1.0},
]
SALTS = map(str, itertools.count())


class Read(NamedTuple):
    """Events that a client has read, with their ids."""

    events: list[tuple[str, dict[str, Any]]]
    is_whole: bool

    @property
    def last(self) -> str:
        return self.events[-1][0]


def sent_of(number: int = 0, **more: Any) -> dict[str, Any]:
    options = OPTIONS[number]
    asked = {"max_tokens": 30, "stream": True} | options | more
    asked["stream_options"] = options.get("stream_options", {}) | {"resumable": True}
    return body(**{"prompt": f"{number} {TEXT * 4}"} | asked)


def read(
    url: str, sent: dict[str, Any], last: str | None = None, most: int | None = None, path: str = "completions"
) -> Read:
    """Read a stream, or the rest of one, and leave after `most` events."""
    headers = {} if last is None else {"last-event-id": last}
    events, name = list[tuple[str, dict[str, Any]]](), ""
    with httpx.stream("POST", f"{url}/v1/{path}", json=sent, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        if most == 0:
            return Read(events, False)
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return Read(events, True)
            if line.startswith("id: "):
                name = line[4:]
            elif line.startswith("data: "):
                events.append((name, msgspec.json.decode(line[6:])))
                if len(events) == most:
                    return Read(events, False)
    return Read(events, False)


@pytest.fixture(scope="module")
def pair(three: list[Served]) -> Iterator[tuple[Routed, Routed]]:
    """Two routers over the same instances."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(routed(members_of(three, "pdd"))) for _ in range(2))  # type: ignore[misc]


@pytest.fixture
def ended(three: list[Served]) -> Iterator[list[str]]:
    """Why each completion ended at an instance."""
    reasons: list[str] = []
    note = lambda output, request: reasons.append(output.finish_reason)  # noqa: E731
    for each in three:
        each.server.thread.on_end.append(note)
    yield reasons
    for each in three:
        each.server.thread.on_end.remove(note)


def kept(instances: list[Served]) -> list[str | None]:
    return [name for each in instances for name in each.server.kept.names]


def release(instances: list[Served]) -> None:
    """Have all kept streams dropped, and wait until nothing is left of them."""
    for each in instances:
        streams = each.server.kept
        most, streams.max_bytes = streams.max_bytes, -1
        each.http_loop().call_soon_threadsafe(streams.note, 0)
        each.wait_until("no stream is kept", lambda streams=streams: not streams.names)
        streams.max_bytes = most
        each.wait_idle()


@settings(max_examples=15, deadline=None)
@given(number=st.integers(0, len(OPTIONS) - 1), cuts=st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_a_stream_goes_on_at_the_other_router(
    three: list[Served], pair: tuple[Routed, Routed], number: int, cuts: list[int]
) -> None:
    """Each event comes once, and the stream is that of one server alone, wherever it is cut and how often."""
    sent = sent_of(number, seed=11, cache_salt=next(SALTS))
    alone = read(three[0].url, sent)
    events, last, is_whole = list[tuple[str, dict[str, Any]]](), None, False
    for turn, most in enumerate([*cuts, None]):
        if is_whole:
            break
        found = read(pair[turn % 2].url, sent, last, most)
        events += found.events
        last, is_whole = events[-1][0] if events else None, found.is_whole
    assert is_whole
    assert texts(events) == texts(alone.events)
    assert len({name for name, _ in events}) == len(events) == len(alone.events)
    assert len({(each["id"], each["created"]) for _, each in events}) == 1
    release(three)
    for router in pair:
        router.wait_idle()


def texts(events: list[tuple[str, dict[str, Any]]]) -> dict[int, tuple[str, list[int], list[Any]]]:
    found: dict[int, tuple[str, list[int], list[Any]]] = {}
    for _, event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            text, tokens, ends = found.setdefault(choice["index"], ("", [], []))
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            found[choice["index"]] = text + choice["text"], tokens + choice["token_ids"], ends
    return found


def test_a_request_goes_on_while_no_router_reads_it(
    three: list[Served], pair: tuple[Routed, Routed], ended: list[str]
) -> None:
    """Its instance computes each token once, and the rest is there when a client comes back."""
    sent = sent_of(1, max_tokens=60, cache_salt=next(SALTS))
    first = read(pair[0].url, sent, most=3)
    pair[0].wait_idle()
    three[0].wait_until("the request has ended", lambda: ended.count("length") == 2)  # one read its prompt
    assert len(kept(three)) == 1
    rest = read(pair[1].url, sent, first.last)
    assert rest.is_whole
    assert len(first.events + rest.events) == 60
    assert read(pair[0].url, sent, rest.last) == Read([], True)  # all but the last line of the stream
    assert ended == ["length"] * 2
    release(three)
    sent |= {"seed": crc32(kept_name(first).encode()) % 2**31}
    assert texts(read(three[0].url, sent).events) == texts(first.events + rest.events)


def kept_name(read: Read) -> str:
    return read.last.split(".")[0] + "-0"


def test_what_no_instance_has_is_computed_again(
    three: list[Served], pair: tuple[Routed, Routed], ended: list[str]
) -> None:
    sent = sent_of(2, cache_salt=next(SALTS))
    alone = read(three[0].url, sent)
    first = read(pair[0].url, sent, most=7)
    release(three)
    rest = read(pair[1].url, sent, first.last)
    assert rest.is_whole
    assert texts(first.events + rest.events) == texts(alone.events)
    # An id of a stream with other tokens.
    name, created, body_sum, parts = first.last.split(".", 3)
    number, _, others = parts.partition("-")
    wrong = f"{name}.{created}.{body_sum}.{number}-1.{others.split('.', 1)[1]}"
    ((_, event),) = read(pair[1].url, sent, wrong).events[-1:]
    assert event["error"]["code"] == "stream_lost"
    assert "as a new one" in event["error"]["message"]
    release(three)


def test_the_newest_connection_has_the_stream(three: list[Served], pair: tuple[Routed, Routed]) -> None:
    """An older router does not ask another instance for the rest."""
    sent = sent_of(0, max_tokens=400, cache_salt=next(SALTS))
    with httpx.stream("POST", f"{pair[0].url}/v1/completions", json=sent, timeout=60) as answer:
        lines = answer.iter_lines()
        last = next(line for line in lines if line.startswith("id: "))[4:]
        rest = read(pair[1].url, sent, last)
        others = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest.is_whole
    assert len(rest.events) == 399
    assert others[-1]["error"]["code"] == "stream_resumed"
    assert pair[0].server.cluster.stats.retries == 0
    release(three)


def test_a_stream_is_kept_for_a_time(
    three: list[Served], pair: tuple[Routed, Routed], monkeypatch: pytest.MonkeyPatch, ended: list[str]
) -> None:
    for each in three:
        monkeypatch.setattr(each.server.kept, "seconds", 0.2)
    read(pair[0].url, sent_of(0, max_tokens=3000, cache_salt=next(SALTS)), most=3)
    for each in three:
        each.wait_until("no stream is kept", lambda each=each: not each.server.kept.names)
        each.wait_idle()
    assert "cancelled" in ended
    pair[0].wait_idle()


def test_streams_are_kept_within_a_bound_of_memory(
    three: list[Served], pair: tuple[Routed, Routed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too long goes on while its connection is there."""
    for each in three:
        monkeypatch.setattr(each.server.kept, "max_bytes", 500)
    sent = sent_of(0, max_tokens=60, cache_salt=next(SALTS))
    first = read(pair[0].url, sent)
    assert first.is_whole
    assert not kept(three)
    assert read(pair[1].url, sent, first.events[40][0]).events == first.events[41:]
    release(three)


@pytest.mark.parametrize(
    ("last", "more", "message"),
    [
        ("nonsense", {}, "must be the id of an event"),
        (None, {"prompt": "another"}, "needs the body"),
        (None, {"temperature": 0.5}, "needs the body"),
        (None, {"n": 2}, "needs the body"),
        (None, {"stream_options": {}}, "resumable: true"),
    ],
)
def test_wrong_ids_are_refused_by_name(
    three: list[Served], pair: tuple[Routed, Routed], last: str | None, more: dict[str, Any], message: str
) -> None:
    sent = sent_of(0, max_tokens=4, cache_salt=next(SALTS))
    last = last or read(pair[0].url, sent).last
    answer = pair[1].client().post("/v1/completions", json=sent | more, headers={"last-event-id": last})
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    release(three)


def test_the_official_client_resumes_a_chat(three: list[Served], pair: tuple[Routed, Routed]) -> None:
    """Its events have the id that chats begin with, and the usage comes once."""
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 20,
        "temperature": 0,  # a drawn text may have the end of an answer of a model without a template in it
        "stream": True,
        "stream_options": {"include_usage": True, "resumable": True},
    }

    def chunks(router: Routed, last: str, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
        headers = {"Last-Event-ID": last} if last else {}
        create = router.openai().chat.completions.with_streaming_response.create
        with create(**asked, extra_headers=headers, extra_body={"ignore_eos": True}) as answer:
            for line in answer.iter_lines():
                last = line[4:] if line.startswith("id: ") else last
                if line.startswith("data: {"):
                    yield last, msgspec.json.decode(line[6:])
                    most -= 1
                if not most:
                    return

    for cut in (1, 5, 22):
        begun = [*chunks(pair[0], "", cut)]
        events = [event for _, event in [*begun, *chunks(pair[1], begun[-1][0], -1)]]
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert len({each["id"] for each in events}) == 1
        assert [bool(each["usage"]) for each in events] == [False] * (len(events) - 1) + [True]
        assert events[-1]["usage"]["completion_tokens"] == 20
        assert [each["choices"][0]["finish_reason"] for each in events[:-1]][-1] == "length"
    release(three)


def test_the_example_of_the_docs_goes_on_at_the_next_router(three: list[Served], pair: tuple[Routed, Routed]) -> None:
    """The first one's connection is cut in the middle of the stream."""
    page = (Path(__file__).parents[3] / "docs/cluster.md").read_text()
    example = page.partition("```python not-run: needs two routers\n")[2].partition("\n\nbody = ")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    sent = sent_of(0, max_tokens=200, cache_salt=next(SALTS))
    link, events = LinkProxy(pair[0].url.partition("://")[2]), []
    for event in names["stream"]([f"http://{link.address}", pair[1].url], sent):
        events.append(("", event))
        if len(events) == 20:
            link.close()
    assert texts(events) == texts(read(three[0].url, sent).events)
    release(three)

"""Prefill and decode apart, over HTTP as routers drive it: answers are those of one server."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from disaggregated import (
    TEXT,
    apart,
    body,
    instance,
    make_engine,
    nothing_is_left,
    post,
    prefill,
    release_leases,
    resume,
    resumed,
    signed,
    streamed,
    tokens_of,
    transfers_of,
    until_decoding,
)
from served import Served

from longctx.serving.scheduler.slo import Slo


@pytest.fixture(scope="module")
def coupled() -> Iterator[Served]:
    with instance(make_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Served]:
    """Reads prompts over two stages."""
    with instance(make_engine(stage=2), "prefill") as server:
        yield server


@pytest.fixture(scope="module")
def wide() -> Iterator[Served]:
    """Goes on over two tensor ranks."""
    with instance(make_engine(tensor=2), "decode") as server:
        yield server


@pytest.fixture(autouse=True)
def all_ends(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    names = [name for name in ("coupled", "pipeline", "wide") if name in request.fixturenames]
    nothing_is_left(*(request.getfixturevalue(name) for name in names))


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "prompt logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 5, "echo": True},
    "n": {"temperature": 1.5, "seed": 3, "n": 3},
    "a stop string": {"stop": ["e"], "temperature": 2.0, "seed": 4, "max_tokens": 60},
    "its end": {"ignore_eos": False, "max_tokens": 60},
}


def alike(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same text, tokens and ends, and log probabilities up to rounding."""
    for one, other in zip(answer["choices"], expected["choices"], strict=True):
        for name in ("index", "text", "message", "token_ids", "finish_reason"):
            assert one.get(name) == other.get(name), name
        logprobs, others = one["logprobs"], other["logprobs"]
        assert (logprobs is None) == (others is None)
        if logprobs is not None:
            assert logprobs["tokens"] == others["tokens"]
            assert logprobs["text_offset"] == others["text_offset"]
            assert logprobs["token_logprobs"] == [x and pytest.approx(x, abs=1e-4) for x in others["token_logprobs"]]
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][name] == expected["usage"][name]


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_those_of_one_server(coupled: Served, pipeline: Served, wide: Served, name: str) -> None:
    sent = body(f"{name}. {TEXT}", **OPTIONS[name])
    loads = wide.server.engine.executor.mover.stats.loaded_pages
    alike(apart(pipeline, wide, sent), post(coupled, sent).json())
    assert wide.server.engine.executor.mover.stats.loaded_pages > loads


def test_streams_and_chats(coupled: Served, pipeline: Served, wide: Served) -> None:
    sent = body(f"A stream. {TEXT}", temperature=1.0, seed=2, max_tokens=20)
    whole = post(coupled, sent).json()["choices"][0]
    pieces = streamed(wide, sent | {"kv_transfer_params": prefill(pipeline, sent)})
    assert len(pieces) > 5
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "What is the pass key of lemon?"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
    alike(apart(pipeline, wide, chat, "chat/completions"), post(coupled, chat, "chat/completions").json())


def test_a_session_goes_on_where_it_was(coupled: Served, pipeline: Served, wide: Served) -> None:
    """Its second turn loads what is new, and no page that its first turn left."""
    mover = wide.server.engine.executor.mover
    turn = body(f"A session. {TEXT}", prompt_cache_key="one", max_tokens=24)
    first = apart(pipeline, wide, turn)
    alike(first, post(coupled, turn).json())
    loaded = mover.stats.loaded_pages
    prompt = [*first["choices"][0]["prompt_token_ids"], *first["choices"][0]["token_ids"], *range(60, 160)]
    turn = body(prompt, prompt_cache_key="one")
    second = apart(pipeline, wide, turn)
    alike(second, post(coupled, turn).json())
    assert (
        6 <= mover.stats.loaded_pages - loaded <= 8
    )  # of the 100 tokens that are new, and of a page that was not full
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 120


def test_several_go_on(coupled: Served, pipeline: Served, wide: Served) -> None:
    pairs = [(pipeline, wide), (pipeline, coupled)]
    requests = [body([i, *range(i, 180 + 9 * i)], temperature=1.0, seed=i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: apart(*pairs[i % 2], requests[i]), range(4)))
    for sent, answer in zip(requests, answers, strict=True):
        alike(answer, post(coupled, sent).json())


def test_what_a_role_does_not_do_is_refused(coupled: Served, pipeline: Served, wide: Served) -> None:
    sent = body()
    params = prefill(pipeline, sent)
    assert params["remote_host"] == "127.0.0.1"
    refused = post(pipeline, sent | {"kv_transfer_params": params})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
    refused = post(wide, sent | {"kv_transfer_params": {"do_remote_decode": True}})
    assert refused.status_code == 400
    for wrong in ({"handoff": None}, {"handoff": {"seed": 0}}):
        assert post(wide, sent | {"kv_transfer_params": params | wrong}).status_code == 400
    for wrong in ({"remote_host": "a b"}, {"remote_port": 0}):
        assert post(wide, sent | {"kv_transfer_params": signed(params | wrong)}).status_code == 400
    for host in ("192.0.2.7", "127.0.0.2", "0.0.0.0"):  # the whole of 127.0.0.0/8 is of this machine
        for where in ({"remote_host": host}, {"remote_followers": [f"{host}:7000"]}):
            refused = post(wide, sent | {"kv_transfer_params": signed(params | where)})
            assert (refused.status_code, "--kv-peer" in refused.json()["error"]["message"]) == (403, True)
    for wrong in (["127.0.0.1"], ["a b:1"], ["127.0.0.1:0"], [7], "127.0.0.1:7000"):
        assert (
            post(wide, sent | {"kv_transfer_params": signed(params | {"remote_followers": wrong})}).status_code == 400
        )
    # What is refused, or has no page to fetch, connects to nobody.
    before = set(transfers_of(wide).receiver.known)
    progress = {"lease": "0" * 32, "length": 0, "tokens": []}
    for port, completions in ((7, [progress] * 2), (8, [progress]), (9, [progress | {"length": 10**6}])):
        handoff = {"seed": 0, "completions": completions}
        post(wide, sent | {"kv_transfer_params": signed(params | {"remote_port": port, "handoff": handoff})})
    nothing_is_left(wide)
    assert transfers_of(wide).receiver.known == before
    alike(post(wide, sent | {"kv_transfer_params": params}).json(), post(coupled, sent).json())
    # Ordinary requests are served, whatever the role.
    for server in (pipeline, wide):
        alike(post(server, sent).json(), post(coupled, sent).json())


def test_clients_do_not_choose_where_the_server_connects(pipeline: Served, wide: Served) -> None:
    """With `do_remote_prefill` it connected to a port of its own host, and waited there."""
    sent = body()
    params = prefill(pipeline, sent)
    with socket.create_server(("127.0.0.1", 0)) as mine:
        mine.settimeout(0.5)
        port = mine.getsockname()[1]
        lease = {"lease": "0" * 32, "length": 8, "tokens": [5]}
        for wrong in (
            {"remote_port": port},
            {"remote_followers": [f"127.0.0.1:{port}"]},
            {"handoff": params["handoff"] | {"completions": [lease]}},
            {"signature": None},
            {"signature": "0" * 64},
        ):
            refused = post(wide, sent | {"kv_transfer_params": params | wrong})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_signed")
        with pytest.raises(TimeoutError):
            mine.accept()
    assert post(wide, sent | {"kv_transfer_params": params}).status_code == 200
    nothing_is_left(pipeline, wide)


def test_a_request_that_would_make_others_slow_goes_back(coupled: Served) -> None:
    with instance(make_engine(slo=Slo(tpot=1e-7)), "decode") as busy:
        sent, long = body(), body(max_tokens=3500, stream=True)
        apart(coupled, busy, body(f"They know each other. {TEXT}"))
        with httpx.stream("POST", f"{busy.url}/v1/completions", json=long, timeout=60):
            until_decoding(busy)
            params = prefill(coupled, sent)
            assert len(coupled.server.engine.core.leases) == 1
            refused = post(busy, sent | {"kv_transfer_params": params})
            assert (refused.status_code, refused.headers["x-llm-d-request-dropped-reason"]) == (503, "tpot")
            assert refused.headers["retry-after"] == "1"
            assert transfers_of(busy).num_refused == 1
            assert busy.server.metrics.refusals["tpot"] == 1
        nothing_is_left(coupled, busy)  # P's pages are given up
        # Whoever sent it takes another server, or the same one later.
        alike(post(busy, sent | {"kv_transfer_params": params}).json(), post(coupled, sent).json())
        nothing_is_left(busy)


def test_requests_that_are_refused_or_end_at_once_keep_no_lease(coupled: Served, wide: Served) -> None:
    """Where the servers are connected; else it expires, as nobody is connected to for that."""
    sent = body()
    apart(coupled, wide, body(f"They know each other. {TEXT}"))
    for more, status in (({"max_tokens": 1}, 200), ({"ttft_ms": 1e-3}, 429), ({"n": 2, "temperature": 1.0}, 400)):
        answer = post(wide, sent | {"kv_transfer_params": prefill(coupled, sent)} | more)
        assert answer.status_code == status, answer.text
        nothing_is_left(coupled, wide)


@pytest.mark.parametrize("lie", ["shorter", "a page shorter", "no lease", "another's lease"])
def test_a_peer_that_lies_about_what_it_has_costs_time_only(coupled: Served, wide: Served, lie: str) -> None:
    sent = body(f"{lie}! {TEXT}")
    params, other = prefill(coupled, sent), prefill(coupled, body("Another prompt. " * 20))
    [progress] = params["handoff"]["completions"]
    loaded = wide.server.engine.executor.mover.stats.loaded_pages
    full = progress["length"] // 16
    changes = {
        "shorter": {"length": progress["length"] - 3},
        "a page shorter": {"length": (full - 1) * 16},
        "no lease": {"lease": "0" * 32},
        "another's lease": {"lease": other["handoff"]["completions"][0]["lease"]},
    }
    progress |= changes[lie]
    alike(post(wide, sent | {"kv_transfer_params": signed(params)}).json(), post(coupled, sent).json())
    came = wide.server.engine.executor.mover.stats.loaded_pages - loaded
    assert came == (full - 1 if lie == "a page shorter" else 0)
    release_leases(coupled)


@pytest.mark.slow
def test_a_peer_of_another_model_is_refused(coupled: Served) -> None:
    sent = body()
    stranger = make_engine(dtype="bfloat16")
    with instance(stranger, "decode") as other:
        refused = post(other, sent | {"kv_transfer_params": prefill(coupled, sent)})
        assert refused.status_code == 409
        # Nor does it take pages that it has asked for.
        assert tokens_of(resume(other, resumed([(i * i) % 250 for i in range(200)], coupled.url)))
        assert transfers_of(other).receiver.stats.outcomes["refused"] == 1
        assert other.server.engine.executor.mover.stats.loaded_pages == 0
        nothing_is_left(other)
        release_leases(coupled)


@pytest.mark.slow
def test_a_peer_of_another_kv_dtype_is_refused(coupled: Served) -> None:
    """The answer names both, either way."""
    sent = body(f"Of another kind. {TEXT}")
    with instance(make_engine(kv_dtype="float8_e4m3fn")) as other:
        for one, another, theirs, own in (
            (coupled, other, "float32", "float8_e4m3fn"),
            (other, coupled, "float8_e4m3fn", "float32"),
        ):
            refused = post(another, sent | {"kv_transfer_params": prefill(one, sent)})
            assert refused.status_code == 409
            expected = f"its pages have kv_dtype {theirs}, those of this server {own}"
            assert expected in refused.json()["error"]["message"]
            release_leases(one)
        info, plain = (httpx.get(f"{each.url}/server_info").json() for each in (other, coupled))
        config = other.server.engine.model.config
        row = 2 * config.num_layers * config.num_kv_heads
        assert info["engine"]["kv_dtype"] == info["kv_transfer"]["kv_dtype"] == "float8_e4m3fn"
        assert (plain["engine"]["kv_dtype"], plain["kv_transfer"]["kv_dtype"]) == (None, "float32")
        assert info["kv_bytes_per_token"] == row * (config.head_dim + 4)
        assert plain["kv_bytes_per_token"] == row * config.head_dim * 4
        odd = {"kv_transfer_params": prefill(other, sent) | {"kv_dtype": 8}}
        assert post(other, sent | odd).status_code == 400
        release_leases(other)
        nothing_is_left(other)


@pytest.mark.slow
def test_servers_with_fp8_pages_answer_as_one() -> None:
    """A prompt that one reads over two stages, and another goes on with over two tensor ranks."""
    options: dict[str, Any] = {"kv_dtype": "float8_e4m3fn"}
    with (
        instance(make_engine(**options)) as whole,
        instance(make_engine(stage=2, **options), "prefill") as first,
        instance(make_engine(tensor=2, **options), "decode") as second,
    ):
        sent = body(f"In FP8. {TEXT}", logprobs=3, max_tokens=3)
        one, other = apart(first, second, sent), post(whole, sent).json()
        # The plans differ, so the last bits of keys do, and FP8 makes more of them: both say nearly the same of a token
        # as long as those before it are the same.
        tokens, logprobs = ([each["choices"][0][name] for each in (one, other)] for name in ("token_ids", "logprobs"))
        same = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), len(tokens[0]))
        assert same
        one_found, other_found = (each["token_logprobs"][:same] for each in logprobs)
        assert one_found == pytest.approx(other_found, abs=1.0)
        assert second.server.engine.executor.mover.stats.loaded_pages > 0
        nothing_is_left(whole, first, second)


def test_pages_go_by_mooncake(coupled: Served) -> None:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        pytest.skip(str(error))
    both = {"messenger": "mooncake-tcp"}
    with instance(make_engine(), **both) as one, instance(make_engine(), **both) as other:
        sent = body(f"Mooncake. {TEXT}", temperature=1.0, seed=1)
        alike(apart(one, other, sent), post(coupled, sent).json())
        assert transfers_of(other).receiver.stats.outcomes["complete"] == 1
        assert other.server.engine.executor.mover.stats.short_loads == 0
        nothing_is_left(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [((2, 1, 2), (1, 4, 1)), ((1, 2, 2), (2, 2, 1)), ((4, 1, 1), (1, 2, 2))])
def test_any_meshes(coupled: Served, one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    with instance(make_engine(*one), "prefill") as first, instance(make_engine(*other), "decode") as second:
        for name, options in OPTIONS.items():
            sent = body(f"{name}? {TEXT}", **options)
            alike(apart(first, second, sent), post(coupled, sent).json())
        assert second.server.engine.executor.mover.stats.short_loads == 0
        nothing_is_left(first, second)

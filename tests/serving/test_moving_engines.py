"""Requests that move between engines on devices, of different plans: tokens are those of an engine by itself."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dense_oracle import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from near_outputs import LOGPROBS, check_near
from test_handoff import beginning, note, run
from tiered_engines import ONE, PAGE_SIZE, RANKS, STAGES, expected, make_engine, page_bits

from longctx.cluster.transfer.lease import LeaseGone
from longctx.cluster.transfer.local import LocalReceiver
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender
from longctx.models.validation import FP8_KV
from longctx.serving import Engine, Output, Request, SamplingParams
from longctx.serving.kv_cache.connector import PageRead
from longctx.serving.kv_cache.leases import LeasedPages
from longctx.serving.request.handoff import Handoff

NUMBERS = itertools.count()
OPTIONS = TransferOptions(block_bytes=1 << 11, read_bytes=1 << 12, silence_timeout=2.0, deadline=20.0)
SAMPLING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logprobs": 2, "temperature": 1.0, "seed": 5, "top_k": 20},
    {"prompt_logprobs": 1},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"logit_bias": ((3, 4.0), (9, -8.0)), "min_p": 0.05, "temperature": 0.7, "seed": 1},
]
"""What goes along with a request; a stop string comes besides."""


class Pair:
    """Two engines, the pages of whose leases either one gets from the other one."""

    def __init__(self, *plans: Any, kv_dtype: str | None = None) -> None:
        self.kv_dtype = kv_dtype
        self.engines = [make_engine(plan, transfers=True, kv_dtype=kv_dtype) for plan in plans]
        for engine in self.engines:
            assert engine.page_identity is not None
        self.layout, self.fingerprint = self.engines[0].page_identity  # type: ignore[misc]
        assert self.engines[1].page_identity == (self.layout, self.fingerprint)
        self.exporters = [engine.pages for engine in self.engines]
        self.receiver = LocalReceiver(self.layout, self.fingerprint, options=OPTIONS)

    def local(self, sender: int) -> Callable[[str], Any]:
        return self.local_from(self.exporters[sender])

    def local_from(self, exporter: Any, fingerprint: bytes | None = None) -> Callable[[str], Any]:
        return lambda lease: self.receiver.source(exporter, lease, self.layout, fingerprint or self.fingerprint)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(STAGES, RANKS)


def make_requests(random: np.random.Generator) -> list[Request]:
    requests = []
    for number in random.permutation(len(SAMPLING))[:4].tolist():
        prompt = random.integers(0, VOCAB, random.integers(10, 50)).tolist()
        stop = ("".join(chr(ord("A") + int(x)) for x in random.integers(0, VOCAB, 1)),)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, stop=stop, **SAMPLING[number])
        requests.append(Request(prompt, sampling, f"r{next(NUMBERS)}", session_id="s" if number == 0 else None))
    return requests


def forget(*engines: Engine) -> None:
    """What earlier requests left, and how long loads took while their programs were compiled."""
    for engine in engines:
        engine.core.pool.clear()
        engine.scheduler.loads.seconds_per_page = None


def sorted_outputs(outputs: dict[str, list[Output]], request: Request) -> list[Output]:
    return sorted(outputs[str(request.request_id)], key=lambda output: output.index)


def move(
    first: Engine, second: Engine, requests: list[Request], count: int, source: Callable[[str], Any]
) -> dict[str, list[Output]]:
    """Outputs of the second engine, which goes on with all requests after so many tokens from the first one."""
    outputs: dict[str, list[Output]] = {}
    forget(first, second)
    for request in requests:
        first.submit(beginning(request, count, f"lease {request.request_id}"))
    run(first, outputs)
    final: dict[str, list[Output]] = {}
    for request in requests:
        # As JSON carries it.
        handoff = Handoff.from_dict(Handoff.of(sorted_outputs(outputs, request)).to_dict())
        leases = [each.lease for each in handoff.completions if each.lease is not None]
        second.submit(request, None, handoff, {lease: source(lease) for lease in leases})
    while second.has_work:
        note(second, final)
        first.step()  # it reads pages between its steps
    return final


def check(final: dict[str, list[Output]], requests: list[Request]) -> None:
    wanted = iter(expected([dataclasses.replace(request, request_id=None) for request in requests]))
    for request in requests:
        for output in sorted_outputs(final, request):
            other = next(wanted)
            assert output.token_ids == other.token_ids
            assert (output.text, output.finish_reason) == (other.text, other.finish_reason)
            assert (output.logprobs is None, output.prompt_logprobs is None) == (
                other.logprobs is None,
                other.prompt_logprobs is None,
            )
            for name in ("logprobs", "prompt_logprobs"):
                for a, b in zip(getattr(output, name) or (), getattr(other, name) or (), strict=True):
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def check_empty(*engines: Engine) -> None:
    """Nothing is held any more, once what was sent about leases has come."""
    until = time.monotonic() + 10
    while any(len(engine.core.leases) for engine in engines) and time.monotonic() < until:
        for engine in engines:
            engine.step()
        time.sleep(0.01)
    assert [len(engine.core.leases) for engine in engines] == [0, 0]
    assert [engine.core.pool.num_held for engine in engines] == [0, 0]


@pytest.mark.parametrize(("seed", "count", "sender"), [(0, 1, 0), (1, 6, 1)], ids=["prefill", "decode"])
def test_requests_move_after_prefill_and_in_mid_decode(pair: Pair, seed: int, count: int, sender: int) -> None:
    first, second = pair.engines[sender], pair.engines[1 - sender]
    requests = make_requests(np.random.default_rng(seed))
    check(move(first, second, requests, count, pair.local(sender)), requests)
    check_empty(first, second)


def test_what_was_computed_is_not_computed_again(pair: Pair) -> None:
    """In mid-decode, all pages go along, the last partial one too."""
    first, second = pair.engines
    request = Request(list(range(45)), SamplingParams(max_tokens=20, ignore_eos=True), "r")
    before = second.stats().prompt_tokens
    final = move(first, second, [request], 6, pair.local(0))
    check(final, [request])
    (output,) = final["r"]
    assert output.metrics.loaded_tokens > 45
    assert second.stats().prompt_tokens == before + 1  # the token that was drawn last
    check_empty(first, second)


@pytest.fixture
def sender(pair: Pair) -> Iterator[PageSender]:
    with PageSender(pair.exporters[0], pair.layout, pair.fingerprint, options=OPTIONS) as sender:
        yield sender


def test_requests_move_over_sockets(pair: Pair, sender: PageSender) -> None:
    requests = make_requests(np.random.default_rng(3))[:2]
    with PageReceiver(pair.layout, pair.fingerprint, options=OPTIONS) as receiver:
        final = move(*pair.engines, requests, 6, lambda lease: receiver.source(sender.address, lease))
        check(final, requests)
        assert receiver.stats.outcomes["complete"] > 0
    check_empty(*pair.engines)


def test_a_killed_side_is_computed_again(pair: Pair, sender: PageSender) -> None:
    requests = make_requests(np.random.default_rng(4))[:2]
    with PageReceiver(pair.layout, pair.fingerprint, options=OPTIONS) as receiver:

        def source(lease: str) -> Any:
            sender.close()
            return receiver.source(sender.address, lease)

        check(move(*pair.engines, requests, 6, source), requests)
        assert receiver.stats.outcomes["complete"] == 0
    for lease in pair.engines[0].core.leases.over():
        pair.engines[0].pages.release(lease)
    check_empty(*pair.engines)


class DyingExporter:
    """An engine that is gone after some reads."""

    def __init__(self, engine: Engine) -> None:
        self.pages, self.reads = engine.pages, 0

    def lease(self, lease_id: str) -> LeasedPages:
        return self.pages.lease(lease_id)

    def release(self, lease_id: str) -> None:
        self.pages.release(lease_id)

    def read(self, lease_id: str, first: int, stop: int, layers: tuple[int, int]) -> PageRead:
        self.reads += 1
        if self.reads > 4:
            raise LeaseGone("the engine is gone")
        return self.pages.read(lease_id, first, stop, layers)


def test_pages_that_came_before_the_end_are_kept(pair: Pair) -> None:
    first, second = pair.engines
    request = Request(list(range(45)), SamplingParams(max_tokens=20, ignore_eos=True), "r")
    dying = DyingExporter(first)
    final = move(first, second, [request], 6, pair.local_from(dying))
    check(final, [request])
    assert dying.reads > 4
    assert 0 < final["r"][0].metrics.loaded_tokens < 45
    check_empty(first, second)


def test_sessions_go_along(pair: Pair) -> None:
    """The next turn of a conversation that moved finds what the other engine has computed."""
    first, second = pair.engines
    prompt = list(range(1, 40))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    request = Request(prompt, sampling, "r", session_id="moved")
    final = move(first, second, [request], 6, pair.local(0))
    check(final, [request])
    turn = [*prompt, *final["r"][0].token_ids, 1, 2, 3]
    (output,) = second.generate([Request(turn, sampling, session_id="moved")])
    assert output.token_ids == expected([Request(turn, sampling)])[0].token_ids
    assert output.metrics.cached_tokens >= len(prompt) + 11
    check_empty(first, second)


def test_a_prefill_streams_its_pages_while_it_runs(pair: Pair) -> None:
    """Prefill on one plan, decode on another one: pages come before the prompt is read to its end."""
    first, second = pair.engines
    prompt = np.random.default_rng(9).integers(0, VOCAB, 120).tolist()
    request = Request(prompt, SamplingParams(max_tokens=8, ignore_eos=True), "p")
    forget(first, second)
    one = dataclasses.replace(request, sampling=SamplingParams(max_tokens=1, ignore_eos=True), lease="streamed")
    first.submit(one)
    ready = []
    outputs: dict[str, list[Output]] = {}
    while first.has_work:
        note(first, outputs)
        if "streamed" in first.core.leases:
            ready.append(len(pair.exporters[0].lease("streamed").pages))
    assert len({*ready}) > 3
    handoff = Handoff.of(outputs["p"])
    second.submit(request, None, handoff, {"streamed": pair.local(0)("streamed")})
    final: dict[str, list[Output]] = {}
    while second.has_work:
        note(second, final)
        first.step()
    check(final, [request])
    assert final["p"][0].metrics.loaded_tokens == 120
    check_empty(first, second)


def test_other_weights_are_refused(pair: Pair) -> None:
    first, second = pair.engines
    request = Request(list(range(45)), SamplingParams(max_tokens=9, ignore_eos=True), "r")
    final = move(first, second, [request], 6, pair.local_from(pair.exporters[0], b"other"))
    check(final, [request])
    assert final["r"][0].metrics.loaded_tokens == 0
    for lease in first.core.leases.over():
        first.pages.release(lease)
    check_empty(first, second)


@pytest.fixture(scope="module")
def fp8_pair() -> Pair:
    return Pair(STAGES, RANKS, kv_dtype=FP8_KV)


@pytest.mark.slow
def test_requests_with_fp8_pages_move(fp8_pair: Pair) -> None:
    """Locally and over sockets: pages come as they were, values and scales, bit by bit."""
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=LOGPROBS)
    made = fp8_pair.layout, fp8_pair.fingerprint
    with (
        PageSender(fp8_pair.exporters[0], *made, options=OPTIONS) as sends,
        PageReceiver(*made, options=OPTIONS) as gets,
    ):
        for number, (sender, source) in enumerate(
            (
                (1, fp8_pair.local(1)),
                (0, lambda lease: gets.source(sends.address, lease)),
            )
        ):
            random = np.random.default_rng(number)
            prompts = [random.integers(0, VOCAB, length).tolist() for length in (40, 9, 33, 25)]
            requests = [Request(prompt, sampling, f"r{next(NUMBERS)}") for prompt in prompts]
            first, second = fp8_pair.engines[sender], fp8_pair.engines[1 - sender]
            final = move(first, second, requests, 6, source)
            found = [output for request in requests for output in final[str(request.request_id)]]
            check_near(found, expected([dataclasses.replace(each, request_id=None) for each in requests], FP8_KV))
            moved = 0
            for request, output in zip(requests, found, strict=True):
                if output.metrics.loaded_tokens == output.metrics.cached_tokens:
                    keys = first.prepare(request).keys[: output.metrics.loaded_tokens // PAGE_SIZE]
                    np.testing.assert_array_equal(page_bits(second, keys), page_bits(first, keys))
                    moved += len(keys)
            assert moved > 0  # under load some pages come too late, and are computed
            check_empty(first, second)
        assert gets.stats.outcomes["complete"] > 0


@pytest.mark.slow
def test_an_engine_of_another_kv_dtype_is_refused(pair: Pair, fp8_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The message names both dtypes, and the request is computed again."""
    pairs = pair, fp8_pair
    first, second = pairs[0].engines[0], pairs[1].engines[1]
    request = Request(list(range(45)), SamplingParams(max_tokens=20, ignore_eos=True), "r")
    one, other = pairs[0].layout.dtype, pairs[1].layout.dtype

    def source(lease: str) -> Any:
        return pairs[1].receiver.source(pairs[0].exporters[0], lease, pairs[0].layout, pairs[0].fingerprint)

    final = move(first, second, [request], 6, source)
    assert final["r"][0].metrics.loaded_tokens == 0
    assert f"dtype {one} instead of {other}" in caplog.text
    for lease in first.core.leases.over():
        first.pages.release(lease)
    check_empty(first, second)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 11))
def test_requests_move_to_one_device_and_back(seed: int, count: int) -> None:
    pair = Pair(ONE, STAGES)
    for sender in (0, 1):
        requests = make_requests(np.random.default_rng(seed + sender))
        check(move(pair.engines[sender], pair.engines[1 - sender], requests, count, pair.local(sender)), requests)
        check_empty(*pair.engines)

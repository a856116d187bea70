"""Two servers behind routers that others have written, on loopback.

`make test-all` puts each router into an environment of its own, as they have scripts of the same names.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI
from serve_process import ServeProcess, free_port

from longctx.models import passkey

ROUTERS = {
    "vllm-router": ["bin/vllm-router"],
    "sglang-router": ["bin/sglang-router", "launch"],
}
SIZES = ("--max-length", "8192", "--token-budget", "128", "--buckets", "8,128")
TIMEOUT = 60.0  # seconds
# One failed request is enough, else a dead server is tried until its health is looked at; and it is soon tried again.
CAREFUL = ("--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "2")
CAREFUL += ("--health-check-endpoint", "/ready")
NOTE = passkey.make_document(1_024, 4, 2)


class Router:
    """A router's process in front of servers, which has found them all healthy inside."""

    def __init__(
        self,
        name: str,
        urls: list[str],
        policy: str = "cache_aware",
        *flags: str,
        workers: tuple[str, ...] | None = None,
    ) -> None:
        directory = Path(sys.prefix) / "routers" / name
        program, *command = ROUTERS[name]
        if not (directory / program).exists():
            pytest.skip(f"{name} is not there: make .venv/installed-routers")
        port = free_port()
        self.name = name
        self.url, self._urls = f"http://127.0.0.1:{port}", urls
        checks = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5")
        checks += ("--health-failure-threshold", "1", "--health-success-threshold", "1")
        own = ("--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
        workers = ("--worker-urls", *urls) if workers is None else workers
        self._command = [str(directory / program), *command, *own, *checks, *flags, *workers]

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        try:
            self.until_healthy(self._urls)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self.client.close()

    @property
    def log(self) -> str:
        """What it has written, without colours."""
        self._log.seek(0)
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read().decode(errors="replace"))

    def workers(self) -> set[str]:
        """The addresses of servers that the router takes to be healthy."""
        found = get(f"{self.url}/workers")["workers"]
        return {worker["url"] for worker in found if worker["is_healthy"]}

    def until_healthy(self, urls: list[str]) -> None:
        until(lambda: self._process.poll() is None and self.workers() == set(urls))


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        try:
            if is_so():
                return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"it is not so after {TIMEOUT} s")


def ask(client: OpenAI, document: passkey.Document, name: str) -> tuple[str, int]:
    """The answer to a question about a document, and how many tokens of the prompt were found in a cache."""
    prompt = passkey.prompt(document.text, passkey.question(name))
    answer = client.completions.create(model="longctx-tiny", prompt=prompt, max_tokens=8, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServeProcess]]:
    with ServeProcess(*SIZES) as first, ServeProcess(*SIZES) as second:
        yield [first, second]


@pytest.fixture(scope="module", params=ROUTERS)
def router(request: pytest.FixtureRequest, servers: list[ServeProcess]) -> Iterator[Router]:
    with Router(request.param, [server.url for server in servers]) as router:
        yield router


pytestmark = pytest.mark.slow


def test_both_servers_are_found(router: Router, servers: list[ServeProcess]) -> None:
    assert router.workers() == {server.url for server in servers}
    assert [model.id for model in router.client.models.list()] == ["longctx-tiny"]
    with urllib.request.urlopen(f"{router.url}/health", timeout=10) as answer:
        assert answer.status == 200


def test_streams_come_token_by_token_and_are_the_servers_own(router: Router, servers: list[ServeProcess]) -> None:
    asked: dict[str, Any] = {
        "model": "longctx-tiny",
        "messages": [{"role": "system", "content": NOTE.text}, {"role": "user", "content": "What is it about?"}],
        "max_tokens": 48,
        "temperature": 0,
        "stop": None,
        "extra_body": {"ignore_eos": True, "ttft_ms": 60_000},
    }
    options = {"stream": True, "stream_options": {"include_usage": True}}
    times, text, usage = [], "", None
    for chunk in router.client.chat.completions.create(**asked, **options):
        times.append(time.monotonic())
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens > 8
    assert len(times) > 8
    assert len({round(at, 3) for at in times}) > 4  # not all at the end
    with OpenAI(base_url=f"{servers[0].url}/v1", api_key="none") as direct:
        assert text == direct.chat.completions.create(**asked).choices[0].message.content


def test_questions_about_one_document_go_to_the_server_that_has_it(router: Router) -> None:
    seeds = {"vllm-router": 100, "sglang-router": 200}
    document = passkey.make_document(3_000, 4, seeds[router.name])
    cached = [ask(router.client, document, name)[1] for name in document.facts]
    assert cached[0] == 0
    assert all(tokens >= 3_008 for tokens in cached[1:]), cached  # all full pages of 64 tokens before the question


def test_clients_hear_what_a_server_refuses(router: Router) -> None:
    with pytest.raises(BadRequestError, match="longest sequence"):
        ask(router.client, passkey.make_document(9_000, 1, 1), "nothing")


@pytest.mark.parametrize("name", ROUTERS)
def test_a_killed_server_is_left_out_until_it_is_back(name: str) -> None:
    with (
        ServeProcess(*SIZES) as first,
        ServeProcess(*SIZES) as second,
        Router(name, [first.url, second.url], "cache_aware", *CAREFUL) as router,
    ):
        busy: dict[str, Any] = {"model": "longctx-tiny", "prompt": "word " * 200, "max_tokens": 7_000, "stream": True}
        stream = router.client.completions.create(**busy, extra_body={"ignore_eos": True})
        next(stream)
        loads = {server: get(f"{server.url}/load")["num_running_reqs"] for server in (first, second)}
        [victim], [survivor] = ([server for server, count in loads.items() if count == n] for n in (1, 0))
        victim.process.kill()
        victim.process.wait()
        with pytest.raises((APIError, httpx.HTTPError)):  # no end that looks like one
            list(stream)
        # Other requests are answered at once, before the router has looked.
        answers = [ask(router.client, NOTE, fact)[0] for fact in NOTE.facts for _ in range(2)]
        assert answers == [key for key in NOTE.facts.values() for _ in range(2)]
        router.until_healthy([survivor.url])
        with ServeProcess(*SIZES, port=victim.port):
            router.until_healthy([survivor.url, victim.url])
            # One that shuts down in order is not missed either.
            survivor.process.terminate()
            answers = [ask(router.client, NOTE, fact)[0] for fact in NOTE.facts]
            assert answers == [*NOTE.facts.values()]


def credits(router: Router) -> list[int]:
    """Tokens that a router took to be in the cache of the server that it chose, for each request."""
    return [int(tokens) for tokens in re.findall(r"credited_prefix_tokens=(\d+)", router.log)]


def test_a_router_that_hears_kv_events_knows_what_is_cached_where() -> None:
    ports = [free_port() for _ in range(4)]
    events, replays = ([f"tcp://127.0.0.1:{port}" for port in some] for some in (ports[:2], ports[2:]))
    flags = [
        (*SIZES, "--kv-events", event, "--kv-events-replay", replay, "--kv-events-tokens")
        for event, replay in zip(events, replays, strict=True)
    ]
    document = passkey.make_document(3_000, 4, 300)
    with ServeProcess(*flags[0]) as first, ServeProcess(*flags[1]) as second:
        urls = [first.url, second.url]
        # Its default of 16 tokens credits nothing, without a word: a block is a page (--page-size).
        hears = ["--kv-event-block-size", "64", "--kv-event-model", "longctx-tiny", "--log-level", "debug"]
        for url, event, replay in zip(urls, events, replays, strict=True):
            hears += ["--kv-event-source", f"{url}={event}", "--kv-event-replay-source", f"{url}={replay}"]
        with Router("vllm-router", urls, "kv_aware", *hears) as router:
            cached = [ask(router.client, document, name)[1] for name in document.facts]
            assert cached == [0, 3_008, 3_008, 3_008]
            assert credits(router) == cached
        # A router that is started later asks for what it has missed, when the next event shows it that it has.
        with Router("vllm-router", urls, "kv_aware", *hears) as router:
            for server in (first, second):
                server.post("/v1/completions", {"prompt": NOTE.text, "max_tokens": 1})
            until(lambda: "replay sequence advanced" in router.log)
            assert ask(router.client, document, next(iter(document.facts)))[1] == 3_008
            assert credits(router) == [3_008]


def test_a_router_has_one_server_read_and_another_go_on(tmp_path: Path) -> None:
    """`kv_transfer_params` as vLLM's router carries them: the answers are those of a server by itself."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    apart = ("--kv-secret-file", str(secret), "--max-logprobs", "3")
    with (
        ServeProcess(*SIZES, *apart, "--role", "prefill") as prefill,
        ServeProcess(*SIZES, *apart, "--role", "decode") as decode,
    ):
        urls = [prefill.url, decode.url]
        workers = ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)
        with Router("vllm-router", urls, "round_robin", workers=workers) as router:
            for name, key in NOTE.facts.items():
                assert ask(router.client, NOTE, name)[0] == key
            asked: dict[str, Any] = {
                "model": "longctx-tiny",
                "prompt": NOTE.text,
                "max_tokens": 20,
                "temperature": 1.0,
                "seed": 5,
                "n": 2,
                "logprobs": 2,
                "stop": ["zz"],
                "frequency_penalty": 0.5,
                "extra_body": {"ignore_eos": True},
            }
            found = router.client.completions.create(**asked)
            with OpenAI(base_url=f"{prefill.url}/v1", api_key="none") as direct:
                expected = direct.completions.create(**asked)
            for one, other in zip(found.choices, expected.choices, strict=True):
                assert one.text == other.text
                assert one.logprobs is not None
                assert other.logprobs is not None
                assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
            chat: dict[str, Any] = {
                "model": "longctx-tiny",
                "messages": [{"role": "user", "content": "What is it about?"}],
                "max_tokens": 12,
                "temperature": 0,
            }
            chunks = router.client.chat.completions.create(**chat, stream=True)
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert text == router.client.chat.completions.create(**chat).choices[0].message.content
        # All prompts were read by the one, and no page was computed again by the other.
        metrics = [urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode() for url in urls]
        read, loaded = (metrics[0], metrics[1])
        assert value(loaded, "kv_transfers_received_total", outcome="complete") >= len(NOTE.facts)
        assert value(loaded, "kv_recomputed_pages_total") == 0
        assert value(loaded, "computed_prompt_tokens_total") < 20 < value(read, "computed_prompt_tokens_total")


def value(metrics: str, name: str, **labels: str) -> float:
    """A sample of a metric, summed over the labels that are not given."""
    lines = [line for line in metrics.splitlines() if re.match(rf"longctx.{name}[ {{]", line)]
    lines = [line for line in lines if all(f'{key}="{text}"' in line for key, text in labels.items())]
    assert lines, name
    return sum(float(line.split()[-1]) for line in lines)

"""Router, prefill instance and two decode instances on four hosts, and streaming clients that compare all tokens."""

import asyncio
import dataclasses
import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from network import NETWORK, Host, OnNetwork
from switch import Rules

from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.models.tokenizer import Tokenizer
from longctx.serving import Engine, EngineConfig, SamplingParams

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "from longctx.cli import program; program()"
PORT = 8000
START = 240.0  # seconds until all are ready
MOST_RETRIES = 3
SETTLED = 90.0  # seconds until all that a fault left behind is gone: leases end after 60
_SIZES = {"max_length": 4096, "num_pages": 600, "page_size": 16, "max_running": 8, "token_budget": 64}
ENGINE = [f"--{name.replace('_', '-')}={value}" for name, value in _SIZES.items()] + ["--buckets=64"]
_WORDS = ("lemon", "cedar", "stone", "river", "apple", "tiger", "cloud", "plum")
_SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")


@dataclass(frozen=True)
class Job:
    """A request that clients send: its fields beside the prompt are drawn from its number."""

    number: int

    @functools.cached_property
    def prompt(self) -> list[int]:
        """Token ids of sentences with pass keys among them, and a question."""
        draw = random.Random(self.number)
        parts = [f"Document {self.number}."]
        for _ in range((6, 6, 60, 6, 120, 30)[self.number % 6]):
            parts.append(draw.choice(_SENTENCES))
            if draw.random() < 0.3:
                parts.append(f"The pass key of {draw.choice(_WORDS)} is {draw.randrange(100_000):05}.")
        return _tokenizer().encode(" ".join(parts) + f" What is the pass key of {draw.choice(_WORDS)}?")

    @property
    def sampling(self) -> dict[str, Any]:
        """Greedy, or drawn with a seed."""
        number = self.number
        return {
            "max_tokens": (80, 40, 30, 120, 20, 60)[number % 6],
            "temperature": float(number % 4 == 3),
            "seed": number,
            "ignore_eos": True,
        }

    @functools.cached_property
    def expected(self) -> list[int]:
        """Tokens of one engine that has nothing else to do."""
        return _engine().generate([self.prompt], SamplingParams(**self.sampling))[0].token_ids


JOBS = [Job(number) for number in range(24)]


@functools.cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


@functools.cache
def _engine() -> Engine:
    model, params = load_checkpoint(TINY)
    return Engine(model, params, EngineConfig(**_SIZES, buckets=(64,)), tokenizer=_tokenizer())


@dataclass
class Answer:
    """What a client got of a request.

    Attributes:
      ends: how often the stream said `[DONE]`.
      error: of the answer, or in its stream, or of the connection; empty: none.
      is_refused: it was told to come again, with 429 or 503, before its first token.
      is_abandoned: the client went away.
      retries: how often it was asked again.
      last: id of the last event; empty: the stream is not resumable. resumed: how often it was.
    """

    job: Job
    tokens: list[int] = field(default_factory=list)
    ends: int = 0
    error: str = ""
    is_refused: bool = False
    is_abandoned: bool = False
    retries: int = 0
    seconds: float = 0.0
    last: str = ""
    resumed: int = 0

    @property
    def is_wrong(self) -> bool:
        """Whether a token is not the one that is expected there, or the stream ends otherwise than it says."""
        if self.tokens != self.job.expected[: len(self.tokens)] or self.ends > 1:
            return True
        is_whole = self.ends == 1 and self.tokens == self.job.expected
        return not is_whole and not self.error and not self.is_abandoned


async def ask(
    http: httpx.AsyncClient,
    url: str,
    job: Job,
    headers: dict[str, str],
    most: int | None = None,
    is_resumable: bool = False,
) -> Answer:
    """Stream the answer to a job, and abandon it after `most` tokens or more; `url` may have several with spaces.

    Where there are several, a request that fails is sent again to the next, as a client with a retry policy does; the
    next one goes on with a stream that is resumable.
    """
    urls, since, retries, answer = url.split(), time.monotonic(), 0, Answer(job)
    while True:
        before = dataclasses.replace(answer, error="", is_refused=False, resumed=answer.resumed + 1)
        answer = before if answer.last else Answer(job)
        await _ask_once(http, urls[(job.number + retries) % len(urls)], answer, headers, most, is_resumable)
        if not answer.error or len(urls) == 1 or retries == MOST_RETRIES:
            answer.retries, answer.seconds = retries, time.monotonic() - since
            return answer
        retries += 1
        await asyncio.sleep(0.2)


async def _ask_once(
    http: httpx.AsyncClient, url: str, answer: Answer, headers: dict[str, str], most: int | None, is_resumable: bool
) -> None:
    job, name = answer.job, ""
    body = {"prompt": job.prompt, "stream": True, "return_token_ids": True, **job.sampling}
    body |= {"stream_options": {"resumable": True}} if is_resumable else {}
    headers = headers | ({"last-event-id": answer.last} if answer.last else {})
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                answer.is_refused = response.status_code in (429, 503)
                answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.ends += 1
                elif line.startswith("id: "):
                    name = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    answer.last = name
                    event = json.loads(line.removeprefix("data: "))
                    answer.error = answer.error or str(event.get("error", ""))
                    for choice in event.get("choices", ()):
                        answer.tokens += choice.get("token_ids") or ()
                if most is not None and len(answer.tokens) >= most and not answer.ends:
                    answer.is_abandoned = True
                    break
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"


async def ask_until(
    stop: asyncio.Event, url: str, clients: int, headers: dict[str, str], is_resumable: bool = False
) -> list[Answer]:
    """Have clients ask one job after another until they shall stop; returns all answers. One in five is abandoned."""
    answers = []

    async def client(number: int) -> None:
        turn = 5 * number
        while not stop.is_set():
            most = 3 * number if len(answers) % 5 == 4 else None
            answers.append(await ask(http, url, JOBS[turn % len(JOBS)], headers, most, is_resumable))
            turn += 7 if number % 2 else 1
            if answers[-1].error:
                await asyncio.sleep(0.5)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=150, trust_env=False, limits=limits) as http:
        await asyncio.gather(*(client(number) for number in range(clients)))
    return answers


class Member:
    """A process on a host, which can be started again.

    Args:
      flags: of `longctx serve`.
      python: that runs it.
    """

    def __init__(self, host: Host, log: Path, flags: list[str], python: str = sys.executable) -> None:
        self.host, self._log = host, log
        self._command = [python, "-c", PROGRAM, "serve", "--end-with-stdin", "--quiet", *flags]
        self.url, self.process = f"http://{host.address}:{PORT}", self._started()

    def start(self) -> None:
        """Start the process again, after its end."""
        self._close()
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        pipe = subprocess.PIPE  # the process ends when this one does
        with self.host.inside(), self._log.open("a") as log:
            return subprocess.Popen(self._command, env=environment, stdin=pipe, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        """End the process by force if it does not by itself."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close()

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    @property
    def log(self) -> str:
        return self._log.read_text()


class Cluster(OnNetwork):
    """A context manager: all are ready inside. Clients are on the router's host.

    Attributes:
      NAMES: of the members, each on a host of its own: the router, one that reads prompts, two that decode.
      ROUTERS: of those that clients ask, on the first one's host.
      ROLES: of those that the router knows.
      LAUNCHER, PYTHON: of the router.
      members: by name.
    """

    NAMES: tuple[str, ...] = ("router", "p0", "d0", "d1")
    ROUTERS: tuple[str, ...] = ("router",)
    ROLES: Mapping[str, str] = MappingProxyType({"p0": "prefill", "d0": "decode", "d1": "decode"})
    LAUNCHER: str = "static"
    PYTHON: str = sys.executable

    def __init__(self, folder: Path) -> None:
        super().__init__(len(self.NAMES))
        self._folder = folder
        self.hosts: dict[str, Host] = {}
        self.members: dict[str, Member] = {}
        self._secret, self._key = written(folder / "secret", "s" * 40), written(folder / "key", "the-key-of-the-tests")
        self._keys = ["--admin-key-file", self._key, "--api-key-file", written(folder / "clients", "a-key-of-clients")]
        self._admin = {"authorization": "Bearer the-key-of-the-tests"}

    def _start(self) -> None:
        self.hosts = dict(zip(self.NAMES, self.network.hosts, strict=True))
        lines = ["[cluster]", f"launcher = '{self.LAUNCHER}'", 'admission = "none"']
        lines += ["[engine]", f"kv_secret_file = '{self._secret}'", "buckets = '64'"]
        lines += [f"{name} = {value}" for name, value in _SIZES.items()]
        lines += self._tables()
        file = written(self._folder / "cluster.toml", "\n".join(lines))
        for name in self.ROUTERS:
            self.add(name, ["--cluster", file, "--instance-key-file", self._key, "--kv-peer", NETWORK, *self._keys])
        self._add_instances()
        self.wait_until_open()

    def _tables(self) -> list[str]:
        """Return lines of the router's file that name instances."""
        lines = []
        for name, role in self.ROLES.items():
            url = f"http://{self.hosts[name].address}:{PORT}"
            lines += ["[[instances]]", f"name = '{name}'", f"role = '{role}'", f"url = '{url}'"]
        return lines

    def _add_instances(self) -> None:
        for name in self.ROLES:
            self.add(name, self.instance_flags(name))

    def add(self, name: str, flags: list[str]) -> None:
        host = self.hosts[name]
        listen = ["--host", host.address, "--port", str(PORT)]
        self.members[name] = Member(host, self._folder / f"{name}.log", [*flags, *listen], self.PYTHON)

    def instance_flags(self, name: str) -> list[str]:
        """Return the flags of an instance."""
        events = ["--kv-events", "tcp://*:5557", "--kv-events-replay", "tcp://*:5558"]
        pages = ["--kv-secret-file", self._secret, "--kv-host", self.hosts[name].address, "--kv-peer", NETWORK]
        return [*ENGINE, *events, *pages, "--role", "both", *self._keys]

    def __exit__(self, *error: object) -> None:
        self.network.set()
        for member in self.members.values():
            member.signal(signal.SIGCONT)
            member.end()
        self.network.__exit__()

    def _get(self, name: str, path: str) -> str:
        with self.hosts["router"].inside(), httpx.Client(trust_env=False, timeout=5) as http:
            url, headers = self.access(name)
            return http.get(f"{url}{path}", headers=headers).text

    def access(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the URL of a member, and headers of its administrators."""
        return self.members[name].url, self._admin

    def running(self, name: str) -> int:
        """Requests that an instance says it runs."""
        return len(json.loads(self._get(name, "/load"))["request_ids"])

    def instances(self, router: str = "router") -> dict[str, dict[str, Any]]:
        """Return what a router knows of each instance, by name."""
        return {each["name"]: each for each in json.loads(self._get(router, "/cluster/instances"))["instances"]}

    def states(self, router: str = "router") -> dict[str, str]:
        """State of each instance that a router knows."""
        return {name: each["state"] for name, each in self.instances(router).items()}

    def wait_until_open(self) -> None:
        """Wait until all instances take requests of all routers."""
        wanted = dict.fromkeys(self.ROLES, "open")
        for router in self.ROUTERS:
            self.wait(lambda router=router: self.states(router) == wanted, START, lambda: "all instances are open")

    def left(self) -> dict[str, float]:
        """Return all that is not free though no request is there: by instance and metric."""
        found = {}
        for name in self.ROLES:
            found |= {f"{name} {metric}": number for metric, number in held(self._get(name, "/metrics")).items()}
        return found

    def wait_until_settled(self) -> None:
        """Wait until no page is held, no lease is there and no request runs."""
        self.wait(lambda: not self.left(), SETTLED, lambda: f"nothing is left, and {self.left()} is")

    def wait(self, condition: Callable[[], bool], seconds: float, wanted: Callable[[], str]) -> None:
        end = time.monotonic() + seconds
        while True:
            for name, member in self.members.items():
                assert member.process.poll() is None, f"{name} has ended:\n{member.log[-3000:]}"
            try:
                if condition():
                    return
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                problem = str(error)
            else:
                problem = ""
            if time.monotonic() > end:
                logs = "".join(f"{name}:\n{each.log[-1500:]}\n" for name, each in self.members.items())
                raise AssertionError(f"not within {seconds} s: {wanted()} {problem}\n{logs}")
            time.sleep(0.3)

    # Faults.

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a member."""
        self.members[name].signal(number)

    def start(self, name: str) -> None:
        """Start a member again."""
        self.members[name].start()

    def number(self, name: str) -> int:
        """Return the number of a member's host in rules."""
        return self.NAMES.index(name)

    def block(self, *pairs: tuple[str, str]) -> Rules:
        """Return rules by which nothing passes from the first to the second member of each pair."""
        return Rules(blocked=[(self.number(source), self.number(target)) for source, target in pairs])

    def without(self, name: str) -> Rules:
        """Return rules by which a member's host is cut off."""
        return self.network.without(self.number(name))

    def serve_through(
        self, clients: int, steps: Iterable[tuple[float, Callable[[], object]]], is_resumable: bool = False
    ) -> list[Answer]:
        """Have clients ask while the steps are taken, each after so many seconds; returns all answers."""
        with self.hosts["router"].inside():
            headers = {"authorization": "Bearer a-key-of-clients"}
            urls = (self.members[name].url for name in self.ROUTERS)
            return serve_through(" ".join(urls), headers, clients, steps, is_resumable)


def serve_through(
    url: str,
    headers: dict[str, str],
    clients: int,
    steps: Iterable[tuple[float, Callable[[], object]]],
    is_resumable: bool = False,
) -> list[Answer]:
    """Have clients ask a server while the steps are taken, each after so many seconds; returns all answers."""

    async def run() -> list[Answer]:
        stop = asyncio.Event()
        asking = asyncio.create_task(ask_until(stop, url, clients, headers, is_resumable))
        for seconds, step in steps:
            await asyncio.sleep(seconds)
            step()
        stop.set()
        return await asking

    return asyncio.run(run())


def held(metrics: str) -> dict[str, float]:
    """Return what of a server's metrics is not 0 while requests run or wait, or pages are held."""
    names = r"^longctx:(num_requests_\w+|pages_held|kv_leases|kv_leased_pages)\{.*\} (.*)$"
    return {name: float(number) for name, number in re.findall(names, metrics, re.MULTILINE) if float(number)}


def resident(pid: int) -> float:
    """MiB of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024


def written(path: Path, text: str) -> str:
    """Write a file that only its owner can read."""
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def check(answers: list[Answer]) -> None:
    """Every token came once and is right, and no stream broke."""
    assert not [each for each in answers if each.is_wrong]
    errors = [each.error for each in answers if each.error and not each.is_refused]
    assert not errors, f"{len(errors)}, such as {errors[:3]}"
    assert any(each.ends for each in answers)


def summary(answers: list[Answer]) -> str:
    """Format how many there were, and the seconds of those that were answered."""
    good = sorted(each.seconds for each in answers if each.ends)
    refused, abandoned = sum(each.is_refused for each in answers), sum(each.is_abandoned for each in answers)
    broken = sum(bool(each.error) for each in answers) - refused
    times = f"{statistics.median(good):.1f} s in the median, {good[-1]:.1f} s at most" if good else "none"
    return f"{len(answers)} requests, {refused} refused, {abandoned} abandoned, {broken} broken; {times}"

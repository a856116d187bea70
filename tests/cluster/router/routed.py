"""Routers of tests: the real app and HTTP server over instances that run in this process."""

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import openai
import uvicorn
from disaggregated import CONFIG, NAME
from link_proxy import LinkProxy
from served import Served
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.launcher.launcher import Address
from longctx.cluster.router.routes import make_router_app
from longctx.cluster.router.server import RouterServer, RouterSettings
from longctx.models import load_tokenizer
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server.http_server import HttpServer, bind
from longctx.serving.server.settings import ServerSettings

assert CONFIG.hash_key is not None
HASH = PageHash(CONFIG.hash_key, CONFIG.page_size)
TEXT = "The pass key of lemon is 5312. The old road crossed the field behind the mill. "


class Routed:
    """A running router, and clients of it."""

    def __init__(self, http: HttpServer, server: RouterServer, port: int, scheme: str = "http") -> None:
        self.http, self.server, self.url = http, server, f"{scheme}://127.0.0.1:{port}"
        self.clients = contextlib.ExitStack()

    def client(self, **options: Any) -> httpx.Client:
        client = httpx.Client(base_url=self.url, **{"timeout": 30} | options)
        self.clients.callback(client.close)
        return client

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 60, "api_key": "none"} | options
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **options))

    def instances(self) -> dict[str, dict[str, Any]]:
        with httpx.Client(base_url=self.url, timeout=10) as client:
            return {each["name"]: each for each in client.get("/cluster/instances").json()["instances"]}

    def register(self, url: str, name: str | None = None, role: str = "both", **options: Any) -> httpx.Response:
        """Register an instance as one that knows the secret."""
        client, nonce = self.client(**options), "0" * 32
        challenge = client.post("/cluster/challenge", json={"nonce": nonce}).json()["challenge"]
        proof = HASH.sign("instance", nonce, challenge, url, name, role)
        sent = {"url": url, "name": name, "role": role, "nonce": nonce, "challenge": challenge, "proof": proof}
        return client.post("/cluster/register", json=sent)

    def wait_until(self, what: str, condition: Any, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.01)

    def wait_state(self, name: str, state: str, seconds: float = 20) -> None:
        """Wait until an instance is in a state."""
        self.wait_until(f"{name} is {state}", lambda: self.server.instances.by_name[name].state == state, seconds)

    def wait_idle(self) -> None:
        """Nothing is left of any request."""
        self.wait_until("all requests have ended", lambda: not self.server.cluster.num_requests)
        state = self.server.conductor.state
        assert not state.prefilling
        assert not state.decoding
        self.wait_until("all failures have been told", lambda: not self.server.failures)


@contextlib.contextmanager
def routed(
    members: Sequence[Address],
    conductor: ConductorConfig | None = None,
    settings: ServerSettings | None = None,
    router: RouterSettings | None = None,
    is_ready: bool = True,
) -> Iterator[Routed]:
    """Serve a cluster on a free port; at the end nothing is left of it."""
    settings = settings or ServerSettings(prepare_processes=0)
    server = RouterServer(
        read_model(TINY)[0].config,
        load_tokenizer(TINY),
        CONFIG,
        (NAME,),
        conductor or ConductorConfig(admission="none", is_inline=False),  # so that prompts are read where roles say
        members,
        settings,
        router,
    )
    listener = bind("127.0.0.1", 0)
    tls = None if router is None else router.tls
    http = HttpServer(server, make_router_app(server), tls, needs_certificate=False)
    thread = threading.Thread(target=http.run, args=([listener],), name="router")
    thread.start()
    running = Routed(http, server, listener.getsockname()[1], "http" if tls is None else "https")
    try:
        running.wait_until("the router listens", lambda: http.started)
        if is_ready:
            for member in members:
                running.wait_state(str(member.name), "open")
        yield running
    finally:
        running.clients.close()
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the router doesn't end"


class Door:
    """The way to an instance: a link that is cut and opened again, as if its process died and came back."""

    def __init__(self, instance: Served) -> None:
        self._address = instance.url.partition("://")[2]
        self._proxy = LinkProxy(self._address)
        self.url = f"http://{self._proxy.address}"

    def kill(self) -> None:
        self._proxy.close()

    def revive(self) -> None:
        self._proxy = LinkProxy(self._address, int(self.url.rpartition(":")[2]))

    def stall(self, is_stalled: bool) -> None:
        """Hold back everything, as a machine that hangs."""
        self._proxy.is_stalled = is_stalled


class Liar:
    """A server that says what a real instance says, but for some answers.

    Attributes:
      said: what it answers to a path, instead: fields that are laid over those of the real one, or bytes.
      lines: what it sends to `/resume`.
      status: of that answer. ready: of `/ready`.
      asked: what was sent there.
    """

    def __init__(self, real: Served) -> None:
        self._real, self.said, self.lines = real, dict[str, Any](), list[bytes]()
        self.asked: list[dict[str, Any]] = []
        self.status = self.ready = 200
        routes = [Route(path, self._answer) for path in ("/ready", "/server_info", "/load", "/predictor")]
        app = Starlette(routes=[*routes, Route("/resume", self._resume, methods=["POST"])])
        self._listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), name="liar")

    def __enter__(self) -> "Liar":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def _answer(self, request: StarletteRequest) -> Response:
        path = request.url.path
        said = self.said.get(path, {})
        if isinstance(said, bytes):
            return Response(said)
        answer = httpx.get(self._real.url + path)
        return JSONResponse(answer.json() | said, self.ready if path == "/ready" else answer.status_code)

    async def _resume(self, request: StarletteRequest) -> Response:
        self.asked.append(await request.json())

        async def lines() -> AsyncIterator[bytes]:
            for line in self.lines:
                yield line

        return StreamingResponse(lines(), self.status)


def members_of(instances: Sequence[Served | Door | Liar], roles: str = "") -> list[Address]:
    """Names `p0`, `d1` and so on by the letters of their roles: `p`, `d` or `b`."""
    names = {"p": "prefill", "d": "decode", "b": "both"}
    roles = roles or "b" * len(instances)
    made: Any = [
        (f"{role}{i}", names[role], each.url) for i, (each, role) in enumerate(zip(instances, roles, strict=True))
    ]
    return [Address(*fields) for fields in made]

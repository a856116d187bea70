"""Servers of tests: the real app and HTTP server, in a thread, over an engine of fake devices or the built-in model."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
from fake_device import EOS, MODEL, VOCAB, FakeExecutor
from letter_tokenizer import LetterTokenizer

from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.config import AdmissionLimits
from longctx.serving.executor.executor import Pending, Results
from longctx.serving.scheduler.batch import Batch
from longctx.serving.server.http_server import HttpServer, bind
from longctx.serving.server.server import Server
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.tls import Tls

NAME = "letters"
assert (LetterTokenizer.vocab_size, LetterTokenizer.eos_ids) == (VOCAB, (EOS,))


class HeldExecutor(FakeExecutor):
    """Fake devices whose steps last as long as a test wants.

    Attributes:
      go: steps wait until it is set.
      pause: seconds of each step.
      fail: the next step fails.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go, self.pause, self.fail = threading.Event(), 0.0, False
        self.go.set()

    def submit(self, batch: Batch) -> Pending:
        if self.fail:
            raise ArithmeticError("a device is lost")
        return super().submit(batch)

    def wait(self, pending: Pending) -> Results:
        assert self.go.wait(60)
        time.sleep(self.pause)
        return super().wait(pending)


def fake_engine(num_pages: int = 400, **options: Any) -> Engine:
    """An engine of fake devices, whose texts are letters; time is virtual."""
    config = EngineConfig(
        **{"page_size": 4, "num_pages": num_pages, "max_running": 6, "token_budget": 16, "hash_key": bytes(16)}
        | options
    )
    executor = HeldExecutor(config, ParallelPlan(), num_pages)
    return Engine(MODEL, None, config, executor=executor, clock=executor.clock, tokenizer=LetterTokenizer())


class Served:
    """A running server, and clients of it."""

    def __init__(self, http: HttpServer, thread: threading.Thread, port: int, scheme: str = "http") -> None:
        self.http, self.server, self.thread, self.port = http, http.server, thread, port
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.clients = contextlib.ExitStack()

    @property
    def executor(self) -> HeldExecutor:
        executor: Any = self.server.engine.executor
        return executor

    def http_loop(self) -> asyncio.AbstractEventLoop:
        return self.http.loop

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 20} | options
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options))

    def http_client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": 20} | options)

    def pages_held(self) -> int:
        return self.server.engine.stats().pages_held

    def wait_until(self, what: str, condition: Any, seconds: float = 10) -> None:
        """Wait for a condition; an assertion fails that says what for."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.002)

    def wait_idle(self) -> None:
        """Wait until the engine has nothing to do, and all pages are back."""
        self.wait_until("all requests have ended", lambda: not self.server.engine.stats().running)
        self.wait_until("all pages are back", lambda: self.pages_held() == 0 and not self.server.calls)


@contextlib.contextmanager
def served(
    engine: Engine,
    settings: ServerSettings | None = None,
    limits: AdmissionLimits | None = None,
    names: tuple[str, ...] = (NAME,),
    is_ready: bool = True,
    tls: Tls | None = None,
    **options: Any,
) -> Iterator[Served]:
    """Serve an engine on a free port; at the end nothing is left of it."""
    settings = settings or ServerSettings(prepare_processes=0)
    server = Server(engine, names, settings, limits, **options)
    listener = bind("127.0.0.1", 0)
    http = HttpServer(server, tls=tls)
    thread = threading.Thread(target=http.run, args=([listener],), name="http")
    thread.start()
    running = Served(http, thread, listener.getsockname()[1], "http" if tls is None else "https")
    try:
        running.wait_until("the server listens", lambda: http.started)
        if is_ready:
            running.wait_until("the engine is warm", server.warmed.done, 120)
        yield running
    finally:
        running.clients.close()
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server doesn't end"

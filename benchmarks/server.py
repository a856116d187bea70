"""What HTTP costs: `python -m benchmarks.server [--model MODEL]`, the server beside the bare engine.

- Tokens a second of the same 64 requests through `Engine.generate` and through HTTP: in one call of 64 prompts, in 64
  calls, and in 64 streams.
- Time to first token of one short prompt, of the idle engine and of the idle server.
- The share of a core that 1,000 open streams cost in which nothing happens, as their requests wait for a held step.
- Time in which the engine's thread hands a step's events to 128 streams.
"""

import argparse
import asyncio
import json
import multiprocessing
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import cast

import httpx
import numpy as np

from benchmarks.server_process import cpu_seconds, free_port, serve
from longctx.cli import compile_cache
from longctx.models import Llama, LlamaConfig, load_checkpoint, load_tokenizer, resolve_model
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.simulation import VirtualExecutor

SIZES = {"page_size": 64, "num_pages": 512, "max_running": 64, "token_budget": 256, "max_length": 512}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
REQUESTS, PROMPT, TOKENS, SHORT = 64, 64, 192, 90
LIMITS = httpx.Limits(max_connections=None)
HEADERS = {"content-type": "application/json"}


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random prompts; those of different seeds have no page in common."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, min(vocab, 256), length).tolist() for _ in range(count)]


class Client:
    """Asks a server whose model has this name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def body(self, prompt: list[int], tokens: int, stream: bool) -> bytes:
        fields = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return json.dumps(fields | {"stream": stream}).encode()

    def tokens_per_second(self, prompts: list[list[int]]) -> float:
        async def one(client: httpx.AsyncClient, prompt: list[int]) -> None:
            body = self.body(prompt, TOKENS, stream=False)
            answer = (await client.post("/v1/completions", content=body, headers=HEADERS)).json()
            assert answer["usage"]["completion_tokens"] == TOKENS, answer

        async def run() -> float:
            async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=LIMITS) as client:
                await client.get("/health")
                begun = time.perf_counter()
                await asyncio.gather(*(one(client, prompt) for prompt in prompts))
                return len(prompts) * TOKENS / (time.perf_counter() - begun)

        return asyncio.run(run())

    def tokens_per_second_streamed(self, prompts: list[list[int]]) -> float:
        """Read all streams in one thread, from their sockets: a client of Python's would take more than the server."""
        url = httpx.URL(self.url)
        selector, received = selectors.DefaultSelector(), dict[socket.socket, bytearray]()
        begun = time.perf_counter()
        for prompt in prompts:
            body = self.body(prompt, TOKENS, stream=True)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
            connection = socket.create_connection((url.host, url.port))
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            selector.register(connection, selectors.EVENT_READ)
            received[connection] = bytearray()
        while selector.get_map():
            for key, _ in selector.select():
                connection = cast(socket.socket, key.fileobj)
                part, text = connection.recv(1 << 16), received[connection]
                text += part
                if not part or text.endswith(b"\r\n0\r\n\r\n"):
                    selector.unregister(connection)
                    connection.close()
        seconds = time.perf_counter() - begun
        assert all(text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for text in received.values()), received
        return len(prompts) * TOKENS / seconds

    def tokens_per_second_of_one_call(self, prompts: list[list[int]]) -> float:
        fields = {"prompt": prompts, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=self.url, timeout=600) as client:
            client.get("/health")
            begun = time.perf_counter()
            answer = client.post("/v1/completions", json={"model": self.model} | fields).json()
            assert answer["usage"]["completion_tokens"] == len(prompts) * TOKENS
            return len(prompts) * TOKENS / (time.perf_counter() - begun)

    def first_token(self, prompt: list[int]) -> float:
        body = self.body(prompt, 2, stream=True)
        with httpx.Client(base_url=self.url, timeout=600) as client:
            client.get("/health")  # so that the connection is there
            begun = time.perf_counter()
            with client.stream("POST", "/v1/completions", content=body, headers=HEADERS) as response:
                times = [time.perf_counter() - begun for _ in response.iter_raw()]
        return times[0]


def engine_tokens_per_second(engine: Engine, prompts: list[list[int]]) -> float:
    begun = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return len(prompts) * TOKENS / (time.perf_counter() - begun)


def engine_first_token(engine: Engine, prompt: list[int]) -> float:
    begun = time.perf_counter()
    stream = engine.stream([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    next(stream)
    seconds = time.perf_counter() - begun
    list(stream)
    return seconds


def take_turns(contenders: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Median of each; they get a number that is new in each round, the first of which is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            time.sleep(0.5)  # idle threads of the one before spin for a while
            found[name].append(run(number))
    return {name: statistics.median(values[1:]) for name, values in found.items()}


# Idle streams.


def serve_held(port: int) -> None:
    """A server whose first step never ends; the clients' streams are open, and wait."""
    from longctx.serving.server.http_server import HttpServer, bind
    from longctx.serving.server.server import Server
    from longctx.serving.server.settings import ServerSettings

    executor = VirtualExecutor(lambda batch: 0.01, 259)
    executor.wait = lambda pending: threading.Event().wait()  # type: ignore[assignment, method-assign]
    config = EngineConfig(num_pages=512, max_running=64, token_budget=256)
    model = Llama(LlamaConfig(259, 8, 8, 4, 1, 1, 8, max_positions=512))
    engine = Engine(model, None, config, executor=executor, clock=time.monotonic, tokenizer=load_tokenizer(TINY))
    server = Server(engine, ("held",), ServerSettings(prepare_processes=0))
    HttpServer(server).run([bind("127.0.0.1", port)])


def idle_streams(count: int, seconds: float) -> float:
    """The share of a core that so many idle streams cost, more than none."""

    async def hold(client: httpx.AsyncClient, opened: asyncio.Event) -> None:
        body = {"model": "held", "prompt": "Nobody answers.", "max_tokens": 8, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            opened.set()
            await response.aread()

    async def run(pid: int, url: str) -> float:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=LIMITS) as client:
            for _ in range(100):
                try:
                    if (await client.get("/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    await asyncio.sleep(0.5)
            shares = [await busy(pid)]
            opened = [asyncio.Event() for _ in range(count)]
            tasks = [asyncio.create_task(hold(client, each)) for each in opened]
            await asyncio.gather(*(each.wait() for each in opened))
            shares.append(await busy(pid))
            for task in tasks:
                task.cancel()
        return shares[1] - shares[0]

    async def busy(pid: int) -> float:
        used, begun = cpu_seconds(pid), time.perf_counter()
        await asyncio.sleep(seconds)
        return (cpu_seconds(pid) - used) / (time.perf_counter() - begun)

    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve_held, args=(port,))
    process.start()
    try:
        assert process.pid is not None
        return asyncio.run(run(process.pid, f"http://127.0.0.1:{port}"))
    finally:
        process.kill()


def delivery_seconds(count: int, rounds: int) -> float:
    """Median seconds in which the engine's thread hands the events of one step to so many streams."""
    from longctx.serving.engine.thread import EngineThread
    from longctx.serving.server.streams import EventDispatcher, Stream

    taken: list[float] = []

    class Timed(EngineThread):
        def _deliver(self) -> None:
            num_events, begun = len(self._events), time.thread_time()
            super()._deliver()
            if num_events == count:
                taken.append(time.thread_time() - begun)

    async def run() -> None:
        dispatcher = EventDispatcher(asyncio.get_running_loop())
        executor = VirtualExecutor(lambda batch: 0.01, 259)
        config = EngineConfig(num_pages=count * 8, max_running=count, token_budget=512)
        model = Llama(LlamaConfig(259, 8, 8, 4, 1, 1, 8, max_positions=512))
        engine = Engine(model, None, config, executor=executor, clock=executor.clock)
        with Timed(engine, flush=dispatcher.flush) as thread:
            params = SamplingParams(max_tokens=rounds, ignore_eos=True)
            for i in range(count):
                stream = Stream(10**6, lambda: None)
                prepared = engine.prepare(Request([i % 256, 2, 3], params))
                thread.submit(prepared, dispatcher.sink(stream, 0, is_whole=False))
            await asyncio.to_thread(thread.wait_idle, 60)

    asyncio.run(run())
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="directory, .gguf file or name of the hub; default: the built-in")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    compile_cache.enable(True)
    print(f"a step's delivery to 128 streams: {1e3 * delivery_seconds(128, 300):.3f} ms (aim 0.5)", flush=True)
    print(f"1,000 idle streams: {100 * idle_streams(1000, 10):.2f} % of a core (aim 1)", flush=True)

    path = resolve_model(options.model)
    model, params = load_checkpoint(path)
    engine = Engine(model, params, EngineConfig(**SIZES), tokenizer=load_tokenizer(path))  # type: ignore[arg-type]
    engine.warm_up()
    vocab = model.config.vocab_size
    is_builtin = options.model == TINY
    with serve(*FLAGS, *([] if is_builtin else ["--model", str(options.model)])) as server:
        client = Client(server.url)
        report_rates(engine, client, vocab, options.rounds)
        report_first_tokens(engine, client, options.rounds)


def report_rates(engine: Engine, client: Client, vocab: int, rounds: int) -> None:
    def prompts(number: int) -> list[list[int]]:
        return make_prompts(REQUESTS, PROMPT, vocab, number)

    rates = take_turns(
        {
            "Engine.generate": lambda number: engine_tokens_per_second(engine, prompts(number)),
            "HTTP, one call": lambda number: client.tokens_per_second_of_one_call(prompts(number)),
            "HTTP, whole": lambda number: client.tokens_per_second(prompts(number)),
            "HTTP, streamed": lambda number: client.tokens_per_second_streamed(prompts(number)),
        },
        rounds,
    )
    for name, rate in rates.items():
        print(f"{name:<18}{rate:>9,.0f} tokens/s {rate / rates['Engine.generate']:>6.2f} of the engine's", flush=True)


def report_first_tokens(engine: Engine, client: Client, rounds: int) -> None:
    assert engine.tokenizer is not None
    encode = engine.tokenizer.encode

    def prompt(number: int) -> list[int]:
        """English text, whose next token is text too: half a character would be held back."""
        return list(encode(f"Day {number}. " + "The old road crossed the field, and we walked on. " * SHORT)[:SHORT])

    ttfts = take_turns(
        {
            "engine": lambda number: engine_first_token(engine, prompt(number)),
            "HTTP": lambda number: client.first_token(prompt(number)),
        },
        4 * rounds,
    )
    for name, seconds in ttfts.items():
        print(
            f"TTFT, {name:<12}{1e3 * seconds:>9.1f} ms {seconds / ttfts['engine']:>14.2f} of the engine's", flush=True
        )


if __name__ == "__main__":
    main()

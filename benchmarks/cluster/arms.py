"""The four servers, and the routers that take turns before them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server_process import COMMAND, Process, free_port, serve_command
from longctx.serving import EngineConfig

POLICIES = ("random", "least_loaded", "cache_aware", "kvcache_centric")
OURS = (*POLICIES, "kvcache_centric, mixed", "kvcache_centric, 4 coupled")
PEERS = ("vllm-router", "vllm-router, 4 coupled", "sglang-router, 4 coupled")
FLAGS: dict[str, Any] = {
    "max_length": 16_384,
    "num_pages": 1_024,
    "max_running": 32,
    "token_budget": 256,
    "buckets": "8,64,256",
}
"""Of every server, by their names."""
SECRET = "0123456789abcdef" * 4
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKIO_WORKER_THREADS": "1"}


@dataclass(frozen=True)
class Instance:
    """A server of the cluster."""

    process: Process
    role: str
    events: str
    replay: str

    @property
    def name(self) -> str:
        return self.process.name


def roles_of(arm: str, roles: Mapping[str, str]) -> dict[str, str]:
    """Roles of servers by their names: in `4 coupled` all do both, in `mixed` those that decode do."""
    shape = arm.partition(", ")[2]
    own = {"4 coupled": ("prefill", "decode"), "mixed": ("decode",)}.get(shape, ())
    return {name: "both" if role in own else role for name, role in roles.items()}


def engine_flags() -> list[str]:
    """`FLAGS` as a command line has them."""
    return [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def engine_config() -> EngineConfig:
    """What they say of an engine."""
    return EngineConfig(**FLAGS | {"buckets": tuple(map(int, FLAGS["buckets"].split(",")))})


def measure(folder: Path, repeats: int = 3) -> None:
    """Measure a server's steps (`profile.json`) and its thread (`host.json`) on one core, while nothing else runs."""
    steps = [*COMMAND, "profile", str(folder / "profile.json"), "--quiet", "--repeats", str(repeats), "--check", "0"]
    thread = [sys.executable, "-m", "benchmarks.cluster.host", str(folder / "host.json")]
    for command in ([*steps, *engine_flags()], thread):
        command = ["taskset", "-c", "0", *command]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | ENVIRONMENT)


def make_instances(folder: Path) -> list[Instance]:
    """Two servers that prefill, and two that decode, not started; one of each runs on a core."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    found = []
    for role in ("prefill", "decode"):
        for number in range(2):
            name, (events, replay) = f"{role}-{number}", (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            more = ["--role", "both", "--kv-secret-file", str(secret), "--kv-plain", "--shutdown-timeout", "5"]
            more += ["--kv-events", events, "--kv-events-replay", replay, "--profile", str(folder / "profile.json")]
            command, log = serve_command(*engine_flags(), *more), folder / f"{name}.log"
            process = Process(name, command, log, number, environment=ENVIRONMENT)
            found.append(Instance(process, role, events, replay))
    return found


@contextlib.contextmanager
def started(instances: Sequence[Instance]) -> Iterator[None]:
    """All at once, ready inside."""
    try:
        for each in instances:
            each.process.start()
        for each in instances:
            each.process.wait_until_ready()
        yield
    finally:
        for each in instances:
            if each.process.is_alive:
                each.process.stop()


def peer_program(name: str) -> Path | None:
    """The program of another's router, from `make .venv/installed-routers`; None: it is not there."""
    found = Path(sys.prefix) / "routers" / name / "bin" / name
    return found if found.exists() else None


def our_router(policy: str, instances: Sequence[Instance], folder: Path) -> Process:
    """`longctx serve --cluster` before the servers, with a policy and the roles of the arm."""
    name, roles = policy.partition(", ")[0], roles_of(policy, {each.name: each.role for each in instances})
    # Nothing is rejected: what finds no room waits, as where one decode server does the work of two.
    settings = {"policy": name, "admission": "none", "defer_seconds": 120.0, "launcher": "static"}
    engine = {**FLAGS, "profile": str(folder / "profile.json"), "kv_secret_file": str(folder / "secret")}
    tables = ["[cluster]", *_lines(settings), "[engine]", *_lines(engine)]
    for each in instances:
        tables += [
            "[[instances]]",
            *_lines({"name": each.name, "role": roles[each.name], "url": each.process.url}),
        ]
    file = folder / f"{policy}.toml"
    file.write_text("\n".join(tables) + "\n")
    return Process(policy, serve_command("--cluster", str(file)), folder / f"{policy}.log", environment=ENVIRONMENT)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def peer_router(arm: str, instances: Sequence[Instance], folder: Path) -> Process | None:
    """Another's router before the same servers; None: it is not installed.

    `vllm-router` by itself has two servers prefill and two decode, as ours does. sglang-router would need SGLang's own
    servers for that: it sees four that do both.
    """
    name = arm.partition(",")[0]
    program = peer_program(name)
    if program is None:
        return None
    command = [str(program), *(["launch"] if name == "sglang-router" else [])]
    command += ["--port", "{port}", "--prometheus-port", str(free_port()), "--policy", "cache_aware"]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command += ["--health-success-threshold", "1", "--log-level", "error"]
    if arm == "vllm-router":
        command.append("--vllm-pd-disaggregation")
        for instance in instances:
            command += [f"--{instance.role}", instance.process.url]
    else:
        command += ["--worker-urls", *(instance.process.url for instance in instances)]
    return Process(arm, command, folder / f"{name}.log", ready="/health", environment=ENVIRONMENT)

"""The four servers, and the routers that take turns before them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.processes import Process, metric, serve_command
from benchmarks.server_process import free_port

POLICIES = ("random", "least_loaded", "cache_aware", "kvcache_centric")
PEERS = ("vllm-router", "vllm-router, 4 coupled", "sglang-router, 4 coupled")
SIZES = ["--max-length", "16384", "--num-pages", "1024", "--max-running", "16"]
SIZES += ["--token-budget", "256", "--buckets", "8,64,256"]
SECRET = "0123456789abcdef" * 4


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

    @property
    def computed(self) -> float:
        """Tokens of prompts that it has computed since it was started."""
        return metric(self.process, "computed_prompt_tokens_total")


def make_instances(folder: Path, sizes: Sequence[str] = SIZES, pairs: int = 2) -> list[Instance]:
    """Servers that prefill, and as many that decode, not started; one of each runs on a core."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    found = []
    for role in ("prefill", "decode"):
        for number in range(pairs):
            name, (events, replay) = f"{role}-{number}", (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            flags = [*sizes, "--role", "both", "--kv-secret-file", str(secret), "--kv-plain"]
            flags += ["--kv-events", events, "--kv-events-replay", replay, "--shutdown-timeout", "5"]
            process = Process(name, serve_command(*flags), folder / f"{name}.log", core=number)
            found.append(Instance(process, role, events, replay))
    return found


def peer_program(name: str) -> Path | None:
    """The program of another's router, from `make .venv/installed-routers`; None: it is not there."""
    found = Path(sys.prefix) / "routers" / name / "bin" / name
    return found if found.exists() else None


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
    return Process(arm, command, folder / f"{name}.log", ready="/health")

"""Files of `examples/` for Slurm as jobs of a real one, on hosts of this machine, which takes Debian's slurm-wlm."""

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from host_cluster import ENGINE, JOBS, PROGRAM, ROOT, START, Answer, ask, check, summary, written
from slurm_cluster import END, NUM_CPUS, SlurmCluster, missing_slurm

from longctx.models.builtin import TINY
from longctx.serving.distributed.environment import make_group_secret

EXAMPLES = ROOT / "examples"
REQUEUED = 60.0  # seconds from the death of a rank until the job runs again
INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
def cluster(hosts: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlurmCluster]:
    """Start Slurm on two hosts, or as many as the test's parameter says."""
    reason = missing_slurm()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster(tmp_path, getattr(request, "param", 2)) as running:
        yield running


class Job:
    """A job that runs one of the scripts, with the built-in model on CPUs.

    Args:
      example: folder of the script.
      arguments: of the script, after the checkpoint.
      port: of the server.
      host: of the server; those before it are left out, so that slurmctld's may run no process of the job.
    """

    def __init__(
        self, cluster: SlurmCluster, folder: Path, example: Path, *arguments: str, port: int = 8000, host: int = 0
    ) -> None:
        self.cluster, self.output, self.host = cluster, folder / "output", cluster.hosts[host]
        self.url = f"http://{self.host.address}:{port}"
        program = folder / "bin" / "longctx"
        program.parent.mkdir()
        # Processes that it spawns import it, and are not to serve too.
        program.write_text(f"#!{sys.executable}\nif __name__ == '__main__':\n    {PROGRAM}\n")
        program.chmod(0o755)
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = ["sbatch", "--parsable", f"--output={self.output}", "longctx.sbatch", str(TINY), *arguments]
        if host:
            command.insert(1, f"--exclude={','.join(each.address for each in cluster.hosts[:host])}")
        self.id = cluster.call(*command, folder=example, variables=variables).strip()

    def has(self, **fields: object) -> bool:
        """Whether Slurm shows these values of the job."""
        return {name: str(value) for name, value in fields.items()}.items() <= self.cluster.job(self.id).items()

    def wait(self, condition: Callable[[], bool], seconds: float, wanted: str) -> None:
        self.cluster.wait(condition, seconds, wanted, self.output)

    def get(self, path: str, key: str = "") -> httpx.Response | None:
        """Return the server's answer; None: it does not listen."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with self.host.inside(), httpx.Client(trust_env=False, timeout=5) as http:
            try:
                return http.get(f"{self.url}{path}", headers=headers)
            except httpx.TransportError:
                return None

    def is_ready(self) -> bool:
        answer = self.get("/ready")
        return answer is not None and answer.status_code == 200

    def answers(self, between: Callable[[], object] = lambda: None) -> list[Answer]:
        """Return the answers to six requests of clients, and do something after all have been sent."""

        async def run() -> list[Answer]:
            headers = {"authorization": "Bearer a-key-of-clients"}
            async with httpx.AsyncClient(timeout=150, trust_env=False) as http:
                asking = [asyncio.create_task(ask(http, self.url, job, headers)) for job in JOBS[:6]]
                await asyncio.sleep(1.0)
                between()
                return await asyncio.gather(*asking)

        with self.host.inside():
            answers = asyncio.run(run())
        print(f"\nSlurm: {summary(answers)}")
        check(answers)
        return answers

    def cancel_while_it_answers(self, num_tasks: int) -> None:
        """All requests that run are answered, and all processes end by themselves."""
        before = len(self.output.read_text())
        self.answers(lambda: self.cluster.call("scancel", self.id))
        self.wait(lambda: not self.cluster.ranks(self.id, num_tasks), END, "all processes have ended")
        self.wait(lambda: self.has(JobState="CANCELLED"), END, "the job is cancelled")
        assert not re.findall(r".*(?:is gone|exit code).*", self.output.read_text()[before:])


@pytest.mark.slow
def test_a_server_whose_rank_is_killed_is_requeued_and_answers_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    """With each rank once: tokens are the same, and the output of earlier runs is kept."""
    keys = written(tmp_path / "keys", "a-key-of-clients")
    job = Job(cluster, tmp_path, EXAMPLES / "llama3_server", keys, "--tensor=2", *ENGINE)
    job.wait(job.is_ready, START, "the server is ready")
    assert f"TresPerTask=cpu:{NUM_CPUS}" in cluster.call("scontrol", "show", "step", f"{job.id}.0")
    before = job.answers()
    for restarts, rank in enumerate((1, 0), 1):
        os.kill(cluster.ranks(job.id, 2)[rank], signal.SIGKILL)
        is_requeued = lambda restarts=restarts: job.has(JobState="RUNNING", Restarts=restarts)  # noqa: E731
        job.wait(is_requeued, REQUEUED, f"the job runs after {restarts} restarts")
        job.wait(job.is_ready, START, f"the server is ready after the death of rank {rank}")
        assert [each.tokens for each in job.answers()] == [each.tokens for each in before]
    assert all(f"task {rank}: Killed" in job.output.read_text() for rank in (0, 1))
    job.cancel_while_it_answers(2)
    assert job.has(Restarts=2)


@pytest.mark.slow
def test_a_job_that_generates(cluster: SlurmCluster, tmp_path: Path) -> None:
    prompt = written(tmp_path / "prompt", "The pass key of lemon is 48213.\nQ: What is the pass key of lemon?\nA: ")
    flags = ("--tensor=2", "--max-tokens=5", "--chunk-size=32", "--quiet")
    job = Job(cluster, tmp_path, EXAMPLES / "multi_host", prompt, *flags)
    job.wait(lambda: job.has(JobState="COMPLETED", ExitCode="0:0"), START, "the job is completed")
    assert "48213" in job.output.read_text()


def replace(path: Path, **values: Any) -> None:
    """Give flags or fields of a TOML file other values."""
    text = path.read_text()
    for name, value in values.items():
        text, count = re.subn(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [6], indirect=True)
def test_a_cluster_whose_processes_are_killed_answers_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One of the processes of an instance of two, and then the router: both are started again."""
    folder, secrets = tmp_path / "cluster", tmp_path / "secrets"
    shutil.copytree(EXAMPLES / "cluster", folder)
    sizes = {"page-size": 16, "max-length": 4096, "max-running": 8}
    replace(folder / "static.toml", **sizes, admission='"none"')
    replace(folder / "engine.toml", **sizes, **{"token-budget": "64\nbuckets = '64'\nnum-pages = 600"})
    replace(folder / "engine.toml", **{"kv-host-bytes": '"4MiB"'})
    script = folder / "instance.sh"
    script.write_text(script.read_text().replace("--tensor 8", "--tensor 1"))
    secrets.mkdir()
    keys = {name: make_group_secret() for name in INSTANCES}
    files = {name: f"router {key} scopes=migrate,metrics" for name, key in keys.items()}
    files |= {"instances": "\n".join(f"{name} {key}" for name, key in keys.items())}
    files |= {"pages": make_group_secret(), "admins": "a-key-of-admins", "clients": "ann a-key-of-clients"}
    for name, text in files.items():
        written(secrets / name, text)
    job = Job(cluster, tmp_path, folder, str(secrets), port=8080)

    def states() -> dict[str, str]:
        answer = job.get("/cluster/instances", "a-key-of-admins")
        return {} if answer is None else {each["name"]: each["state"] for each in answer.json()["instances"]}

    def all_are_open() -> bool:
        return states() == dict.fromkeys(INSTANCES, "open")

    job.wait(all_are_open, START, "all instances are open")
    for number in range(2):
        assert "TresPerTask=cpu:" in cluster.call("scontrol", "show", "step", f"{job.id}.{number}")
    before = job.answers()
    shell = cluster.ranks(job.id, 6)[1]
    [server] = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)
    job.wait(lambda: states()["prefill-0"] == "dead", END, "the instance is known to be dead")
    job.wait(all_are_open, START, "all instances are open again")
    assert [each.tokens for each in job.answers()] == [each.tokens for each in before]
    os.kill(cluster.ranks(job.id, 1)[0], signal.SIGKILL)
    job.wait(lambda: not states(), END, "the router does not answer")
    job.wait(all_are_open, START, "all instances are open at the new router")
    assert [each.tokens for each in job.answers()] == [each.tokens for each in before]
    job.cancel_while_it_answers(6)

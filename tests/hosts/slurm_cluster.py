"""Slurm on hosts that are network namespaces of this machine: munged, slurmctld and one slurmd a host."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from network import Host, OnNetwork, end_all_with, processes_with

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
NUM_GPUS, NUM_CPUS = 8, 16  # of a host, as Slurm believes
START = 30.0  # seconds until the daemons answer
END = 20.0  # seconds until jobs and daemons are gone
# A host that is down takes jobs when it is back, with ReturnToService.
_CONF = """\
ClusterName=longctx
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={cred_expire}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
NodeName={nodes} CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
SlurmdTimeout={timeout}
ReturnToService=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing_slurm() -> str | None:
    """Return why Slurm can't be started here; None: it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: Debian's package slurm-wlm has them"
    return None if os.geteuid() == 0 else "slurmd starts jobs only as root"


class SlurmCluster(OnNetwork):
    """A context manager: all hosts are idle inside, and no daemon or job is left after it.

    A host is known to Slurm by its address, which is also its name.

    Args:
      folder: for the files of the daemons, of a path short enough for sockets.
      slurmd_timeout: seconds after which a host that slurmctld does not reach is down, by default as Slurm has it.
      cred_expire: seconds for which a job that is requeued waits, until its credentials have expired; Slurm has 120 s.
    """

    def __init__(self, folder: Path, num_hosts: int = 2, slurmd_timeout: int = 300, cred_expire: int = 5) -> None:
        super().__init__(num_hosts)
        self._folder, self._timeout, self._cred_expire = folder, slurmd_timeout, cred_expire
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def hosts(self) -> list[Host]:
        """The hosts, of which the first has slurmctld too."""
        return self.network.hosts

    def _start(self) -> None:
        folder, nodes = self._folder, f"10.77.0.[1-{len(self.hosts)}]"
        values = {"first": self.hosts[0].address, "nodes": nodes, "cpus": NUM_CPUS, "gpus": NUM_GPUS}
        values |= {"timeout": self._timeout, "cred_expire": self._cred_expire}
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, **values))
        for number in range(NUM_GPUS):  # Slurm counts any files as devices
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{NUM_GPUS - 1}]\n")
        for name in ("state", *(f"spool-{host.address}" for host in self.hosts)):
            (folder / name).mkdir()
        key, socket = folder / "munge.key", folder / "munge.socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        # --force: folders above the temporary one may be writable for others.
        self._daemon(
            self.hosts[0], "munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *files
        )
        self.wait(socket.exists, START, "munged listens")
        self._daemon(self.hosts[0], "slurmctld", "-D")
        for host in self.hosts:
            self._daemon(host, "slurmd", "-D", "-N", host.address)
        self.wait(lambda: self._states() == ["idle"] * len(self.hosts), START, "all hosts are idle")

    def _daemon(self, host: Host, *command: str) -> None:
        with host.inside(), (self._folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self._environment, stdout=log, stderr=log))

    @property
    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return own | {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def call(self, *command: str, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        """Run a program of Slurm on the first host, with variables added to its environment; returns its output."""
        environment = self._environment | dict(variables or {})
        with self.hosts[0].inside():
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _states(self) -> list[str]:
        try:
            return self.call("sinfo", "--noheader", "--Node", "--format=%t").split()
        except AssertionError:  # slurmctld does not listen yet
            return []

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job: JobState, Restarts and the like."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def ranks(self, job: str, num_tasks: int) -> dict[int, int]:
        """Return the process ids of the tasks of a job's step with so many, by their ranks."""
        wanted = {"SLURM_CONF": str(self._folder / "slurm.conf"), "SLURM_JOB_ID": job}
        found = {}
        for pid, variables in processes_with(SLURM_STEP_NUM_TASKS=str(num_tasks), **wanted):
            if variables.get("SLURM_TASK_PID") == str(pid):  # what a task starts inherits its variables
                found[int(variables["SLURM_PROCID"])] = pid
        return found

    def wait(self, condition: Callable[[], bool], seconds: float, wanted: str, log: Path | None = None) -> None:
        """Wait until a condition is true. AssertionError: it is not in time; it has the end of a log."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                log = log or self._folder / "daemons.log"
                raise AssertionError(f"not within {seconds} s: {wanted}\n{log.read_text()[-3000:]}")
            time.sleep(0.3)

    def __exit__(self, *error: object) -> None:
        try:
            if self._states():
                self.call("scancel", "--user=root", "--signal=KILL", "--full")
                self.call("scancel", "--user=root")
                self.wait(lambda: not self.call("squeue", "--noheader"), END, "all jobs have ended")
        finally:
            for each in self._daemons:
                each.kill()
                each.wait()
            end_all_with(SLURM_CONF=str(self._folder / "slurm.conf"))
            self.network.__exit__()

"""Scripts of `examples/` for Slurm, with programs in place of Slurm's; tests/hosts/test_slurm.py runs Slurm itself."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
REQUEUED = [path for path in sorted(EXAMPLES.glob("*/*.sbatch")) if "#SBATCH --requeue" in path.read_text()]


def environment(folder: Path, **programs: str) -> dict[str, str]:
    """Return an environment in which these programs run the shell scripts that are given."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "16"}
    return os.environ | variables | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("path", REQUEUED, ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    ("status", "restarts", "seconds", "is_requeued"),
    [
        *((70, 0, 5, True), (137, 0, 5, True), (134, 2, 5, True), (137, 3, 599, False), (70, 9, 600, True)),
        *((0, 0, 5, False), (1, 0, 5, False), (143, 0, 5, False)),
    ],
)
def test_a_job_is_requeued_where_a_process_died(
    path: Path, status: int, restarts: int, seconds: int, is_requeued: bool, tmp_path: Path
) -> None:
    """A status of 70, or of 128 and a signal; a wrong flag (1), SIGTERM (143) and a fourth early death end it."""
    log, clock = tmp_path / "log", tmp_path / "clock"
    clock.write_text("1000")
    run = f'echo "srun $SRUN_CPUS_PER_TASK $LONGCTX_GROUP_SECRET $*" >> {log}; echo {1000 + seconds} > {clock}'
    programs = {
        "longctx": "echo secret",
        "srun": f"{run}; exit {status}",
        "date": f"cat {clock}",
        "scontrol": f'echo "scontrol $*" >> {log}',
    }
    variables = environment(tmp_path, **programs) | {"SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["sh", path, "MODEL", "FILE", "--tensor=2"], env=variables, check=False)
    assert done.returncode == status
    first, *rest = log.read_text().splitlines()
    assert first.startswith("srun 16 secret --kill-on-bad-exit=1 longctx ")
    assert first.endswith(" --tensor=2")
    assert rest == ["scontrol requeue 77"] * is_requeued


@pytest.mark.parametrize("path", REQUEUED, ids=lambda path: path.parent.name)
def test_a_job_whose_step_is_over_is_requeued_though_srun_waits(path: Path, tmp_path: Path) -> None:
    """And not while slurmctld does not answer, or does not know the step yet."""
    log, steps = tmp_path / "log", tmp_path / "steps"
    answers = ("77.batch", "", "77.0 77.batch", "", "77.batch", "77.batch")
    steps.write_text("\n".join(answers))
    programs = {
        "longctx": "echo secret",
        "srun": 'trap "exit 70" TERM; while :; do /bin/sleep 0.05; done',
        "squeue": f'sed -n 1p {steps}; sed -i 1d {steps}; echo squeue "$*" >> {log}',
        "sleep": "exec /bin/sleep 0.2",
        "scontrol": f'echo "scontrol $*" >> {log}',
    }
    done = subprocess.run(["sh", path, "MODEL", "FILE"], env=environment(tmp_path, **programs), timeout=20, check=False)
    assert done.returncode == 70
    *asked, last = log.read_text().splitlines()
    assert asked == ["squeue --noheader --jobs=77 --steps --format=%i"] * 5
    assert last == "scontrol requeue 77"


def test_there_are_scripts_that_requeue() -> None:
    assert [path.parent.name for path in REQUEUED] == ["llama3_server", "multi_host"]


def test_an_instance_is_started_again_until_it_is_told_to_end(tmp_path: Path) -> None:
    """SIGTERM comes to all processes of a step at once; then the script ends with 0, as what it started does."""
    log = tmp_path / "log"
    server = f'trap "exit 0" TERM; echo >> {log}; while :; do /bin/sleep 0.05; [ -e {tmp_path}/die ] && exit 70; done'
    variables = environment(tmp_path, longctx=server, sleep="exec /bin/sleep 0.1") | {"SLURM_PROCID": "4"}
    (tmp_path / "die").touch()
    with subprocess.Popen(["sh", EXAMPLES / "cluster/instance.sh"], env=variables, start_new_session=True) as process:
        try:
            wait_for(log, 2)  # twice: it was started again
            (tmp_path / "die").unlink()
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(log: Path, lines: int) -> None:
    """Wait until a file has so many lines."""
    end = time.monotonic() + 20
    while not log.exists() or len(log.read_text().splitlines()) < lines:
        assert time.monotonic() < end
        time.sleep(0.05)

"""One run: cases in a worker process, time limits, and a file of results that is whole at any time.

The worker runs case after case, since starting JAX on a GPU takes seconds. A case that doesn't answer in time, or ends
the worker, costs only itself: the next one gets a new worker. A worker is also replaced where a case says that its
device may be unusable.
"""

import contextlib
import datetime
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from gpu_cases import STAGES, Case

HERE = Path(__file__).parent
STARTING = 60.0
LEAST_SECONDS = 4.0  # a case with less than this left is not begun
MAX_START_FAILURES = 2
RESULTS = "gpu.json"

Result = dict[str, Any]


class Worker:
    """A process that runs cases one at a time. What it prints goes to a log."""

    def __init__(self, log: Path, rehearse: bool, flags: str = "") -> None:
        read, write = os.pipe()
        paths = (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        if flags:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
        self.flags = flags
        command = [sys.executable, str(HERE / "gpu_worker.py"), str(write), *["--rehearse"] * rehearse]
        self._log, self._start_of_output = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[write], env=environment
            )
        os.close(write)
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, fd: int) -> None:
        with open(fd, encoding="utf-8") as replies:
            for line in replies:
                self._replies.put(json.loads(line))
        self._replies.put(None)

    def reply(self, until: float) -> dict[str, Any] | None:
        """The next reply; None if the process has ended.

        Raises:
          TimeoutError: there is none by then, on the clock of `time.monotonic`.
        """
        try:
            return self._replies.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None

    def ask(self, case: Case) -> None:
        assert self.process.stdin is not None
        self._start_of_output = self._log.stat().st_size
        request = {"function": case.function, "arguments": case.arguments}
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `reply` says so
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def ending(self) -> str:
        """How the process ended, and the last lines that it printed since the case began."""
        status = self.process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        with self._log.open("rb") as log:
            log.seek(self._start_of_output)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return "; ".join([how, *(line.strip() for line in lines[-3:])])[:600]


class Run:
    """Runs cases in turn, and writes what is known to `folder` after each.

    Args:
      folder: gets `gpu.json`, and what workers print as `gpu.log`.
      cases: all that will be asked for, which the file lists from the start.
      minutes: of the whole run. Stages share it in the proportions of `STAGES`; what one leaves, the next ones have.
      rehearse: small sizes on a CPU, with interpreted kernels.
    """

    def __init__(self, folder: Path, cases: Sequence[Case], minutes: float, rehearse: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._log, self._rehearse = folder / RESULTS, folder / "gpu.log", rehearse
        self._log.unlink(missing_ok=True)
        self._worker: Worker | None = None
        self._start_failures = self._num_taken = 0
        self.began, self._seconds = time.monotonic(), 60 * minutes
        self._stages = {case.stage for case in cases}
        self.record: dict[str, Any] = {
            "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "minutes": minutes,
            "rehearsal": rehearse,
            "finished": False,
            "cases": {
                str(case): {"stage": case.stage, "status": "not run", "reason": "the run was cut off before it"}
                for case in cases
            },
        }
        self._write()

    def take(self, case: Case) -> Result:
        """Run a case, unless its time is up; its result, as the file has it."""
        result = self.record["cases"][str(case)]
        seconds, reason = self._allowed(case)
        if reason:
            result |= {"status": "not run", "reason": reason}
        else:
            result["reason"] = "the run was cut off in it"
            self._write()
            begun = time.monotonic()
            result |= self._run(case, seconds, result)
            result["seconds"] = round(time.monotonic() - begun, 2)
        self._num_taken += 1
        self._write()
        return result

    def close(self) -> None:
        """End the worker. A run in which every case had its turn has finished, whatever came of them."""
        if self._worker is not None:
            self._end_worker()
        self.record["finished"] = self._num_taken == len(self.record["cases"])
        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        self._write()

    @property
    def num_devices(self) -> int:
        versions = self.record["cases"].get("device/versions", {})
        return int(versions.get("figures", {}).get("devices", 1))

    def _allowed(self, case: Case) -> tuple[float, str]:
        """Seconds that a case may take, or why it is not run."""
        if case.devices > self.num_devices:
            return 0, f"needs {case.devices} GPUs, found {self.num_devices}"
        if self._start_failures > MAX_START_FAILURES:
            return 0, "workers do not start"
        left = self.end_of(case.stage) - time.monotonic()
        if left < LEAST_SECONDS:
            return 0, "its stage's time was up"
        return min(case.limit, left), ""

    def end_of(self, stage: str) -> float:
        """When a stage's time is up, on the clock of `time.monotonic`."""
        used = [name for name in STAGES if name in self._stages and (name != "rings" or self.num_devices > 1)]
        if stage not in used:
            return self.began + self._seconds
        ends = list(accumulate(STAGES[name][0] for name in used))
        return self.began + self._seconds * ends[used.index(stage)] / ends[-1]

    def _run(self, case: Case, seconds: float, result: Result) -> Result:
        until = time.monotonic() + seconds
        if self._worker is not None and self._worker.flags != case.flags:
            self._end_worker()
        if self._worker is None:
            self._worker = Worker(self._log, self._rehearse, case.flags)
            if failure := self._failure(case, min(until, time.monotonic() + STARTING), "starting JAX"):
                self._start_failures += 1
                return failure
            self._start_failures = 0
        self._worker.ask(case)
        while True:
            if failure := self._failure(case, until, f"{seconds:.0f} s"):
                return failure
            reply = self._reply
            if "status" not in reply:  # some of its figures, before the rest
                result["figures"] = result.get("figures", {}) | reply["figures"]
                self._write()
                continue
            if reply.pop("is_unusable", False):
                self._end_worker()
            reply["figures"] = result.get("figures", {}) | reply["figures"]
            return reply

    def _failure(self, case: Case, until: float, waited: str) -> Result | None:
        """Wait for a reply, and leave it in `_reply`; a result instead if none came."""
        assert self._worker is not None
        try:
            reply = self._worker.reply(until)
        except TimeoutError:
            self._end_worker()
            if until >= self.end_of(case.stage) - 1:
                return {"status": "not run", "reason": f"cut off after {waited}: its stage's time was up"}
            return {"status": "hung", "reason": f"no answer in {waited}"}
        if reply is None:
            ending = self._worker.ending
            self._end_worker()
            return {"status": "crashed", "reason": ending}
        self._reply = reply
        return None

    def _end_worker(self) -> None:
        assert self._worker is not None
        self._worker.end()
        self._worker = None

    def _write(self) -> None:
        """Replace the file at once, so that no reader and no interruption sees half of it."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._file)

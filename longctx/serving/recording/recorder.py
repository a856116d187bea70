"""`Recorder`: writes a log of an engine, so that what happened can be replayed."""

import contextlib
import datetime
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longctx.models.validation import check_integer
from longctx.serving.distributed.digest import DecisionDigest
from longctx.serving.distributed.orders import Arrival, Cancel, Journal, LoadEnd, Release, RequestUpdate
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.encryption import SEAL_BYTES
from longctx.serving.kv_cache.prefix import PageHash, PartialPage, Sessions
from longctx.serving.recording.log import RECORDS, Header, RecordContext, log_key
from longctx.serving.recording.records import (
    HEADER_BYTES,
    NOT_FINITE,
    STOP,
    Arrived,
    Cancelled,
    Closed,
    Ended,
    Failed,
    LoadEnded,
    Record,
    Released,
    Step,
    encode,
    frame,
)
from longctx.serving.request.output import Event
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from longctx.serving.engine.core import Core

logger = logging.getLogger(__name__)

_LEAST_BYTES = 2**16
_MAX_UNWRITTEN = 256 * 2**20  # bytes that wait for a disk that doesn't keep up

FLUSH_SECONDS = 0.1
"""Seconds after which what was recorded is in the file, at most: what a process that is killed may lose."""


class Recorder(contextlib.AbstractContextManager["Recorder"], Journal):
    """Writes all that an engine's decisions follow from, as a `Journal` of the engine that it is given to.

    The engine's thread only adds to a queue, and another thread writes what is there. A write that fails, or a disk
    that doesn't keep up, ends the log with a warning; the engine goes on.

    Args:
      directory: of this run, see `open_recorder`.
      max_bytes: of the records; what would exceed it is not recorded.
      key_file: file of a secret with which all is encrypted. None: it is not.

    Attributes:
      size: bytes of the records that there are, with those that are not written yet.
    """

    def __init__(self, directory: Path, max_bytes: int = 2**30, key_file: str | os.PathLike[str] | None = None) -> None:
        self.directory, self.size = directory, 0
        self._key = log_key(key_file)
        self.max_bytes = check_integer("max_bytes", max_bytes, _LEAST_BYTES)
        self._is_open = False  # whether it takes more
        self._waiting: deque[tuple[bytes, int]] = deque()  # records, and their places in the file
        self._written = 0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._decisions = DecisionDigest()
        self._now = 0.0  # when the step was planned that runs
        self._keys: list[bytes] = []  # of pages that generated tokens have filled since they were written last
        self._left: list[PartialPage | None] = []  # last pages of sessions' turns, likewise

    def __exit__(self, *error: object) -> None:
        self.close()

    def begin(self, header: Header, core: "Core") -> None:
        """Begin to record an engine's core; the engine does that.

        Raises:
          ValueError: it records another engine already.
          OSError: the directory can't be written to.
        """
        if self._thread is not None:
            raise ValueError("recorder records another engine already: each needs one of its own")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        header.write(self.directory, self._key)
        self._context = RecordContext(self.directory)
        if core.page_hash is not None:
            core.page_hash = _NotedHash(core.page_hash, self._keys)
        if core.sessions is not None:
            core.sessions = _NotedSessions(core.sessions, self._left)
        file = os.open(self.directory / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._thread = threading.Thread(target=self._run, args=(file,), name="longctx-recorder", daemon=True)
        self._is_open = True
        self._thread.start()

    def close(self) -> None:
        """Write what there is to the end. The engine may go on, unrecorded."""
        if self._thread is not None:
            self._append(encode(Closed("in order")))
            self._is_open = False
            self._is_closing.set()
            self._thread.join()

    def _write(self, record: Record) -> None:
        """Write a record soon; never waits."""
        payload = encode(record)
        if self._is_open and self.size + len(payload) > self.max_bytes:
            cause = f"{self.max_bytes:,} bytes are the limit"
            self._append(encode(Closed(cause)))
            self._stop(cause)
        self._append(payload)

    def _append(self, payload: bytes) -> None:
        if self._is_open:
            place = self.size
            self.size += HEADER_BYTES + len(payload) + (SEAL_BYTES if self._key is not None else 0)
            self._waiting.append((payload, place))  # which the writer's thread may take at once
            if self.size - self._written > _MAX_UNWRITTEN:
                self._stop(f"the disk does not keep up: {_MAX_UNWRITTEN >> 20} MiB wait to be written")

    def _stop(self, cause: object) -> None:
        logger.warning("%s is recorded no further: %s", self.directory, cause)
        self._is_open = False

    # In a thread of its own.

    def _run(self, file: int) -> None:
        try:
            while not self._is_closing.wait(FLUSH_SECONDS):
                self._flush(file)
            self._flush(file)
        except OSError as error:  # perhaps of the last flush, when it takes no more already
            self._stop(error)
        finally:
            os.close(file)

    def _flush(self, file: int) -> None:
        data = memoryview(b"".join(self._framed(*self._waiting.popleft()) for _ in range(len(self._waiting))))
        while data:
            count = os.write(file, data)
            self._written += count
            data = data[count:]

    def _framed(self, payload: bytes, place: int) -> bytes:
        if self._key is not None:
            payload = b"".join(self._key.seal([payload], self._context(place)))
        return frame(payload, place)

    # As a journal.

    def note(self, update: RequestUpdate, sequences: List[Sequence] = ()) -> None:
        """Write what decisions follow from; others, such as a `Pin`, are left out."""
        match update:
            case Arrival():
                self._write(_arrived(update, sequences))
            case Cancel():
                self._write(Cancelled(update.request_id, update.now, self._take_left()))
            case Release():
                self._write(Released(update.lease_id))
            case LoadEnd(loaded):
                self._write(LoadEnded(*loaded))

    def note_step(self, now: float) -> None:
        self._now = now

    def note_plan(self, batch: Batch) -> None:
        self._decisions.add_plan(batch)

    def note_end(self, step: EndedStep | None, events: List[Event]) -> None:
        ended = None
        if step is not None:
            keys = b"".join(self._keys)
            self._keys.clear()
            ends = _ends(step.batch, events)
            ended = Ended(step.finished, step.duration, step.is_exact, ends, keys, self._take_left())
        self._write(Step(self._now, self._decisions.digest, ended))

    def note_failure(self, cause: str) -> None:
        self._write(Failed(cause))
        self._is_open = False

    def _take_left(self) -> tuple[PartialPage | None, ...]:
        left = tuple(self._left)
        self._left.clear()
        return left


def open_recorder(
    directory: str | os.PathLike[str], max_bytes: int = 2**30, key_file: str | os.PathLike[str] | None = None
) -> Recorder:
    """Open a recorder of a new run, for `Engine(..., recorder=...)`, in a folder of its own in `directory`.

    Args:
      directory: of all runs.
      max_bytes: of the run's records; what would exceed it is not recorded.
      key_file: file of a secret, as `longctx group-secret` prints it, with which all is encrypted. None: it is not.

    Returns:
      A recorder, a context manager that closes its files.

    Raises:
      ValueError: max_bytes is too small; or key_file can't be used, or `cryptography` is not installed.

    Examples:
      >>> from longctx.models import load_checkpoint, load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.serving.recording.recorder import open_recorder
      >>> config = EngineConfig(num_pages=64, token_budget=64, max_running=2, max_length=1024, buckets=(64,))
      >>> with open_recorder("log") as recorder:  # `longctx replay log` replays it
      ...     engine = Engine(*load_checkpoint(TINY), config, tokenizer=load_tokenizer(TINY), recorder=recorder)
      ...     outputs = engine.generate("Once", SamplingParams(max_tokens=2))
      >>> recorder.size > 0
      True
    """
    name = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}"
    return Recorder(Path(directory) / name, max_bytes, key_file)


def _arrived(arrival: Arrival, sequences: List[Sequence]) -> Arrived:
    request, first = arrival.request, sequences[0]
    return Arrived(
        request_id=arrival.request_id,
        now=arrival.now,
        num_prompt=len(arrival.tokens),
        max_tokens=first.max_tokens,
        num_completions=len(sequences),
        priority=request.priority,
        tenant=request.tenant,
        ttft_deadline=request.ttft_deadline,
        tpot_target=request.tpot_target,
        may_share=first.may_share,
        has_session=request.session_id is not None,
        keys=b"".join(first.keys),
        partial_page=first.partial_page,
        available=first.available,
        lease=request.lease,
    )


def _ends(batch: Batch, events: List[Event]) -> tuple[tuple[int, int], ...]:
    """Return which samples of a batch ended their completions, other than by length: their numbers, and why."""
    outputs = [event.output for event in events if event.output is not None]
    ended = {
        f"{output.request_id}/{output.index}": STOP if output.finish_reason == "stop" else NOT_FINITE
        for output in outputs
        if output.finish_reason in ("stop", "error")
    }
    if not ended:
        return ()
    return tuple((i, ended[sequence.name]) for i, sequence in enumerate(batch.sampled) if sequence.name in ended)


class _NotedHash(PageHash):
    """Page hash that keeps the keys of pages that generated tokens fill."""

    def __init__(self, page_hash: PageHash, found: list[bytes]) -> None:
        vars(self).update(vars(page_hash))
        self._found = found

    def extend(self, keys: list[bytes], tokens: np.ndarray, root: bytes) -> None:
        count = len(keys)
        super().extend(keys, tokens, root)
        self._found += keys[count:]


class _NotedSessions(Sessions):
    """Sessions that keep the pages that turns leave."""

    def __init__(self, sessions: Sessions, left: list[PartialPage | None]) -> None:
        vars(self).update(vars(sessions))
        self._left = left

    def note(self, root: bytes, session_id: str, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        self._left.append(super().note(root, session_id, keys, tokens))
        return self._left[-1]

"""`Recorder`: writes a log of an engine, so that what happened can be replayed."""

import datetime
import os
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longctx.models.validation import check_integer
from longctx.serving.distributed.digest import DecisionDigest, pack
from longctx.serving.distributed.orders import Arrival, Cancel, Forget, Release, RequestUpdate, request_to_fields
from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.prefix import PageHash, PartialPage, Sessions
from longctx.serving.recording.header import Header
from longctx.serving.recording.reader import segment_name
from longctx.serving.recording.records import (
    NOT_FINITE,
    STOP,
    Arrived,
    Cancelled,
    Cleared,
    Closed,
    Content,
    Ended,
    Failed,
    Forgotten,
    LoadEnded,
    Record,
    Released,
    Step,
    encode,
)
from longctx.serving.recording.snapshot import is_idle, take_snapshot
from longctx.serving.recording.writer import LogWriter
from longctx.serving.request.output import Event
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence, completion_of

if TYPE_CHECKING:
    from longctx.serving.engine.core import Core

_LEAST_BYTES = 2**16
_FILES = 8  # that the limit is divided among


class Recorder:
    """Writes all that an engine's decisions follow from, as a `Journal` of the engine that it is given to.

    Args:
      directory: of this run, see `open_recorder`.
      is_private: leave out prompts, tokens and sampling parameters.
      max_bytes: of the run's files. It is divided among eight, each of which begins where the engine has no request;
        the oldest ones are removed. An engine that is never idle is recorded until there are that many bytes, and again
        from when it is idle.
      model_name, weights: which model it is: the latter as from `checkpoint_fingerprint`.
    """

    def __init__(
        self,
        directory: Path,
        is_private: bool = False,
        max_bytes: int = 2**30,
        model_name: str = "",
        weights: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.is_private = directory, is_private
        self.max_bytes = check_integer("max_bytes", max_bytes, _LEAST_BYTES)
        self.model_name, self.weights = model_name, weights
        self._core: Core | None = None
        self._writer: LogWriter | None = None
        self._number = 0  # of the file that is written
        self._ended: deque[LogWriter] = deque()  # files before it
        self._is_full = self._is_over = False
        self._decisions = DecisionDigest()
        self._now: float | None = None  # when the step was planned that runs
        self._keys: list[bytes] = []  # of pages that generated tokens have filled since they were written last
        self._left: list[PartialPage | None] = []  # last pages of sessions' turns, likewise

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes of the records that there are."""
        return 0 if self._writer is None else self._writer.size + sum(writer.size for writer in self._ended)

    def begin(self, header: Header, core: "Core") -> None:
        """Begin to record an engine's core; the engine does that.

        Raises:
          ValueError: it records another engine already.
          OSError: the directory can't be written to.
        """
        if self._writer is not None:
            raise ValueError("recorder records another engine already: each needs one of its own")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        header.write(self.directory)
        if core.page_hash is not None:
            core.page_hash = _NotedHash(core.page_hash, self._keys)
        if core.sessions is not None:
            core.sessions = _NotedSessions(core.sessions, self._left)
        self._core, self._writer = core, LogWriter(self.directory / segment_name(0))

    def close(self) -> None:
        """Write what there is to the end. The engine may go on, unrecorded."""
        self._is_over = True
        if self._writer is not None:
            self._end(Closed("in order"), None)
            self._writer.close()

    def _write(self, record: Record) -> None:
        writer = self._writer
        if writer is not None and writer.is_open:
            payload = encode(record)
            while self._ended and self.size + len(payload) > self.max_bytes:
                self._ended.popleft().remove()
            if self.size + len(payload) > self.max_bytes:
                cause = f"{self.max_bytes:,} bytes are the limit, and since the engine was idle there were as many"
                self._is_full = True
                self._end(Closed(cause), f"{cause}; recording goes on when it is idle")
            else:
                writer.append(payload)

    def _begin_file(self, core: "Core", writer: LogWriter, now: float) -> None:
        """Go on in another file, with what is known of an engine without requests."""
        try:
            made = LogWriter(self.directory / segment_name(self._number + 1))
        except OSError as error:  # the engine goes on, unrecorded
            self._is_over = True
            writer.stop(f"no further file can be made: {error}")
            return
        writer.finish()
        self._ended.append(writer)
        self._is_full = False
        self._number += 1
        self._writer = made
        self._decisions = DecisionDigest()
        self._write(take_snapshot(core, now))

    def _end(self, record: Record, cause: str | None) -> None:
        """Write the last record; a cause is worth a warning."""
        writer = self._writer
        if writer is not None and writer.is_open:
            writer.append(encode(record))
            writer.stop(cause)

    # As a journal.

    def note(self, update: RequestUpdate, sequences: List[Sequence] = ()) -> None:
        """Write what decisions follow from; others, such as a `Pin`, are left out."""
        match update:
            case Arrival():
                self._write_arrival(update, sequences)
            case Cancel():
                self._write(Cancelled(update.request_id, update.now, self._take_left(), update.lease))
            case Release():
                self._write(Released(update.lease_id))
            case Forget():
                self._write(Forgotten(b"".join(update.keys)))
            case Loaded():
                self._write(LoadEnded(*update))

    def _write_arrival(self, arrival: Arrival, sequences: List[Sequence]) -> None:
        request, request_id, now = arrival.request, arrival.request_id, arrival.now
        assert arrival.tokens is not None
        tokens = arrival.tokens
        core, writer = self._core, self._writer
        if core is not None and writer is not None and not self._is_over:
            is_due = self._is_full or (writer.is_open and writer.size > self.max_bytes // _FILES)
            if is_due and is_idle(core):
                self._begin_file(core, writer, now)
        first = sequences[0]
        content = None
        if not self.is_private:
            content = Content(
                tokens.astype("<i4", copy=False).tobytes(), request_to_fields(request), completion_of(first).seed
            )
        arrived = Arrived(
            request_id=request_id,
            now=now,
            num_prompt=len(tokens),
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
            content=content,
            available=first.available,
            lease=request.lease,
            shares_pages=request.shares_pages,
        )
        self._write(arrived)

    def note_step(self, now: float) -> None:
        self._now = now

    def note_plan(self, batch: Batch) -> None:
        self._decisions.add_plan(batch)

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        pass

    def note_end(self, step: EndedStep | None, events: List[Event]) -> None:
        now, self._now = self._now, None
        assert now is not None
        ended = None
        if step is not None:
            tokens = step.results.tokens
            keys, left = b"".join(self._keys), self._take_left()
            self._keys.clear()
            ended = Ended(
                finished=step.finished,
                duration=step.duration,
                is_exact=step.is_exact,
                num_sampled=len(tokens),
                ends=_ends(step.batch, events),
                keys=keys,
                left=left,
                tokens=None if self.is_private else pack("i", tokens),
            )
        self._write(Step(now, self._decisions.raw, ended))

    def note_clear(self) -> None:
        self._write(Cleared())

    def note_failure(self, cause: str) -> None:
        self._is_over = True
        self._end(Failed(cause, self._now), None)

    def _take_left(self) -> tuple[PartialPage | None, ...]:
        left = tuple(self._left)
        self._left.clear()
        return left


def open_recorder(
    directory: str | os.PathLike[str],
    private: bool = False,
    max_bytes: int = 2**30,
    model_name: str = "",
    weights: Mapping[str, str] | None = None,
) -> Recorder:
    """A recorder of a new run, for `Engine(..., recorder=...)`, in a folder of its own in `directory`.

    Args:
      directory: of all runs.
      private: leave out prompts, tokens and sampling parameters; then decisions alone can be replayed.
      max_bytes: of the run's records.
      model_name, weights: which model it is, for replays: the latter as from `checkpoint_fingerprint`.

    Returns:
      A recorder, a context manager that closes its files.

    Raises:
      OSError: the directory can't be made.
      ValueError: max_bytes is too small.

    Examples:
      >>> from longctx.models import load_checkpoint, load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> from longctx.serving import Engine, EngineConfig, SamplingParams
      >>> from longctx.serving.recording.recorder import open_recorder
      >>> config = EngineConfig(num_pages=64, token_budget=64, max_running=2, max_length=1024, buckets=(64,))
      >>> with open_recorder("log") as recorder:  # `longctx replay log` explains it
      ...     engine = Engine(*load_checkpoint(TINY), config, tokenizer=load_tokenizer(TINY), recorder=recorder)
      ...     outputs = engine.generate("Once", SamplingParams(max_tokens=2))
      >>> recorder.size > 0
      True
    """
    name = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}"
    return Recorder(Path(directory) / name, private, max_bytes, model_name, weights)


def _ends(batch: Batch, events: List[Event]) -> tuple[tuple[int, int], ...]:
    """Which samples of a batch ended their completions, other than by length: their numbers, and why."""
    outputs = [event.output for event in events if event.output is not None]
    if not outputs:
        return ()
    ended = {
        f"{output.request_id}/{output.index}": STOP if output.finish_reason == "stop" else NOT_FINITE
        for output in outputs
        if output.finish_reason in ("stop", "error")
    }
    return tuple((i, ended[sequence.name]) for i, sequence in enumerate(batch.sampled) if sequence.name in ended)


class _NotedHash(PageHash):
    """A page hash that keeps the keys of pages that generated tokens fill."""

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

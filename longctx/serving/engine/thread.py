"""`EngineThread`: runs an engine in a thread of its own, and pushes events to whoever asked for them."""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from longctx.serving.engine.admission_control import AdmissionControl, Refused
from longctx.serving.engine.departure import Departed, Departure
from longctx.serving.engine.departure import Sink as Sink
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.load import Load, StepReport
from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, FinishReason, Metrics, Output
from longctx.serving.request.request import PreparedRequest, Request

logger = logging.getLogger(__name__)

_EXPIRY_SECONDS = 1.0  # between two looks at leases while nothing else is to do


@runtime_checkable
class Staged(Protocol):
    """Pages of a request that are brought to the engine's tiers before the request enters it."""

    @property
    def ready(self) -> "Future[None]":
        """Ends when all pages are there that will come."""
        ...

    def release(self) -> None:
        """The request has ended; it may be called more than once, from any thread."""
        ...


class Received(NamedTuple):
    """What another engine has computed of a request, and where its pages come from, by lease.

    Attributes:
      handoff: None: nothing but pages of its prompt.
      staged: the request takes no slot and no page of the devices before this is ready; None: it enters at once.
    """

    handoff: Handoff | None
    sources: Mapping[str, LeasedSource]
    staged: Staged | None = None

    def release(self) -> None:
        """The request has ended, or does not begin: nobody fetches its pages any more."""
        for source in self.sources.values():
            source.release()
        if self.staged is not None:
            self.staged.release()


_NOTHING = Received(None, {})


@dataclass(eq=False)
class _Client:
    """Whoever waits for a request's events."""

    sink: Sink
    prepared: PreparedRequest
    arrival: float
    open: set[int]  # completions that have not ended
    outputs: dict[int, Output] = field(default_factory=dict)  # of those that have
    departure: Departure | None = None


class EngineThread:
    """Runs an engine's steps while requests have not ended, and sleeps otherwise; a context manager.

    Any thread may call any method. None waits for a device.

    Args:
      engine: nobody else may run its steps or submit to it from now on. In a process group it is the first process's.
      control: refuses requests that would wait too long. None: with the default limits.
      flush: is called after the sinks of a step, and of a cancel, so that a server wakes its event loop once.

    Attributes:
      failure: gets the exception with which the engine fails, or None when the thread ends in order.
      load: as of the last step, or of the last request to come or go while no step ran.
      on_step: are called after each step, in the engine's thread; one that raises is logged, and not called again.
      on_end: likewise, with each completion that ends, and its request.

    Examples:
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.serving import Engine, EngineConfig, EngineThread, Request, SamplingParams
      >>> from longctx.simulation import VirtualExecutor
      >>> executor = VirtualExecutor(lambda batch: 0.01, vocab_size=128_256)  # every step takes 10 ms, of no device
      >>> model, config = Llama(LlamaConfig.preset("llama-3-8b")), EngineConfig(num_pages=256)
      >>> engine = Engine(model, None, config, executor=executor, clock=executor.clock)
      >>> import queue
      >>> sink = queue.Queue()
      >>> with EngineThread(engine) as thread:
      ...     prepared = engine.prepare(Request([7] * 100, SamplingParams(max_tokens=2), request_id="mine"))
      ...     _ = thread.submit(prepared, sink.put)
      ...     first, second = sink.get(), sink.get()  # the events of two steps
      >>> [event.index for event in first], second[0].output.finish_reason
      ([0], 'length')
    """

    def __init__(
        self,
        engine: Engine,
        control: AdmissionControl | None = None,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self.engine, self.control = engine, control or AdmissionControl(engine)
        self.failure: Future[None] = Future()
        self.on_step: list[Callable[[StepReport], object]] = []
        self.on_end: list[Callable[[Output, Request], object]] = []
        self._flush = flush
        self._clients: dict[str, _Client] = {}
        self._coming: dict[str, _Client] = {}  # whose pages come to host memory, and which the engine does not know
        self._departures: dict[str, Departure] = {}
        self._ids = map("request-{}".format, itertools.count())
        self._wake, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        self._counting = threading.Lock()
        self._is_draining = self._is_closing = False
        self._progressed: float | None = None  # when the thread last came out of a step, while it has work
        self.load = self._look()
        engine.add_monitor(self._note)
        self._thread = threading.Thread(target=self._run, name="longctx-engine", daemon=True)

    def __enter__(self) -> "EngineThread":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def submit(
        self, prepared: PreparedRequest, sink: Sink, arrival: float | None = None, received: Received | None = None
    ) -> str:
        """Begin a request.

        Args:
          prepared: what `Engine.prepare` made of it.
          sink: see `Sink`; its last call has the `output` of every completion that has not ended before.
          arrival: when the request came, by the engine's clock; None: now.
          received: what another engine has computed of it, see `Engine.submit`.

        Returns:
          Its id, which a sink may be called with before this returns.

        Raises:
          TypeError, ValueError: it can never be served.
          Refused: not now.
          RuntimeError: the engine has failed, or the thread is closed.
        """
        request_id = prepared.request.request_id
        if request_id is None:
            request_id = next(self._ids)
            prepared = prepared._replace(request=dataclasses.replace(prepared.request, request_id=request_id))
        arrival = self.engine.now() if arrival is None else arrival
        self.engine.check(prepared)
        client = _Client(sink, prepared, arrival, set(range(prepared.request.sampling.n)))
        self._enter(request_id, client, received or _NOTHING, self._admit)
        return request_id

    def _admit(self, request_id: str, prepared: PreparedRequest) -> None:
        if self._is_draining:
            raise Refused("the server is shutting down, and takes no new requests", "draining", 5.0)
        self.control.admit(request_id, prepared)

    def _enter(
        self,
        request_id: str,
        client: _Client,
        received: Received,
        admit: Callable[[str, PreparedRequest], object] = lambda request_id, prepared: None,
    ) -> None:
        if self._clients.setdefault(request_id, client) is not client:
            raise ValueError(f"request_id must be unique, and {request_id!r} has not ended yet")
        try:
            self._count()
            self._check_running()
            admit(request_id, client.prepared)
            if received.staged is None:
                self.engine.submit(client.prepared, client.arrival, received.handoff, received.sources)
            else:
                self._coming[request_id] = client
                received.staged.ready.add_done_callback(lambda _: self._begin_staged(request_id, received))
            self._check_running()  # otherwise nobody would tell the sink of the end
        except BaseException:
            self._coming.pop(request_id, None)
            self._forget(request_id)
            self._count()
            raise
        finally:
            self._wake.set()

    def _begin_staged(self, request_id: str, received: Received) -> None:
        """Its pages are in host memory: it enters the engine, unless it has ended."""
        client = self._coming.pop(request_id, None)
        if client is None:
            return
        try:
            self._check_running()
            self.engine.submit(client.prepared, client.arrival, received.handoff, received.sources)
        except Exception as error:
            self._end_client(request_id, client, "error", f"it could not begin: {type(error).__name__}: {error}")
        finally:
            self._wake.set()

    def cancel(self, request_id: str) -> bool:
        """End a request. Its sink still gets its last events.

        Returns:
          False if it is unknown.
        """
        departure = self._departures.get(request_id)
        if departure is not None:
            departure.cancel()
            return True
        client = self._coming.pop(request_id, None)
        if client is not None:
            self._end_client(request_id, client, "cancelled")
            return True
        try:
            was_there = self.engine.cancel(request_id)
        except RuntimeError:  # the engine has failed: its sink hears of that
            return False
        self._wake.set()
        return was_there

    def move(self, request_id: str, lease: str) -> Departure | None:
        """Let a request leave, for another engine.

        Its sink gets nothing more from this engine; whoever moves it sees to that, and to the end of the departure:
        `take_back` or `forget_departure`.

        Args:
          request_id: of the request.
          lease: under which its pages are kept, see `Engine.hand_off`.

        Returns:
          None: it is unknown, has ended, leaves already, or has a lease of its own.
        """
        client = self._clients.get(request_id)
        departure = Departure(request_id)
        if client is None or client.prepared.request.lease is not None:
            return None
        if self._departures.setdefault(request_id, departure) is not departure:
            return None
        client.departure = departure
        is_leaving = False
        try:
            is_leaving = self.engine.hand_off(request_id, lease)
        finally:
            if not is_leaving:
                self.forget_departure(departure)
            self._wake.set()
        return departure if is_leaving else None

    def take_back(self, departure: Departure, departed: Departed, handoff: Handoff, sink: Sink) -> None:
        """Go on with a request that had left. It is not refused: it was let in before.

        Args:
          departure: what `move` returned.
          departed: what became of it.
          handoff: what was computed of it, here and elsewhere.
          sink: gets all of its events, also those that it has had.

        Raises:
          RuntimeError: the engine has failed, or the thread is closed.
        """
        self.forget_departure(departure)
        self._enter(
            departure.request_id,
            _Client(sink, departed.prepared, departed.arrival, departed.open),
            Received(handoff, {}),
        )

    def forget_departure(self, departure: Departure) -> None:
        """A request that has left has ended."""
        self._departures.pop(departure.request_id, None)

    def progress(self, request_id: str) -> tuple[int, int]:
        """How far a request's prompt is, see `Engine.progress`."""
        return self.engine.progress(request_id)

    @property
    def stalled_seconds(self) -> float:
        """For how long the step that runs now has been running; 0 if there is nothing to do."""
        since = self._progressed
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all requests have ended.

        Args:
          timeout: seconds.

        Returns:
          False if some have not ended by then.
        """
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Cancel what has not ended, and end the thread."""
        self._is_draining = self._is_closing = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_steps()
                self._wake.wait(_EXPIRY_SECONDS if self.engine.core.leases else None)
                self._wake.clear()
                self.engine.pages.expire()
            self.engine.pages.stop_verifying()
            while self.engine.has_work:
                for request_id in tuple(self._clients):
                    self.engine.cancel(request_id)
                self._step()
        except BaseException as error:
            logger.exception("the engine has failed")
            self.failure.set_exception(error.__cause__ or error)
            with contextlib.suppress(RuntimeError):
                self._deliver(self.engine.step())  # the last events of its requests
            self._end_all(f"the engine has failed: {type(error).__name__}: {error}")
        else:
            self.failure.set_result(None)
            self._end_all("the engine is closed")
        finally:
            self._progressed = None

    def _run_steps(self) -> None:
        """Run steps while there is work."""
        while self.engine.has_work and not self._is_closing:  # raises if the engine has failed elsewhere
            self._step()
        self._progressed = None
        self.load = self._look()

    def _step(self) -> None:
        self._progressed = time.monotonic()
        self._deliver(self.engine.step())
        self.control.foresight.refresh()

    def _deliver(self, events: list[Event]) -> None:
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            client = self._clients.get(request_id)
            if client is not None:
                for event in own:
                    if event.output is not None:
                        self._note_end(client, event.output)
                if not client.open:
                    self._forget(request_id)
                self._tell(request_id, client, own)
                if client.departure is not None and not client.open:
                    self._depart(client, client.departure)
        if by_request:
            self._flush()
            self._count()

    def _note_end(self, client: _Client, output: Output) -> None:
        client.outputs[output.index] = output
        if output.index in client.open:  # it had not ended before its request left and came back
            client.open.remove(output.index)
            self.control.note_output(output, client.prepared.request.sampling.max_tokens)
            _call_all(self.on_end, output, client.prepared.request)

    def _depart(self, client: _Client, departure: Departure) -> None:
        outputs = [client.outputs[index] for index in sorted(client.outputs)]
        departed = Departed(client.prepared, client.arrival, client.sink, outputs)
        if not departed.open:
            self.forget_departure(departure)
        departure.left.set_result(departed if departed.open else None)

    def _tell(self, request_id: str, client: _Client, events: list[Event]) -> None:
        if client.departure is not None:
            events = [event for event in events if event.output is None or event.output.finish_reason != "moved"]
        try:
            if events:
                client.sink(events)
        except Exception:
            logger.exception("the sink of %s raised: it is cancelled", request_id)
            self._forget(request_id)
            self.engine.cancel(request_id)

    def _forget(self, request_id: str) -> None:
        if self._clients.pop(request_id, None) is not None:
            self.control.forget(request_id)

    def _count(self) -> None:
        """After a client has come or gone: whether there is one."""
        with self._counting:
            if self._clients:
                self._idle.clear()
            else:
                self._idle.set()

    def _end_all(self, cause: str) -> None:
        """Tell whoever has come too late that there will be nothing."""
        self._coming.clear()
        for request_id, client in tuple(self._clients.items()):
            self._end_client(request_id, client, "error", cause)
            if client.departure is not None and not client.departure.left.done():
                self.forget_departure(client.departure)
                client.departure.left.set_result(None)

    def _end_client(self, request_id: str, client: _Client, reason: FinishReason, error: str | None = None) -> None:
        """Tell a client that the engine does not know that nothing comes."""
        self._forget(request_id)
        metrics = Metrics(client.arrival, len(client.prepared.tokens))
        ends = [Output(request_id, i, [], "", reason, metrics, error=error) for i in sorted(client.open)]
        for end in ends:
            _call_all(self.on_end, end, client.prepared.request)
        self._tell(request_id, client, [Event(request_id, end.index, (), "", (), end) for end in ends])
        self._flush()
        self._count()

    def _note(self, metrics: StepMetrics) -> None:
        self.load = self._look()
        self.control.note_step(metrics)
        _call_all(self.on_step, StepReport(metrics, self.load))

    def _look(self) -> Load:
        return Load.of(self.engine.core, self.engine.stats(), self.engine.now())

    def _check_running(self) -> None:
        if self.failure.done():
            raise RuntimeError("the engine has failed, or is closed") from self.failure.exception()


def _call_all(calls: list[Callable[..., object]], *arguments: object) -> None:
    for call in tuple(calls):
        try:
            call(*arguments)
        except Exception:
            calls.remove(call)
            logger.exception("an observer of the engine raised, and is not called any more")

"""`EngineThread`: the server's driver, which runs an engine in a thread of its own and pushes events to sinks."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol, runtime_checkable

from longctx.serving.engine.active_request import ActiveRequest, Sink
from longctx.serving.engine.admission_control import AdmissionControl, Refused
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.metrics import Load, StepMetrics, notify
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, Metrics, Output
from longctx.serving.request.request import PreparedRequest, Request

logger = logging.getLogger(__name__)

_EXPIRY_SECONDS = 1.0  # between two looks at leases while nothing else is to do
_IDLE_SECONDS = 0.005  # between two looks at whether all requests have ended


@runtime_checkable
class Staged(Protocol):
    """Parts of a request that come before it enters the engine: its first token, or pages for the tiers."""

    @property
    def ready(self) -> "Future[None]":
        """Ends when all has come that will."""
        ...

    @property
    def handoff(self) -> Handoff | None:
        """The handoff of another engine, once it is ready; None: the one that was known before."""
        ...

    @property
    def sources(self) -> Mapping[str, LeasedSource]:
        """Sources of the pages of that, by lease."""
        ...

    def release(self) -> None:
        """The request has ended; it may be called more than once, from any thread."""
        ...


class Received(NamedTuple):
    """State of a request that another engine has computed, and where its pages come from, by lease.

    Attributes:
      handoff: None: nothing but pages of its prompt.
      staged: the request takes no slot and no page of the devices before this is ready; None: it enters at once.
    """

    handoff: Handoff | None
    sources: Mapping[str, LeasedSource]
    staged: Staged | None = None

    def release(self) -> None:
        """Let go of its pages: the request has ended, or does not begin."""
        for source in self.sources.values():
            source.release()
        if self.staged is not None:
            self.staged.release()


_NOTHING = Received(None, {})


class EngineThread:
    """Thread that runs an engine's steps while requests have not ended, and sleeps otherwise; a context manager.

    Any thread may call any method. None waits for a device.

    Args:
      engine: only the thread may run its steps or submit to it from now on. In a process group it is the first
        process's.
      control: refuses requests that would wait too long. None: with the default limits.
      flush: is called after the sinks of a step, and of a cancel, so that a server wakes its event loop once.

    Attributes:
      failure: gets the exception with which the engine fails, or None when the thread ends in order.
      is_draining: whether new requests are refused.
      load: as of the last step, or of the last request to come or go while no step ran.
      on_step: are called after each step with its metrics and the load, in the engine's thread; one that raises is
        logged, and not called again.
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
        self.on_step: list[Callable[[StepMetrics, Load], object]] = []
        self.on_end: list[Callable[[Output, Request], object]] = []
        self._flush = flush
        self._events: deque[tuple[ActiveRequest, Event]] = deque()  # that sinks have not got
        self._is_delivering = False
        self._wake = threading.Event()
        self.is_draining = self._is_closing = False
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
        received = received or _NOTHING
        arrival = self.engine.now() if arrival is None else arrival
        request = ActiveRequest(prepared, arrival, self._collect, received.handoff, received.sources, sink)
        self.engine.claim([request])
        try:
            self._check_running()
            if self.is_draining:
                raise Refused("the server is shutting down, and takes no new requests", "draining", 5.0)
            self.control.admit(request)
            if (staged := received.staged) is None:
                self.engine.begin([request])
            else:
                staged.ready.add_done_callback(lambda _: self._begin_staged(request, staged))
            self._check_running()  # otherwise its sink would never get its end
        except BaseException:
            self.engine.requests.drop(request)
            raise
        finally:
            self._wake.set()
        return request.request_id

    def _begin_staged(self, request: ActiveRequest, staged: Staged) -> None:
        if self.engine.requests.get(request.request_id) is request:  # otherwise it has ended
            if staged.handoff is not None:
                request.handoff, request.sources = staged.handoff, staged.sources
            self.engine.begin([request])
            self._wake.set()

    def cancel(self, request_id: str) -> bool:
        """End a request. Its sink still gets its last events.

        Returns:
          False if it is unknown.
        """
        try:
            was_there = self.engine.cancel(request_id)
        except RuntimeError:  # the engine has failed, which its sink is told
            return False
        self._wake.set()
        return was_there

    @property
    def stalled_seconds(self) -> float:
        """For how long the step that runs now has been running; 0 if there is nothing to do."""
        since = self._progressed
        return 0.0 if since is None else time.monotonic() - since

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all requests have ended.

        Args:
          timeout: seconds.

        Returns:
          False if some have not ended by then.
        """
        until = time.monotonic() + timeout
        while self.engine.requests or self._events or self._is_delivering:
            if time.monotonic() > until:
                return False
            time.sleep(_IDLE_SECONDS)
        return True

    def close(self) -> None:
        """Cancel what has not ended, and end the thread."""
        self.is_draining = self._is_closing = True
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
            while self.engine.has_work:
                for request_id in tuple(self.engine.requests):
                    self.engine.cancel(request_id)
                self._step()
        except BaseException as error:
            logger.exception("the engine has failed")
            self.failure.set_exception(error.__cause__ or error)
            self._end_all(f"the engine has failed: {type(error).__name__}: {error}")
        else:
            self.failure.set_result(None)
            self._end_all("the engine is closed")
        finally:
            self._progressed = None

    def _run_steps(self) -> None:
        """Run steps while there is work."""
        while self.engine.has_work and not self._is_closing:  # raises if the engine has failed elsewhere
            self._deliver()  # first tokens that have come from another engine
            self._step()
        self._deliver()  # of requests that were cancelled meanwhile
        self._progressed = None
        self.load = self._look()

    def _step(self) -> None:
        self._progressed = time.monotonic()
        self.engine.step()
        self._deliver()
        self.control.estimator.refresh()

    def _collect(self, request: ActiveRequest, event: Event) -> None:
        self._events.append((request, event))

    def _deliver(self) -> None:
        """Give sinks the events that have come, those of a request together."""
        by_request: dict[ActiveRequest, list[Event]] = {}
        self._is_delivering = True
        while self._events:
            request, event = self._events.popleft()
            by_request.setdefault(request, []).append(event)
            if event.output is not None:
                self.control.note_output(event.output, request.prepared.request.sampling.max_tokens)
                notify(self.on_end, event.output, request.prepared.request)
        for request, events in by_request.items():
            self._tell(request, events)
        if by_request:
            self._flush()
        self._is_delivering = False

    def _tell(self, request: ActiveRequest, events: list[Event]) -> None:
        try:
            if events and request.sink is not None:
                request.sink(events)
        except Exception:
            logger.exception("the sink of %s raised: it is cancelled", request.request_id)
            request.sink = None
            with contextlib.suppress(RuntimeError):  # the engine has failed
                self.engine.cancel(request.request_id)

    def _end_all(self, cause: str) -> None:
        """End requests that have not begun, or came too late."""
        for request in tuple(self.engine.requests.values()):
            if self.engine.requests.drop(request):
                metrics = Metrics(request.arrival, len(request.prepared.tokens))
                for index in request.open:
                    output = Output(request.request_id, index, [], "", "error", metrics, error=cause)
                    request.outputs[index] = output
                    self._collect(request, Event(request.request_id, index, (), "", (), output))
        self._deliver()

    def _note(self, metrics: StepMetrics) -> None:
        self.load = self._look()
        notify(self.on_step, metrics, self.load)

    def _look(self) -> Load:
        return self.engine.core.load(self.engine.stats(), self.engine.now())

    def _check_running(self) -> None:
        if self.failure.done():
            raise RuntimeError("the engine has failed, or is closed") from self.failure.exception()

"""What an engine's thread takes beside its devices: `measure_host`."""

import time
from statistics import median
from typing import Any

from longctx.serving import Engine, Request, SamplingParams
from longctx.simulation import HostTimes

_REQUESTS, _TOKENS = 12, 40


def measure_host(engine: Engine) -> HostTimes:
    """Medians of an idle engine's times: requests enter one after the other, and decode two at a time.

    Raises:
      RuntimeError: the engine has work, or other processes take part.
    """
    clock = time.perf_counter
    in_submit: list[float] = []
    between: list[float] = []  # from the end of a wait to the next submission
    entering: list[float] = []
    waited: list[float] = [0.0]  # when the last wait ended; 0: something else happened since
    with engine.lend_executor() as executor:
        submit, wait = executor.submit, executor.wait

    def timed_submit(batch: Any) -> Any:
        begin = clock()
        if waited[0]:
            between.append(begin - waited[0])
        pending = submit(batch)
        in_submit.append(clock() - begin)
        waited[0] = 0.0
        return pending

    def timed_wait(pending: Any) -> Any:
        results = wait(pending)
        waited[0] = clock()
        return results

    engine.warm_up()
    executor.submit, executor.wait = timed_submit, timed_wait  # type: ignore[method-assign]
    try:
        sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
        for number in range(_REQUESTS):
            begin = clock()
            engine.submit(Request([number] * 100, sampling))
            entering.append(clock() - begin)
            waited[0] = 0.0
            for _ in range(_TOKENS // 2 if number < _REQUESTS - 1 else 2 * _TOKENS):
                if engine.has_work:
                    engine.step()
    finally:
        executor.submit, executor.wait = submit, wait  # type: ignore[method-assign]
    return HostTimes(request=median(entering), batch=median(in_submit), results=median(between))

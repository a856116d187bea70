"""Runs cases that come on its input, one JSON object a line, and answers on a pipe: `gpu_worker.py FD [--rehearse]`."""

import contextlib
import gc
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]


class Unsupported(Exception):
    """The case can't run here; the message says why."""


@dataclass(frozen=True)
class Context:
    """What a case is told: whether sizes are to be small, and where to leave figures before its end."""

    small: bool
    note: Callable[[Figures], None]

    def hopper(self) -> contextlib.AbstractContextManager[None]:
        """A context for kernels of Hopper GPUs outside of `jax.jit`: at small sizes the interpreter stands for one."""
        from longctx.kernels.mosaic_gpu import adapter

        return adapter.interpreted() if self.small else contextlib.nullcontext()


def _read_requests(requests: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the run has ended, whatever a kernel still does


def run_case(request: dict[str, Any], context: Context) -> dict[str, Any]:
    """The result of a case. Only an error of the device leaves it unusable, such as an illegal address."""
    try:
        module, _, function = request["function"].rpartition(".")
        figures = getattr(importlib.import_module(module), function)(context, **request["arguments"])
        return {"status": "passed", "reason": "", "figures": figures or {}}
    except Unsupported as error:
        return {"status": "skipped", "reason": str(error), "figures": {}}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:400]
        reason = text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
        is_unusable = "jax" in sys.modules and isinstance(error, sys.modules["jax"].errors.JaxRuntimeError)
        return {"status": "failed", "reason": reason, "figures": {}, "is_unusable": is_unusable}


def main() -> None:
    small = "--rehearse" in sys.argv
    if small:
        # Eight devices: with fewer, JAX has too few threads for the interpreter.
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    else:
        from longctx.gpu_flags import set_memory_fraction, set_xla_flags

        set_xla_flags()  # as the command line does
        set_memory_fraction()
        import jax

        if jax.default_backend() != "gpu":
            raise SystemExit(f"JAX must find a GPU, found {jax.default_backend()}; --rehearse needs none")
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    with open(int(sys.argv[1]), "w", encoding="utf-8") as replies:

        def reply(answer: dict[str, Any]) -> None:
            replies.write(json.dumps(answer) + "\n")
            replies.flush()

        context = Context(small, lambda figures: reply({"figures": figures}))
        reply({"ready": True})
        while True:
            answer = run_case(json.loads(requests.get()), context)
            gc.collect()
            reply(answer)


if __name__ == "__main__":
    sys.modules["gpu_worker"] = sys.modules["__main__"]  # so that cases import the classes of this run
    main()

"""What the memory of a server of the built-in model is made of: `python -m benchmarks.server_memory`.

The steps of `longctx serve` in one process, with the resident memory after each: in all, of this the process's own
(anonymous), and the rest, which is files such as shared libraries, and shared by servers on one host. At the end the
allocator returns what it holds and nobody uses. The first run compiles; the next one finds compiled programs in the
cache folder of `longctx`, as a server does that starts again. Linux only.
"""

import argparse
import ctypes
import gc
from pathlib import Path

_MIB = 1024


class Table:
    """Lines of a table in Markdown, MiB."""

    def __init__(self) -> None:
        self._last = 0
        print("| after | more | in all | own | files |\n|---|---|---|---|---|")

    def add(self, step: str) -> None:
        gc.collect()
        lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]]
        sizes = {name: int(size) // _MIB for name, size, _ in lines}
        whole, own = sizes["Rss:"], sizes["Anonymous:"]
        print(f"| {step} | {whole - self._last:+} | {whole} | {own} | {whole - own} |", flush=True)
        self._last = whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-pages", type=int, default=256)
    options = parser.parse_args()
    table = Table()
    table.add("Python starts")
    import jax

    table.add("import of numpy and JAX")
    import longctx.cli.serve
    import longctx.serving.server.http_server
    import longctx.serving.server.server  # noqa: F401

    table.add("import of longctx, FastAPI, uvicorn, ZeroMQ")
    from longctx.cli import compile_cache
    from longctx.models import load_checkpoint, load_tokenizer
    from longctx.models.builtin import TINY
    from longctx.serving import Engine, EngineConfig, SamplingParams

    compile_cache.enable(True)
    model, params = load_checkpoint(TINY)
    tokenizer = load_tokenizer(TINY)
    table.add("weights, and what JAX's CPU client takes")
    engine = Engine(model, params, EngineConfig(num_pages=options.num_pages), tokenizer=tokenizer)
    table.add(f"engine with {options.num_pages} pages")
    engine.warm_up()
    table.add("warm-up: compiled programs")
    engine.generate(["The grass is green. " * 40] * 64, SamplingParams(max_tokens=32))
    table.add("64 requests")
    ctypes.CDLL(None).malloc_trim(0)
    table.add("the allocator has returned what is free")
    arrays = sum(array.nbytes for array in jax.live_arrays()) >> 20
    print(f"arrays of JAX, pages and weights: {arrays} MiB")


if __name__ == "__main__":
    main()

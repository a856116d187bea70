"""Settings of all tests: eight CPU devices, no implicit rank promotion, compiling quickly, and once for all workers.

pyproject.toml makes warnings errors.
"""

import atexit
import ctypes
import functools
import gc
import importlib.util
import os
import shutil
import tempfile

from longctx.gpu_flags import xla_knows

# Several workers run at a time, so libraries other than JAX get one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A client of httpx reads all certificates that there are, which takes 40 ms; tests ask servers of this machine alone,
# and need none: the folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
# Tests compile much and compute little: LLVM's passes are left out, and fusions are emitted to it without MLIR, each
# program in one piece (`users_fusions` is for tests that look at fusions). A GPU's programs are compiled as ever. JAX
# aborts on a flag that its XLA does not have: newer ones always emit fusions by MLIR.
if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
    os.environ.setdefault(
        "XLA_FLAGS",
        " ".join(
            f"--{name}={value}"
            for name, value in (
                ("xla_backend_optimization_level", 0),
                ("xla_cpu_use_fusion_emitters", "false"),
                ("xla_cpu_parallel_codegen_split_count", 1),
            )
            if xla_knows(name)
        ),
    )

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

collect_ignore = ["gpu"]  # a run of its own, with settings of its own: `make gpu-check`

# Workers of one run share what they compile. They inherit the folder from the process that starts them and removes it.
if "LONGCTX_TEST_PROGRAMS" not in os.environ:
    os.environ["LONGCTX_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="longctx-tests-")
    atexit.register(shutil.rmtree, os.environ["LONGCTX_TEST_PROGRAMS"], ignore_errors=True)
os.environ["XDG_STATE_HOME"] = os.path.join(os.environ["LONGCTX_TEST_PROGRAMS"] or tempfile.gettempdir(), "state")
os.environ["LONGCTX_CACHE"] = os.path.join(os.environ["LONGCTX_TEST_PROGRAMS"] or tempfile.gettempdir(), "commands")
if os.environ["LONGCTX_TEST_PROGRAMS"]:
    jax.config.update("jax_compilation_cache_dir", os.environ["LONGCTX_TEST_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_compilation_cache_max_size", -1)  # with a limit, JAX reads all names at each new program

# An example of a new shape compiles, which takes too long for deadlines and for shrinking.
for profile, max_examples in (("quick", 10), ("thorough", 50)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=max_examples,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "thorough")


@pytest.fixture
def users_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered and compiled in a test has the fusions that users have: in place, and the same to the bit."""
    name = "xla_cpu_use_fusion_emitters"
    options = {name: True} if xla_knows(name) else {}
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", functools.partialmethod(jax.stages.Lowered.compile, compiler_options=options)
    )


def pytest_collection_finish() -> None:
    """Modules and test items stay until the end: without this, each full collection would go through all of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # what JAX keeps grows too; by default a twentieth of the time goes into collections


MOST_RESIDENT = 1_500_000_000  # bytes of a worker, beyond which a module's programs go with it


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """JAX keeps every program that it has compiled: without this, a worker would end with 5 GB of them."""
    if nextitem is None or nextitem.path == item.path:
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem != "test_aot")  # the longest first, so that workers end together

"""Settings of all tests: eight CPU devices, and no implicit rank promotion. pyproject.toml makes warnings errors."""

import os

# Several workers run at a time, so libraries other than JAX get one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# An example of a new shape compiles, which takes too long for deadlines and for shrinking.
settings.register_profile(
    "longctx",
    deadline=None,
    max_examples=25,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("longctx")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem != "test_aot")  # the longest first, so that workers end together
    if jax.default_backend() != "gpu":
        no_gpu = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)

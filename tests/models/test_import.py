"""`import longctx.models` stays light."""

import subprocess
import sys

PROGRAM = """
import sys, time, jax
start = time.process_time()  # the machine is shared
import longctx.models
seconds = time.process_time() - start
print(seconds, *sorted({"torch", "transformers", "tokenizers", "jinja2", "flax", "optax"} & set(sys.modules)))
"""


def test_import_is_quick_and_pulls_in_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seconds, *heavy = run.stdout.split()
    assert heavy == []
    assert float(seconds) < 1.0

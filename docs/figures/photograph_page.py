"""Takes the pictures of the page in docs/serving.md: a short question while a book is being read.

python docs/figures/photograph_page.py URL     # of a fresh `longctx serve` with the built-in model
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

HERE = Path(__file__).parent


def photograph(page: Page, name: str, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 1000})
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(400)  # until the charts are drawn for this width
    page.screenshot(path=HERE / f"{name}.png", full_page=width < 600)


def main(url: str, scheme: str = "light") -> None:
    """Write page_wide.png and page_narrow.png, or those of another colour scheme with its name."""
    suffix = "" if scheme == "light" else f"_{scheme}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
        page.goto(url)
        book = page.get_by_role("article", name="Conversation 1")
        book.get_by_role("button", name="Example: a book").click()
        expect(book.get_by_label("Question")).to_be_focused()
        book.get_by_role("button", name="Ask", exact=True).click()
        expect(book.locator("progress")).to_be_visible()
        page.get_by_role("button", name="Add a conversation").click()
        note = page.get_by_role("article", name="Conversation 2")
        note.get_by_role("button", name="Example: a note").click()
        expect(note.get_by_label("Question")).to_be_focused()
        page.wait_for_timeout(1500)
        note.get_by_role("button", name="Ask", exact=True).click()
        expect(note.locator(".figures")).to_contain_text("first token after", timeout=60_000)
        photograph(page, f"page_wide{suffix}", 1400, scheme)
        expect(book.locator(".figures")).to_contain_text("first token after", timeout=60_000)
        photograph(page, f"page_narrow{suffix}", 390, scheme)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

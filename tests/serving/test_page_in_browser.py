"""The page in a real browser, headless, against `longctx serve` with the built-in model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import needs_chromium, open_browser
from playwright.sync_api import Browser, Locator, Page, Route, expect
from serve_process import ServeProcess

from longctx.models import passkey

pytestmark = [pytest.mark.slow, needs_chromium]
# Collects what the page's policy forbade, and all values that progress bars had.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
window.progress = [];
new MutationObserver((changes) => {
  for (const { target } of changes) {
    if (target.localName === "progress" && !target.hidden) progress.push([target.value, target.max]);
  }
}).observe(document, { subtree: true, attributes: true, attributeFilter: ["value"] });
"""
# The classes of each stack's bars.
STACKS = "(all) => all.map((one) => [...one.querySelectorAll('rect')].map((bar) => bar.getAttribute('class')))"
MARKUP = '<img src="x" onerror="window.hacked = 1"><script>window.hacked = 2</script><b>bold</b>'
# Drops a file where a user would.
DROP = """
(element, [name, text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
  for (const type of ["dragenter", "dragover", "drop"]) {
    element.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer }));
  }
}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess("--max-length", "32768") as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=60_000)
    with open_browser() as browser:
        yield browser


class Viewed:
    """A page that has been opened, and what went wrong in it."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1400, "height": 1000}} | context))
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.add_init_script(WATCH)
        self.page.goto(url)

    def __enter__(self) -> "Viewed":
        return self

    def __exit__(self, *error: object) -> None:
        if not any(error):
            assert self.errors == []
            assert self.page.evaluate("violations") == []
        self.context.close()

    def conversation(self, number: int = 1) -> Locator:
        return self.page.get_by_role("article", name=f"Conversation {number}")


def drop(conversation: Locator, name: str, text: str) -> None:
    conversation.locator(".document").evaluate(DROP, [name, text])


def ask(conversation: Locator, question: str) -> None:
    conversation.get_by_label("Question").fill(question)
    conversation.get_by_role("button", name="Ask", exact=True).click()


def figures(conversation: Locator) -> Locator:
    """The last line of a turn, once its answer has ended."""
    return conversation.locator(".figures").last


def bars(page: Page, figure: str) -> list[dict[str, str]]:
    """The bars of a chart: their classes and sizes."""
    found = page.locator(f"#{figure} .plot rect").all()
    return [{name: bar.get_attribute(name) or "" for name in ("class", "height", "width")} for bar in found]


def test_a_dropped_document_is_read_and_answered_while_charts_move(browser: Browser, server: ServeProcess) -> None:
    document = passkey.make_document(12_000, 3, 41)
    name, key = next(iter(document.facts.items()))
    with Viewed(browser, server.url) as viewed:
        page, conversation = viewed.page, viewed.conversation()
        expect(page.locator("#connection")).to_have_text("live")
        drop(conversation, "a long letter.txt", document.text)
        expect(conversation.locator(".document .name")).to_have_text("a long letter.txt, 12,000 characters")
        ask(conversation, passkey.question(name))
        expect(conversation.locator(".state")).to_have_text(re.compile(r"read [\d,]+ of 12,\d+ tokens, .+ left"))
        some = len(bars(page, "rows"))
        expect(conversation.locator(".answer")).to_have_text(key)
        expect(figures(conversation)).to_have_text(
            re.compile(r"first token after .+ · prompt 12,\d+ tokens, \d+ of them cached · answer 6")
        )
        values = [value for value, most in page.evaluate("progress")]
        assert len(set(values)) >= 5
        assert values == sorted(values)
        assert conversation.locator("progress").is_hidden()

        expect(page.locator("#ttft .plot rect.own")).to_have_count(1)
        expect(page.locator("#tpot .plot rect.own")).to_have_count(1)
        rows = bars(page, "rows")
        assert len(rows) > some
        assert {"decodes", "prompt-0"} <= {bar["class"] for bar in rows}
        assert len({bar["height"] for bar in rows}) > 2
        assert page.locator("#rows .legend").inner_text().split("\n") == ["decodes", "a long letter.txt"]
        # The second question finds the document in the cache.
        ask(conversation, passkey.question([*document.facts][1]))
        expect(conversation.locator(".answer").last).to_have_text([*document.facts.values()][1])
        expect(figures(conversation)).to_have_text(re.compile(r"1[12],\d+ of them cached"))
        expect(page.locator("#pages .value")).to_have_text(re.compile(r"^0 of .+ held, [1-9].* more cached"))


def test_a_short_question_is_answered_while_a_book_is_being_read(browser: Browser, server: ServeProcess) -> None:
    with Viewed(browser, server.url) as viewed:
        page, book = viewed.page, viewed.conversation(1)
        book.get_by_role("button", name="Example: a book").click()
        expect(book.get_by_label("Question")).to_have_value(re.compile("pass key"))
        # Another beginning than the one in the cache.
        text = passkey.make_document(16_384, 4, 7)
        drop(book, "book.txt", text.text)
        ask(book, passkey.question("nothing"))
        expect(book.locator("progress")).to_be_visible()
        page.get_by_role("button", name="Add a conversation").click()
        note = viewed.conversation(2)
        note.get_by_role("button", name="Example: a note").click()
        note.get_by_role("button", name="Ask", exact=True).click()
        expect(note.locator(".answer")).to_have_text(re.compile(r"^\d{5}$"))
        assert book.locator("progress").is_visible()
        assert book.locator(".answer").inner_text() == ""
        legend = page.locator("#rows .legend")
        expect(legend).to_contain_text("book.txt")
        expect(legend).to_contain_text("note.txt")
        expect(figures(book)).to_have_text(re.compile("first token after"))
        # Some step held rows of both.
        steps = page.locator("#rows .plot g").evaluate_all(STACKS)
        assert any(len({name for name in step if name.startswith("prompt-")}) == 2 for step in steps)
        first = [bar.get_attribute("height") for bar in page.locator("#ttft rect.own").all()]
        assert len(first) == 2
        assert float(first[0] or 0) < float(first[1] or 0)  # the note came first, and sooner


def test_markup_in_what_users_and_models_write_is_text(browser: Browser, server: ServeProcess) -> None:
    def answer(route: Route) -> None:
        chunks = [{"choices": [{"index": 0, "text": part, "finish_reason": None}]} for part in (MARKUP[:9], MARKUP[9:])]
        lines = "".join(f"data: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks)
        route.fulfill(body=f"{lines}data: [DONE]\n\n", content_type="text/event-stream")

    def refuse(route: Route) -> None:
        body = 'data: {"error": {"message": ' + json.dumps(MARKUP) + ', "code": null}}\n\n'
        route.fulfill(body=body, content_type="text/event-stream")

    with Viewed(browser, server.url) as viewed:
        page, conversation = viewed.page, viewed.conversation()
        drop(conversation, MARKUP, MARKUP)
        page.route("**/v1/completions", answer)
        ask(conversation, MARKUP)
        expect(conversation.locator(".answer")).to_have_text(MARKUP)
        assert conversation.locator(".answer").inner_text() == MARKUP
        assert conversation.locator(".question").inner_text() == MARKUP
        expect(conversation.locator(".document .name")).to_contain_text(MARKUP)
        page.unroute("**/v1/completions")
        page.route("**/v1/completions", refuse)
        ask(conversation, "again")
        expect(conversation.locator(".state").last).to_have_text(MARKUP)
        page.unroute("**/v1/completions")
        # The server's own: the document's name stands in the legend, an id of somebody else's too.
        ask(conversation, MARKUP)
        expect(figures(conversation)).to_have_text(re.compile("first token after"))
        expect(page.locator("#rows .legend")).to_contain_text(MARKUP)
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, {"x-request-id": "<b/onclick=x>"})
        expect(page.locator("#rows .legend")).to_contain_text("<b/onclick=x")
        assert page.locator("img, b, #scheduler script, #chats script").count() == 0
        assert page.evaluate("window.hacked") is None


def test_stopping_a_question_ends_it_on_the_server(browser: Browser, server: ServeProcess) -> None:
    with Viewed(browser, server.url) as viewed:
        conversation = viewed.conversation()
        drop(conversation, "book.txt", passkey.make_document(20_000, 1, 99).text)
        ask(conversation, "How long is it?")
        expect(conversation.locator("progress")).to_be_visible()
        conversation.get_by_role("button", name="Stop").click()
        expect(conversation.locator(".state")).to_have_text("stopped")
        expect(viewed.page.locator("#queue .value")).to_have_text("0 running, 0 waiting")
        expect(conversation.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_the_page_asks_for_a_key_and_keeps_it_nowhere(browser: Browser) -> None:
    with ServeProcess("--api-key", "alice some-long-key") as server, Viewed(browser, server.url) as viewed:
        page, conversation = viewed.page, viewed.conversation()
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        expect(page.locator("#connection")).to_contain_text("key")
        key.fill("a-wrong-key")
        key.press("Enter")
        ask(conversation, "Is it right?")
        expect(conversation.locator(".failed .state")).to_contain_text("key")
        key.fill("some-long-key")
        key.press("Enter")
        expect(page.locator("#connection")).to_have_text("live")
        conversation.get_by_role("button", name="Example: a note").click()
        conversation.get_by_role("button", name="Ask", exact=True).click()
        expect(conversation.locator(".answer").last).to_have_text(re.compile(r"^\d{5}$"))
        stored = page.evaluate("[{...localStorage}, {...sessionStorage}, document.cookie, location.href]")
        assert stored == [{}, {}, "", f"{server.url}/"]
        assert viewed.errors
        viewed.errors = [error for error in viewed.errors if "401" not in error]
        page.reload()
        expect(page.locator("#connection")).to_contain_text("key")
        viewed.errors = [error for error in viewed.errors if "401" not in error]


def test_the_pages_own_requests_stay_on_the_server(browser: Browser, server: ServeProcess) -> None:
    asked: list[str] = []
    with Viewed(browser, "about:blank") as viewed:
        viewed.page.on("request", lambda request: asked.append(request.url))
        viewed.page.goto(server.url)
        expect(viewed.page.locator("#connection")).to_have_text("live")
    assert all(url.startswith(f"{server.url}/") for url in asked)
    assert len(asked) > 8

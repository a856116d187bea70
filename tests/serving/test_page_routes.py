"""The page's files, and what keeps them from running anything else."""

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

import pytest
from fake_device import make_engine
from fastapi import FastAPI
from starlette.testclient import TestClient

from longctx.serving.engine.thread import EngineThread
from longctx.serving.server.auth import AuthMiddleware, KeyRing
from longctx.serving.server.logs import AuditLog
from longctx.serving.server.page_feed import MAX_VIEWERS, EngineFeed
from longctx.serving.server.routes import page as routes
from longctx.serving.server.settings import ServerSettings

MODEL = routes.PageModel("tiny", False, 256, True)
FILES = {path.name: path.read_bytes() for path in routes.DIRECTORY.iterdir()}
SCRIPTS = {name: content.decode() for name, content in FILES.items() if name.endswith(".js")}


@pytest.fixture
def feed() -> EngineFeed:
    return EngineFeed(EngineThread(make_engine()))


@pytest.fixture
def client(feed: EngineFeed) -> TestClient:
    app = FastAPI()
    app.include_router(routes.page_routes(MODEL, feed))
    app.add_middleware(AuthMiddleware, settings=ServerSettings(), keys=KeyRing([]), audit=AuditLog(None))
    return TestClient(app)


class Tags(HTMLParser):
    """All tags of a document, with their attributes and, of scripts and styles, what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.inside.append(data)


def test_files_come_with_a_policy_that_allows_their_own_scripts_alone(client: TestClient) -> None:
    for path in ("/", *(f"/page/static/{name}" for name in FILES)):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert policy["object-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert not any("unsafe" in value or "*" in value for value in policy.values())
        assert not {"script-src", "style-src", "connect-src"} & set(policy)  # so the default holds
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/page/static/main.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_the_page_has_no_script_or_style_within() -> None:
    page = Tags(FILES["index.html"].decode())
    assert page.inside == []
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"style"}
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_file_that_a_file_asks_for_is_there() -> None:
    page = Tags(FILES["index.html"].decode())
    asked = {value for _, attributes in page.tags for name in ("src", "href") if (value := attributes.get(name))}
    asked = {urljoin("/", value) for value in asked if not value.startswith("#")}
    for text in SCRIPTS.values():
        asked |= {urljoin("/page/static/", name) for name in re.findall(r'from "(.+?)"', text)}
    assert asked == {f"/page/static/{name}" for name in FILES} - {"/page/static/index.html"}
    assert b"url(" not in FILES["style.css"]
    assert b"@import" not in FILES["style.css"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_turn_text_into_markup_or_code(name: str) -> None:
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage|sessionStorage"
    assert re.findall(words, SCRIPTS[name]) == []


def test_other_names_are_not_found(client: TestClient) -> None:
    for path in ("none.js", "..%2fauth.py", "%2e%2e/auth.py", "__init__.py", "/etc/passwd"):
        assert client.get(f"/page/static/{path}").status_code == 404


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/static/main.js").headers["etag"]
    again = client.get("/page/static/main.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_model_and_examples(client: TestClient) -> None:
    model = client.get("/page/model").json()
    assert model == {"name": "tiny", "has_chat": False, "max_length": 256, "is_builtin": True, "is_cluster": False}
    book, note = (client.get("/page/example", params={"kind": kind}).json() for kind in ("book", "note"))
    assert (len(book["text"]), len(note["text"])) == (16_384, 1_024)
    assert len(book["questions"]) == 4
    assert client.get("/page/example?kind=other").status_code == 404


def test_one_viewer_too_many_gets_503(client: TestClient, feed: EngineFeed) -> None:
    feed.num_viewers = MAX_VIEWERS
    answer = client.get("/page/events")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "10"

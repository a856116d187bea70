"""docs/serving.md names every endpoint of the server and every field of its requests, and no others."""

import re
from pathlib import Path

from longctx.cli import command_flags, vllm_flags
from longctx.serving.server.auth import OPEN_PATHS, scope_of
from longctx.serving.server.chat_schemas import ChatBody
from longctx.serving.server.known_fields import HARMLESS, OF_CHATS, OF_COMPLETIONS, PASSED_OVER, REFUSED
from longctx.serving.server.responses_body import ResponsesBody
from longctx.serving.server.schemas import CompletionBody

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
ROUTE = re.compile(r'@router\.(?:get|post|api_route)\(\s*"([^"]+)"')


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_endpoint_is_in_the_table_with_the_scope_that_it_needs() -> None:
    sources = (ROOT / "longctx" / "serving" / "server" / "routes").glob("*.py")
    served = {path.replace(":path}", "}") for source in sources for path in ROUTE.findall(source.read_text("utf-8"))}
    described = {name: key for paths, _, key in rows("Endpoints") for name in names(paths)}
    assert set(described) == served
    is_open = {name for name, scope in described.items() if scope == "none"}
    own = {path for path in OPEN_PATHS if not path.startswith("/cluster/")}  # those are a router's: cluster.md
    assert is_open == own | {"/page/static/{name}"}
    needed = {name: scope_of(name) for name in served - is_open}
    assert {name: described[name].strip("`") for name in needed} == {
        name: each or "any" for name, each in needed.items()
    }


def test_every_field_is_in_the_table_or_among_those_that_are_refused() -> None:
    described = [cells for cells in rows("Options of a request") if len(cells) == 3]
    assert {name for cells in described for name in names(cells[0])} == {
        *CompletionBody.model_fields,
        *ChatBody.model_fields,
    }


def test_every_field_of_other_servers_is_on_the_page() -> None:
    shown = {name: cells[1] for cells in rows("Options of a request") if len(cells) == 2 for name in names(cells[0])}
    assert {name: text.partition(" (")[0] for name, text in shown.items() if name in REFUSED} == {
        name: refused.why.partition(" (")[0] for name, refused in REFUSED.items()
    }
    assert {cells[1]: names(cells[0]) for cells in rows("Options of a request") if cells[1] in HARMLESS} == {
        why: set(each) for why, each in HARMLESS.items()
    }
    chats, completions = set(ChatBody.model_fields), set(CompletionBody.model_fields)
    assert chats & completions & set(REFUSED) == set()
    assert chats - completions == set(OF_CHATS)
    assert completions - chats == set(OF_COMPLETIONS)
    assert (chats | completions | set(REFUSED)) & PASSED_OVER == set()


def test_every_field_of_responses_is_in_their_table() -> None:
    described = {name.split(".")[0] for cells in rows("Responses") for cell in cells for name in names(cell)}
    assert set(ResponsesBody.model_fields) - described == set()


def test_flags_of_the_server_exist() -> None:
    known = {option for action in command_flags("serve") for option in action.option_strings}
    known |= {*vllm_flags.SAME, *vllm_flags.ALWAYS, *vllm_flags.INSTEAD}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE.replace(section("Behind a router"), "")))
    assert named - known == set()
    assert len(named) > 15

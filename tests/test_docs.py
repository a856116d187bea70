"""The blocks of code in the pages of the root and of docs/ run as a reader would paste them, one after another.

A block that can't run here says so after its language: three backticks, `python not-run: needs two hosts`. A block
`text` right behind one of Python is what that printed, with `...` for what is left out; where lines differ
between runs but for how they begin, it is `text varies`.
"""

import ast
import doctest
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from public_names import public_names

from longctx.models.builtin import TINY
from longctx.serving import Event, Metrics, Output, TokenLogprob

ROOT = Path(__file__).parent.parent
SHELLS = ("sh", "bash")
# What a reader would type: no output of a program begins like this.
COMMAND = re.compile(r"^(\$ )?(longctx|pip|python3?|make|srun|sbatch|kubectl|examples/\S+) ", re.MULTILINE)
# Pages that compile several engines or rings, or start servers.
SLOW = (
    "docs/engine.md",
    "docs/context_parallelism.md",
    "docs/fp8.md",
    "docs/fp8_pages.md",
    "docs/how_to/debug_a_slow_request.md",
    "docs/how_to/fit_memory.md",
    "docs/how_to/pack_documents.md",
    "docs/how_to/use_in_your_model.md",
    "docs/how_to/write_a_benchmark_workload.md",
    "docs/kv_cache.md",
    "docs/nnx.md",
    "docs/replay.md",
    "docs/tutorials/attention_with_state.md",
    "docs/tutorials/prefix_cache_cluster.md",
    "docs/tutorials/ring_by_hand.md",
    "docs/tutorials/scheduling_policy.md",
    "docs/tutorials/serve_llama.md",
    "docs/tutorials/which_exchange.md",
)
FOR_NEWCOMERS = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/tutorials/", "docs/how_to/")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class Block(NamedTuple):
    """A fenced block: the line after its fence, the fence's words, and the text."""

    page: str
    line: int
    language: str
    not_run: str | None
    text: str
    varies: bool

    @property
    def end(self) -> int:
        """The line of the fence that closes it."""
        return self.line + self.text.count("\n")


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    blocks: list[Block] = []
    info: str | None = None
    start, lines = 0, page.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if info is None:
            info, start = line.strip().removeprefix("```").strip(), number + 1
            continue
        language, _, rest = info.partition(" ")
        not_run = rest.removeprefix("not-run:").strip() if rest.startswith("not-run:") else None
        text = "".join(lines[start:number])
        blocks.append(Block(str(page.relative_to(ROOT)), start + 1, language, not_run, text, rest == "varies"))
        info = None
    assert info is None, f"{page}:{start}: a block without an end"
    return blocks


BLOCKS = [
    block for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))) for block in blocks_of(page)
]
RUN = [block for block in BLOCKS if block.not_run is None]
PYTHON_PAGES = list(dict.fromkeys(block.page for block in RUN if block.language == "python"))

RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for page, line, text in json.load(sys.stdin):
    exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
    print(end="\\x1e", flush=True)
"""
# What differs between runs and machines: keys of pages, and numbers.
NUMBER = re.compile(r"\b[0-9a-f]{32}\b|[+-]?\d[\d,]*(\.\d+)?")


def outputs_of(page: str) -> list[tuple[int, Block]]:
    """The blocks of a page that show what one of Python printed, each with the number of that one."""
    blocks = [block for block in BLOCKS if block.page == page]
    run = [block for block in blocks if block in RUN and block.language == "python"]
    pairs = [(a, b) for a, b in itertools.pairwise(blocks) if a in run and b.language == "text"]
    return [(run.index(a), b) for a, b in pairs if b.line - a.end <= 5]  # one line of prose may stand between


def is_same_output(shown: Block, printed: str) -> bool:
    """Whether a block shows what was printed; True if nothing was, as it then shows what something else printed."""
    if not printed.strip():
        return True
    if shown.varies:
        return labels(shown.text) - {"...", ""} <= labels(printed)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown.text.strip(), printed.strip(), options)


def labels(text: str) -> set[str]:
    """How lines begin, up to two spaces, without their numbers: what stays the same on a busy machine too."""
    return {NUMBER.sub("0", line).strip().partition("  ")[0] for line in text.splitlines()}


def run(command: list[str], directory: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, cwd=directory, env=environment, input=stdin, capture_output=True, text=True, timeout=580
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a reader has a checkpoint of an instruct model: here the built-in one, with a tokenizer and a template."""
    checkpoint = tmp_path / "Llama-3.1-8B-Instruct"
    shutil.copytree(TINY, checkpoint)
    symbols = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(symbols))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PYTHON_PAGES]
)
def test_python_blocks_of_a_page_run_as_pasted(page: str, directory: Path) -> None:
    blocks = [(str(ROOT / page), x.line, x.text) for x in RUN if x.page == page and x.language == "python"]
    result = run([sys.executable, "-c", RUNNER], directory, json.dumps(blocks))
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split("\x1e")
    for number, shown in outputs_of(page):
        assert is_same_output(shown, printed[number]), f"{page}:{shown.line} is now:\n{printed[number]}"
    if page == "README.md":
        assert "48213" in result.stdout
        assert "90417" in result.stdout


@pytest.mark.slow
def test_shell_blocks_run_as_pasted(directory: Path) -> None:
    for block in RUN:
        if block.language in SHELLS:
            result = run([block.language, "-eu", "-c", block.text], directory)
            assert result.returncode == 0, f"{block.page}:{block.line}\n{result.stderr}"


@pytest.mark.parametrize("of", [Output, Event, Metrics, TokenLogprob])
def test_every_field_of_what_comes_back_is_described(of: type) -> None:
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")))
    methods = {name for name, value in vars(of).items() if inspect.isfunction(value)}
    fields = {name for name in (*of.__annotations__, *vars(of)) if not name.startswith("_")} - methods
    assert fields - described == set()


def test_what_newcomers_import_is_in_the_reference() -> None:
    public = {f"{module}.{name}" for module, names in public_names().items() for name in names} | {*public_names()}
    imported = {
        f"{statement.module}.{alias.name}"
        for block in BLOCKS
        if block.language == "python" and block.page.startswith(FOR_NEWCOMERS)
        for statement in ast.walk(ast.parse(block.text))
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("longctx")
        for alias in statement.names
    }
    assert len(imported) > 50
    assert imported - public == set()


def test_readme_has_blocks_that_run() -> None:
    assert "README.md" in PYTHON_PAGES
    assert set(SLOW) <= set(PYTHON_PAGES)


def test_a_block_that_is_not_run_says_why() -> None:
    labelled = {"python", *SHELLS}
    silent = [f"{x.page}:{x.line}" for x in BLOCKS if x.not_run == "" or (x.not_run and x.language not in labelled)]
    assert silent == []


@pytest.mark.parametrize(
    ("shown", "printed", "varies", "is_same"),
    [
        ("a 1\nb 2\n", "a 1\nb  2\n", False, True),
        ("a 1\nb 2\n", "a 1\nb 3\n", False, False),
        ("a 1\nb 2\n", "a 1\nb 3\n", True, True),
        ("a 1\nb 2\n", "a 1\nc 2\n", True, False),
        ("a 1\n...\nb 2\n", "a 1\nlong\nb 2\n", False, True),
        ("what a server wrote\n", "", False, True),
    ],
)
def test_output_that_has_changed_is_found(shown: str, printed: str, varies: bool, is_same: bool) -> None:
    assert is_same_output(Block("page.md", 1, "text", None, shown, varies), printed) == is_same


def test_commands_stand_in_shell_blocks() -> None:
    """So that they are run, or say why not."""
    unlabelled = [f"{x.page}:{x.line}" for x in BLOCKS if x.language in ("", "text") and COMMAND.search(x.text)]
    assert unlabelled == []

"""The blocks of code in the pages of the root and of docs/ run as a reader would paste them, one after another.

A block that can't run here says so after its language: three backticks, `python not-run: needs two hosts`. A block
`text` right behind one of Python is what that printed, with `...` for what is left out; where lines differ
between runs but for how they begin, it is `text varies`.
"""

import doctest
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

from longctx.models.builtin import TINY

ROOT = Path(__file__).parent.parent
SHELLS = ("sh", "bash")
# Lines that a reader would type: no output of a program begins like this.
COMMAND = re.compile(r"^(\$ )?(longctx|pip|python3?|make|srun|sbatch|kubectl|examples/\S+) ", re.MULTILINE)
# Of the pages, those that run in the quick tests; the README's block is the quickstart's, too.
QUICK = (
    "README.md",
    "docs/how_to/choose_a_plan.md",
    "docs/recipes.md",
    "docs/simulation.md",
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
FENCE = re.compile(r"^[ ]*```(\w*)(?: (.*))?\n((?:.*\n)*?)^[ ]*```$", re.MULTILINE)
NUMBER = re.compile(r"\b[0-9a-f]{32}\b|[+-]?\d[\d,]*(\.\d+)?")  # differs between runs and machines, as keys do
RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for page, line, text in json.load(sys.stdin):
    exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
    print(end="\\x1e", flush=True)
"""


class Block(NamedTuple):
    """Fenced block: the line after its fence, the fence's words, and the text."""

    page: str
    line: int
    language: str
    words: str
    text: str

    @property
    def is_run(self) -> bool:
        return not self.words.startswith("not-run:")


def blocks_of(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) % 2 == 0, f"{name} has a block without an end"
    return [
        Block(name, text.count("\n", 0, found.start(3)) + 1, found[1], found[2] or "", found[3])
        for found in FENCE.finditer(text)
    ]


BLOCKS = [
    block for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))) for block in blocks_of(page)
]
PYTHON_PAGES = list(dict.fromkeys(block.page for block in BLOCKS if block.is_run and block.language == "python"))


def is_same_output(shown: str, printed: str, varies: bool) -> bool:
    """Whether a block shows what was printed; True if nothing was, as it then shows what something else printed."""
    if varies and printed.strip():
        labels = [{NUMBER.sub("0", x).strip().partition("  ")[0] for x in y.splitlines()} for y in (shown, printed)]
        return labels[0] - {"...", ""} <= labels[1]
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return not printed.strip() or doctest.OutputChecker().check_output(shown.strip(), printed.strip(), options)


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
    "page", [pytest.param(page, marks=[] if page in QUICK else [pytest.mark.slow]) for page in PYTHON_PAGES]
)
def test_python_blocks_of_a_page_run_as_pasted(page: str, directory: Path) -> None:
    blocks = [block for block in BLOCKS if block.page == page]
    python = [block for block in blocks if block.is_run and block.language == "python"]
    given = [(str(ROOT / page), block.line, block.text) for block in python]
    result = run([sys.executable, "-c", RUNNER], directory, json.dumps(given))
    assert result.returncode == 0, result.stderr
    printed = dict(zip(python, result.stdout.split("\x1e"), strict=False))
    for block, shown in itertools.pairwise(blocks):
        is_near = shown.line - block.line - block.text.count("\n") <= 5  # one line of prose may stand between
        if block in printed and shown.language == "text" and is_near:
            is_same = is_same_output(shown.text, printed[block], shown.words == "varies")
            assert is_same, f"{page}:{shown.line} is now:\n{printed[block]}"
    if page == "README.md":
        assert "48213" in result.stdout
        assert "90417" in result.stdout


@pytest.mark.slow
def test_shell_blocks_run_as_pasted(directory: Path) -> None:
    for block in BLOCKS:
        if block.is_run and block.language in SHELLS:
            result = run([block.language, "-eu", "-c", block.text], directory)
            assert result.returncode == 0, f"{block.page}:{block.line}\n{result.stderr}"


def test_commands_stand_in_blocks_that_run_or_say_why_not() -> None:
    assert {*QUICK} < {*PYTHON_PAGES}
    silent = [f"{x.page}:{x.line}" for x in BLOCKS if not x.is_run and x.words.strip() == "not-run:"]
    hidden = [f"{x.page}:{x.line}" for x in BLOCKS if x.language in ("", "text") and COMMAND.search(x.text)]
    assert silent + hidden == []

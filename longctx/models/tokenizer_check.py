"""Checks a tokenizer and its chat template, in a process of its own if run as a module.

A damaged `tokenizer.json` can make the `tokenizers` library abort its process, which nothing in that process can catch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from longctx.models.json_file import is_gguf
from longctx.models.python_child import module_command, module_environment
from longctx.models.tokenizer import HFTokenizer, load_tokenizer
from longctx.models.validation import shown

_MAX_SECONDS = 300
_TEXT = "Zürich, 東京 and 🦙 in 2026"


def tokenizer_problems(directory: Path, vocab_size: int | None) -> list[str]:
    """What is wrong with the tokenizer of a directory or GGUF file, for a model of `vocab_size` (None: not known)."""
    file = directory if is_gguf(directory) else directory / "tokenizer.json"
    command = module_command("longctx.models.tokenizer_check", str(directory), json.dumps(vocab_size))
    try:
        child = subprocess.run(command, env=module_environment(), capture_output=True, timeout=_MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"{file}: checking it takes more than {_MAX_SECONDS} seconds"]
    if child.returncode:
        return [f"{file}: reading it ended the process with status {child.returncode}"]
    return json.loads(child.stdout)


def _problems(directory: Path, vocab_size: int | None) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(directory)
        tokenizer.decode(tokenizer.encode(_TEXT))
    except (FileNotFoundError, ValueError) as error:
        yield str(error)
        return
    limit = "the number of rows of token_embd.weight" if is_gguf(directory) else "vocab_size in config.json"
    largest = tokenizer.largest_id if isinstance(tokenizer, HFTokenizer) else tokenizer.vocab_size - 1
    if vocab_size is not None and largest >= vocab_size:
        yield f"{directory}: the tokenizer has the id {largest}, but {limit} is {vocab_size}"
    if not isinstance(tokenizer, HFTokenizer):
        return
    for id in tokenizer.eos_ids:
        if vocab_size is not None and id >= vocab_size:
            yield f"{directory}: eos_token_id {id} must be below {limit}, {vocab_size}"
    for name, token in tokenizer.unknown_special_tokens.items():  # none in GGUF, which has their ids
        yield f"{directory}/tokenizer_config.json: {name} {shown(token)} is not in the vocabulary of tokenizer.json"
    if tokenizer.chat_template is not None:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": _TEXT}])
        except ValueError as error:
            yield str(error)


if __name__ == "__main__":
    print(json.dumps(list(_problems(Path(sys.argv[1]), json.loads(sys.argv[2])))))

"""Finds the model that a user names: a directory, a GGUF file, or a model of the Hugging Face hub, which is downloaded.

`huggingface_hub` downloads, into the cache that all its users share, and reads what they set: `HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`. Only the files are fetched that this library reads. The names of files of
weights come from the model's index, and are never taken for patterns.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path
from typing import Any

from longctx import extras
from longctx.models.safetensors_reader import INDEX_FILE, SINGLE_FILE, read_index
from longctx.models.validation import check_directory, is_file, is_gguf

_NAME = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]+))?", re.ASCII)
_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_FILE,
]
_FOLDERS = ["*/*"]  # other formats of the model; the hub's patterns match slashes too


def resolve_model(model: str | os.PathLike[str], is_quiet: bool = False) -> Path:
    """The directory or GGUF file of a model, which is downloaded from the hub if it isn't there yet.

    A download that breaks continues where it was; files that were complete are not fetched again.

    Args:
      model: a directory, a file `*.gguf`, or the name of a model of the Hugging Face hub, `owner/name` or
        `owner/name@revision`. A directory of that name takes precedence.
      is_quiet: show no progress bar (which only a terminal shows).

    Returns:
      The path, as `load_checkpoint` and `load_tokenizer` take it.

    Raises:
      FileNotFoundError: there is no such directory or file.
      ValueError: it is a file of another kind, such as a pipe; or the hub has no such model or revision, can't be
        reached, asks for a token, or has no safetensors of it; or, as MissingExtra, the package `huggingface_hub` is
        not installed.

    Examples:
      >>> from longctx.models import resolve_model
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> resolve_model(TINY) == TINY  # a directory that is there; "owner/name" is downloaded
      True
      >>> resolve_model("models/none.gguf")
      Traceback (most recent call last):
          ...
      FileNotFoundError: no such file: models/none.gguf
    """
    if not os.fspath(model):
        raise ValueError("no model is named")
    path = Path(model)
    with contextlib.suppress(FileNotFoundError):
        check_directory(path)
        return path
    if is_file(path):
        if is_gguf(path):
            return path
        raise ValueError(f"{path} is a file, but no .gguf; a model is a directory, a .gguf file or a name of the hub")
    name = _NAME.fullmatch(os.fspath(model))
    if is_gguf(path):
        raise FileNotFoundError(f"no such file: {path}")
    if name is None:
        raise FileNotFoundError(f"no such directory: {path}")
    with extras.needed("hub", f"no such directory: {path}; a model of the Hugging Face hub"):
        import huggingface_hub  # noqa: F401
    return _download(name["model"], name["revision"], is_quiet)


def _download(model: str, revision: str | None, is_quiet: bool) -> Path:
    """Download the files that this library reads, and return the directory of the cache that has them."""
    from huggingface_hub import errors, snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **{**settings, "disable": True if is_quiet else None})

    where = f"the hub's model {model}" + ("" if revision is None else f"@{revision}")

    def fetch(revision: str | None, files: list[str]) -> Path:
        settings: Any = {"ignore_patterns": _FOLDERS, "tqdm_class": Bar}
        return Path(snapshot_download(model, revision=revision, allow_patterns=files, **settings))

    try:
        directory = fetch(revision, _FILES)
        index = directory / INDEX_FILE
        weights = set(read_index(index).values()) if is_file(index) else set()
        fetch(directory.name, [glob.escape(file) for file in sorted({SINGLE_FILE, *weights})])  # of the same commit
    except (errors.HTTPError, errors.HfHubHTTPError, OSError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"there is no directory {model}, and {where} cannot be downloaded: {why}") from None
    if not is_file(directory / SINGLE_FILE) and not is_file(directory / INDEX_FILE):
        raise ValueError(f"{where} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are downloaded")
    return directory

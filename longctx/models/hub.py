"""Finds the model that a user names: a directory, a GGUF file, or a model of the Hugging Face hub, which is downloaded.

`huggingface_hub` downloads, into the cache that all its users share, and reads what they set: `HF_TOKEN`, `HF_HOME`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`. Only the files are fetched that this library reads.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from longctx import extras
from longctx.models.safetensors_reader import INDEX_FILE, SINGLE_FILE, index_files
from longctx.models.validation import check_directory, exists, is_file, is_gguf

_NAME = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]+))?", re.ASCII)
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX_FILE,
)


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
    if exists(path):
        raise ValueError(f"{path} is neither a directory nor a regular file")
    name = _NAME.fullmatch(os.fspath(model))
    if is_gguf(path):
        raise FileNotFoundError(f"no such file: {path}")
    if name is None:
        raise FileNotFoundError(f"no such directory: {path}")
    with extras.needed("hub", f"no such directory: {path}; a model of the Hugging Face hub"):
        import huggingface_hub  # noqa: F401
    return _download(name["model"], name["revision"], is_quiet)


def _download(model: str, revision: str | None, is_quiet: bool) -> Path:
    directory = _fetch(model, revision, [*_SMALL_FILES, SINGLE_FILE], is_quiet)
    if is_file(directory / SINGLE_FILE):
        return directory
    if not is_file(directory / INDEX_FILE):
        raise ValueError(
            f"the hub's model {model} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors are downloaded"
        )
    # The commit: the branch may have moved on since the index was fetched.
    _fetch(model, directory.name, sorted(index_files(directory)), is_quiet)
    return directory


def _fetch(model: str, revision: str | None, files: list[str], is_quiet: bool) -> Path:
    """Fetch those files that the model has, and return the directory of the cache that has them."""
    from huggingface_hub import errors, snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **{**settings, "disable": True if is_quiet else None})

    where = f"the hub's model {model}" + ("" if revision is None else f"@{revision}")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files, tqdm_class=Bar))
    except errors.GatedRepoError:
        raise ValueError(
            f"{where} is gated: ask for access on its page, and then give a token by `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"there is neither a directory {model} nor such a model on the hub, or it is private: then give a token "
            "by `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"the hub's model {model} has no revision {revision}") from None
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(f"{where} is not, or not whole, in the cache, and {_why_not_reached(error)}") from None
    except errors.HfHubHTTPError as error:
        raise ValueError(f"{where} cannot be downloaded: {_first_line(error)}") from None
    except (errors.HTTPError, OSError) as error:
        raise ValueError(
            f"the download of {where} broke off, and continues with the next call: {_first_line(error)}"
        ) from None


def _why_not_reached(error: BaseException) -> str:
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    cause = error.__cause__
    if isinstance(cause, errors.HfHubHTTPError):
        return f"{constants.ENDPOINT} does not give it: {_first_line(cause)}"
    return f"{constants.ENDPOINT} cannot be reached" + (f": {_first_line(cause)}" if cause is not None else "")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

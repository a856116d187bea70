"""Extras: packages that parts of longctx need and that not everybody installs, and what is said where one is missing.

`EXTRAS` has those that users install, as pyproject.toml has them (tests/test_package.py compares the two).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

DISTRIBUTION = "longctx-jax"
"""Name of the distribution on a package index."""


@dataclass(frozen=True)
class Extra:
    """One extra.

    Attributes:
      purpose: what it is for, in a few words.
      packages: names of its distributions, by the module that each is imported as.
      includes: names of other extras that are part of it.
    """

    purpose: str
    packages: Mapping[str, str] = field(default_factory=dict)
    includes: tuple[str, ...] = ()


EXTRAS: Mapping[str, Extra] = {
    "cuda12": Extra("GPUs with a driver of CUDA 12", {"jax_cuda12_plugin": "jax-cuda12-plugin"}),
    "cuda13": Extra("GPUs with a driver of CUDA 13", {"jax_cuda13_plugin": "jax-cuda13-plugin"}),
    "serve": Extra(
        "an HTTP server: longctx serve",
        {
            "fastapi": "fastapi",
            "httpx": "httpx",
            "llguidance": "llguidance",
            "prometheus_client": "prometheus-client",
            "pydantic": "pydantic",
            "zmq": "pyzmq",
            "uvicorn": "uvicorn",
        },
        ("gguf",),
    ),
    "distributed": Extra("one engine in many processes: --coordinator", {"zmq": "pyzmq"}),
    "transfer": Extra(
        "pages of the KV cache between processes: longctx.cluster.transfer", {"zmq": "pyzmq", "xxhash": "xxhash"}
    ),
    "mooncake": Extra(
        "pages over Mooncake: --kv-messenger, --kv-store",
        {"mooncake": "mooncake-transfer-engine-non-cuda"},
        ("transfer",),
    ),
    "cluster": Extra("engines on many machines by Ray: --launcher ray", {"ray": "ray"}, ("serve", "transfer")),
    "encryption": Extra(
        "files encrypted at rest: --kv-disk-key-file, --record-key-file", {"cryptography": "cryptography"}
    ),
    "otlp": Extra(
        "OpenTelemetry's spans of requests: --otlp",
        {
            "opentelemetry.sdk": "opentelemetry-sdk",
            "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
        },
    ),
    "gguf": Extra("models as .gguf files", {"gguf": "gguf"}),
    "hub": Extra("models by their name on the Hugging Face hub", {"huggingface_hub": "huggingface_hub"}),
    "train": Extra(
        "Flax modules and fine-tuning: longctx.nnx",
        {"flax": "flax", "optax": "optax", "orbax.checkpoint": "orbax-checkpoint"},
    ),
    "plot": Extra("drawings: --plot, figures", {"matplotlib": "matplotlib"}),
    "docs": Extra(
        "the documentation's site: make docs",
        {"latex2mathml": "latex2mathml", "material": "mkdocs-material", "mkdocstrings": "mkdocstrings", "ruff": "ruff"},
        ("plot",),
    ),
    "notebooks": Extra(
        "examples/notebooks", {"ipykernel": "ipykernel", "jupytext": "jupytext", "nbclient": "nbclient"}, ("plot",)
    ),
}


class MissingExtra(ModuleNotFoundError, ValueError):
    """A package of an extra is not installed; the message says what needs it, and the line that installs it.

    It is a ValueError too, since a user can correct it: commands report it in one line, with exit status 2.
    """


def pip_line(extra: str) -> str:
    """The command that installs an extra.

    Example:
      >>> from longctx.extras import pip_line
      >>> pip_line("serve")
      "pip install 'longctx-jax[serve]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def packages(extra: str) -> dict[str, str]:
    """All distributions of an extra by their modules, those of the extras that it includes too."""
    found: dict[str, str] = {}
    for name in EXTRAS[extra].includes:
        found |= packages(name)
    return {**found, **EXTRAS[extra].packages}


def missing(extra: str) -> list[str]:
    """Names of an extra's distributions that are not installed; nothing but their parent packages is imported."""
    return [distribution for module, distribution in packages(extra).items() if not _is_there(module)]


def is_installed(extra: str) -> bool:
    """Whether all packages of an extra are installed."""
    return not missing(extra)


def check(extra: str, what: str) -> None:
    """Check that an extra is installed, before it is needed.

    Args:
      what: what needs it, for the message; empty if the caller puts that before.

    Raises:
      MissingExtra: it is not.
    """
    lacking = missing(extra)
    if lacking:
        raise _error(extra, what, lacking[0])


@contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
    """Within it, an import of a package that is not installed says which extra to install.

    Args:
      what: what needs it, for the message.

    Raises:
      MissingExtra: a module is not installed.

    Example:
      >>> from longctx import extras
      >>> with extras.needed("plot", "a drawing"):
      ...     import matplotlib
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        module = error.name or str(error)
        if module.partition(".")[0] == "longctx":
            raise  # a mistake of ours
        raise _error(extra, what, packages(extra).get(module, module)) from None


def _error(extra: str, what: str, package: str) -> MissingExtra:
    return MissingExtra(f"{what} needs {package}: {pip_line(extra)}".lstrip())


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is not there; or it is in sys.modules without a spec
        return False

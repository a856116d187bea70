"""The public names of longctx: what the packages for users export, and what documents each of them."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import longctx

# Packages that export nothing, and modules without `__all__`: names of theirs that are for users.
MORE = {
    "longctx.cluster.conductor.conductor": ["Conductor"],
    "longctx.cluster.conductor.config": ["ConductorConfig"],
    "longctx.cluster.prefix_index.index": ["PrefixIndex"],
    "longctx.models.builtin": ["TINY"],
    "longctx.parallel.cost": ["LLAMA3_405B", "LayerCost"],
    "longctx.plotting": [
        *("COLORS", "DARK_COLORS", "can_draw", "drawing", "save", "save_both", "shown", "style", "to_svg"),
    ],
    "longctx.serving.kv_cache.tiers.config": ["TierConfig"],
    "longctx.serving.recording.recorder": ["open_recorder"],
    "longctx.serving.scheduler.look_ahead": ["copy_scheduler"],
    "longctx.simulation.baselines": ["BASELINES", "PrefillFirst", "StandardPipeline", "make_simulation"],
    "longctx.simulation.capacity": ["search"],
    "longctx.simulation.deployment": ["ClusterDeployment", "Deployment"],
    "longctx.simulation.hardware": ["predictor"],
    "longctx.simulation.models": ["MODELS"],
    "longctx.simulation.planner.prompt": ["Prompt"],
    "longctx.simulation.planner.search": [
        *("RejectedPlan", "SearchResult", "Goal", "Planned", "evaluate", "search"),
    ],
    "longctx.simulation.utilization": [
        *("DeviceMemory", "device_memory", "max_tokens", "mbu", "mfu", "model_flops"),
    ],
}
_NOT_FOR_USERS = ("longctx.cli",)


@functools.cache
def public_names() -> dict[str, list[str]]:
    """The public names of each package or module that has some, sorted: all `__all__`, and those of `MORE`."""
    names = {"longctx": sorted(longctx.__all__), **{module: sorted(names) for module, names in MORE.items()}}
    for found in pkgutil.walk_packages(longctx.__path__, "longctx."):
        if found.ispkg and not found.name.startswith(_NOT_FOR_USERS):
            exported = getattr(importlib.import_module(found.name), "__all__", None) or _explicit_exports(found.name)
            if exported:
                names[found.name] = sorted(exported)
    return names


class Documented(NamedTuple):
    """Something that must have a docstring.

    `name` is where users find it, such as `longctx.serving.Engine.generate`. `kind` is "function", "class",
    "constant", "method" or "property", and `of` the object; None for a constant, which has no docstring of its own.
    """

    name: str
    kind: str
    of: Any
    doc: str


@functools.cache
def documented() -> dict[str, Documented]:
    """Every public name once, under the shortest package that exports it, and each public member of public classes."""
    result: dict[str, Documented] = {}
    seen: set[int] = set()
    # The package that says most exactly what a name is comes first: `longctx` only repeats.
    for package, names in sorted(public_names().items(), key=lambda item: (item[0] == "longctx", item[0])):
        for name in names:
            # A function may have the name of a subpackage, as `longctx.kernels.attention` does.
            value, path = getattr(importlib.import_module(package), name), f"{package}.{name}"
            is_function = inspect.isfunction(inspect.unwrap(value))
            kind = "class" if inspect.isclass(value) else "function" if is_function else "constant"
            if kind == "constant":
                result[path] = Documented(path, kind, None, _constant_doc(package, name))
            elif id(value) not in seen:
                seen.add(id(value))
                result[path] = Documented(path, kind, value, _own_doc(value))
                result |= {each.name: each for each in _members(path, value) if kind == "class"}
    return result


def _members(path: str, kind: type) -> Iterator[Documented]:
    for name, value in vars(kind).items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(value, property | functools.cached_property):
            yield Documented(f"{path}.{name}", "property", value, _own_doc(value))
        elif isinstance(value, classmethod | staticmethod) or inspect.isfunction(value):
            function = getattr(value, "__func__", value)
            # An override may leave it to the method that it overrides to say what it does.
            doc = _own_doc(function) or inspect.getdoc(getattr(kind, name)) or ""
            yield Documented(f"{path}.{name}", "method", function, doc)


def _own_doc(value: Any) -> str:
    doc = getattr(value, "__doc__", None) or ""
    made = dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}(")
    return "" if made else inspect.cleandoc(doc)


def _constant_doc(package: str, name: str) -> str:
    """The string below a constant's assignment, in the module that it is exported from."""
    module = importlib.import_module(package)
    for statement in _exports(module):
        if any(alias.name == name for alias in statement.names):
            module = importlib.import_module("." * statement.level + (statement.module or ""), package)
    found = re.search(rf'^{name}\b[^\n]* = .*?\n"""(.*?)"""', inspect.getsource(module), re.MULTILINE | re.DOTALL)
    return "" if found is None else inspect.cleandoc(found[1])


def _explicit_exports(package: str) -> list[str]:
    """Names that the `__init__` of a package without `__all__` imports as themselves, `X as X`."""
    module = importlib.import_module(package)
    return [alias.name for each in _exports(module) for alias in each.names if alias.asname == alias.name]


def _exports(module: ModuleType) -> list[ast.ImportFrom]:
    path = Path(module.__file__ or "")
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8"))
    return [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]

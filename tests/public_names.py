"""The public names of longctx: what the packages for users export, and what documents each of them."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    "longctx.simulation.baselines": ["BASELINES", "Baseline", "StandardPipeline", "make_simulation"],
    "longctx.simulation.capacity": ["search"],
    "longctx.simulation.deployment": ["ClusterDeployment", "Deployment"],
    "longctx.simulation.hardware": ["predictor"],
    "longctx.simulation.models": ["MODELS"],
    "longctx.simulation.planner.prompt": ["Prompt"],
    "longctx.simulation.planner.search": [
        *("RejectedPlan", "SearchResult", "Goal", "Planned", "evaluate", "search"),
    ],
    "longctx.simulation.utilization": [
        *("DeviceMemory", "device_memory", "max_tokens", "mbu", "mfu", "model_flops", "totals_of"),
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


@dataclasses.dataclass(frozen=True)
class Documented:
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
            value = _import(package, name)
            is_class, is_function = inspect.isclass(value), inspect.isfunction(inspect.unwrap(value))
            if id(value) in seen and (is_class or is_function):
                continue
            seen.add(id(value))
            path = f"{package}.{name}"
            if is_class:
                result[path] = Documented(path, "class", value, _own_doc(value))
                result |= {each.name: each for each in _members(path, value)}
            elif is_function:
                result[path] = Documented(path, "function", value, _own_doc(value))
            else:
                result[path] = Documented(path, "constant", None, _constant_doc(package, name))
    return result


def fields(kind: type) -> set[str]:
    """The public attributes that a class declares: of a dataclass, a NamedTuple, or by annotations."""
    return {
        name
        for base in _own_bases(kind)
        for name in inspect.get_annotations(base)
        if not name.startswith("_") and not isinstance(inspect.getattr_static(kind, name, None), property)
    }


def _import(package: str, name: str) -> Any:
    """What a package exports; a function may have the name of a subpackage, as `longctx.kernels.attention` does."""
    return getattr(importlib.import_module(package), name)


def _members(path: str, kind: type) -> Iterator[Documented]:
    for base in _own_bases(kind):
        for name, value in vars(base).items():
            if name.startswith("_") and name != "__call__":
                continue
            if isinstance(value, property | functools.cached_property):
                yield Documented(f"{path}.{name}", "property", value, _own_doc(value))
            else:
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if inspect.isfunction(function):
                    # An override may leave it to the method that it overrides to say what it does.
                    doc = _own_doc(function) or inspect.getdoc(getattr(kind, name)) or ""
                    yield Documented(f"{path}.{name}", "method", value, doc)


def _own_bases(kind: type) -> list[type]:
    """The class, and those bases of it that users don't find under a name of their own."""
    public = {id(_import(package, name)) for package, names in public_names().items() for name in names}
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("longctx") and id(base) not in public]
    return [kind, *bases]


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
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in itertools.pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if is_it and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
    return ""


def _explicit_exports(package: str) -> list[str]:
    """Names that the `__init__` of a package without `__all__` imports as themselves, `X as X`."""
    module = importlib.import_module(package)
    return [alias.name for each in _exports(module) for alias in each.names if alias.asname == alias.name]


def _exports(module: ModuleType) -> list[ast.ImportFrom]:
    path = Path(module.__file__ or "")
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8"))
    return [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]

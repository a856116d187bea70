"""The import graph: modules have no cycles of any kind, and packages import in one direction (docs/design.md)."""

import ast
from functools import cache
from pathlib import Path

import longctx

ROOT = Path(longctx.__file__).parent
# Packages from the bottom up: each may import itself and those of lower layers.
LAYERS = [
    ["annotations", "extras", "gpu_flags"],
    ["plotting"],
    ["kernels"],
    ["parallel"],
    ["models"],
    ["nnx"],
    ["serving.validation", "serving.worker_process"],
    ["serving.request", "serving.kv_cache", "serving.predictor"],
    ["serving.parallel_plan"],
    ["serving.scheduler"],
    ["serving.config"],
    ["serving.runner"],
    ["serving.executor"],
    ["serving.distributed"],
    ["serving.recording"],
    ["serving.engine"],
    ["serving.server"],
    ["serving.profiler"],
    ["cluster.http_stream", "cluster.server_url", "cluster.transfer"],
    ["cluster.prefix_index"],
    ["cluster.conductor"],
    ["cluster.config", "cluster.join"],
    ["cluster.launcher"],
    ["cluster.peers"],
    ["cluster.pending_pages"],
    ["cluster.prefill"],
    ["cluster.engine_messenger"],
    ["cluster.engine_transfers"],
    ["cluster.router"],
    ["simulation"],
    ["cli"],
    ["__main__"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


@cache
def imports(module: str, when_loaded: bool = True) -> set[str]:
    """Return the modules of this package that a module imports: when it is loaded, or ever and for type checkers."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(MODULES[module].read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if when_loaded and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if when_loaded and isinstance(node, ast.FunctionDef):
            continue  # its imports are loaded when it is called
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        pending += ast.iter_child_nodes(node)
    return {name for name in found if name in MODULES and name != module}


def layer_of(module: str) -> int | None:
    """The index of a module's layer; None: it is in no layer."""
    found = (i for i, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"longctx.{name}."))
    return next(found, None)


def package_of(module: str) -> str:
    return next(r for packages in LAYERS for r in packages if f"{module}.".startswith(f"longctx.{r}."))


def test_every_module_has_a_layer() -> None:
    assert {name for name in MODULES if layer_of(name) is None} == {"longctx", "longctx.serving", "longctx.cluster"}


def test_modules_import_lower_layers_only() -> None:
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if layer_of(module) is not None
        and layer_of(other) is not None
        and package_of(module) != package_of(other)
        and (layer_of(other) or 0) >= (layer_of(module) or 0)
    ]
    assert upward == []


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in imports(module, when_loaded=False):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())

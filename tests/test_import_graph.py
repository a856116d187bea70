"""Who imports whom: files in no circle, rooms in one direction (docs/design.md)."""

import ast
from functools import cache
from pathlib import Path

import longctx

ROOT = Path(longctx.__file__).parent
# From the bottom up: each may import those before it, in the same line only itself.
FLOORS = [
    ["kernels"],
    ["parallel"],
    ["models"],
    ["serving.validation"],
    ["serving.request", "serving.kv_cache", "serving.predictor"],
    ["serving.parallel_plan"],
    ["serving.scheduler"],
    ["serving.config"],
    ["serving.runner"],
    ["serving.executor"],
    ["serving.distributed"],
    ["serving.engine"],
    ["serving.profiler"],
    ["simulation"],
    ["cli"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


@cache
def imports(module: str) -> set[str]:
    """Our own modules that one imports when it is loaded; names for type checkers alone do not count."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(MODULES[module].read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef):
            continue  # loaded when it is called
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        pending += ast.iter_child_nodes(node)
    return {name for name in found if name in MODULES and name != module}


def floor(module: str) -> int | None:
    return next(
        (i for i, rooms in enumerate(FLOORS) for room in rooms if f"{module}.".startswith(f"longctx.{room}.")), None
    )


def room(module: str) -> str:
    return next(r for rooms in FLOORS for r in rooms if f"{module}.".startswith(f"longctx.{r}."))


def test_every_module_has_its_floor() -> None:
    assert {name for name in MODULES if floor(name) is None} == {"longctx", "longctx.serving"}


def test_imports_go_down() -> None:
    upward = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if floor(module) is not None
        and floor(other) is not None
        and room(module) != room(other)
        and (floor(other) or 0) >= (floor(module) or 0)
    ]
    assert upward == []


def test_no_circle_of_imports() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in imports(module):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())

"""What is wrong with the docstring of a public name: what it takes, gives and raises is compared with its code."""

import ast
import builtins
import contextlib
import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from google_docstring import entries, sections
from public_names import Documented, documented, fields

from longctx import extras

# What a paper is behind: these must say which.
SOURCED = (
    *("longctx.kernels." + name for name in ("attention", "merge_state", "merge_states", "paged_attention")),
    *("longctx.parallel." + name for name in ("EmpiricalRule", "Hardware", "choose_ring", "all_gather_kv")),
    *("longctx.parallel." + name for name in ("kvp_attention", "layout_shards", "plan_decode", "plan_varseq")),
    *("longctx.parallel." + name for name in ("ring_pass_kv", "ring_pass_q", "sequence_pipeline")),
    *("longctx.serving." + name for name in ("Core", "EngineConfig", "ParallelPlan", "Slo")),
    *("longctx.cluster.transfer." + name for name in ("Exporter", "Lease", "PageReceiver", "PageSender")),
    *("longctx.simulation.baselines." + name for name in ("StandardPipeline", "make_simulation")),
)
_PAPER = re.compile(r"\bpapers?\b|Mnemosyne|Medha|Mooncake|et al\.|arXiv")

# A quantity's name, and words of which its description must have one.
_UNITS = {
    r"(^|_)(time|times|timeout|deadline|latency|delay|arrival)$": r"second|\bms\b|unit|clock",
    r"(^|_)(bandwidth|flops)$": r"second|/s\b",
}
# How a description may refer to another one.
_AS_ELSEWHERE = re.compile(r"\b(as|like) (for|in|of|to|`)|\bthose of\b|\bthat of\b|`plan_|what `")
_SAYS_RESULT = re.compile(r"(A|All|An|Bytes|FLOP|How|One|Return|Seconds|The|What|Whether|Which|Who)\b")


def check(item: Documented) -> None:
    assert item.doc, f"{item.name} has no docstring"
    parts = sections(item.doc)
    assert " ".join(parts[""][:1]).strip(), "the first line must say what it is"
    _check_parameters(item, parts)
    if item.kind in ("function", "method"):
        _check_result(item, parts)
    _check_raises(item, parts)
    _check_source(item, parts)
    if item.kind in ("function", "class", "constant"):
        _check_example(item, parts)


def _check_parameters(item: Documented, parts: dict[str, list[str]]) -> None:
    """Args are the parameters, and Attributes are attributes, among them all declared fields."""
    args, attributes = entries(parts.get("Args", [])), entries(parts.get("Attributes", []))
    if item.kind == "class":
        declared = fields(item.of)
        has_init = _has_init(item.of)
        parameters = _parameters(item.of) if has_init else {}
        known = declared | _assigned(item.of) | {name for name in dir(item.of) if not name.startswith("_")}
        missing = declared - {*attributes} - {*args}
        assert not missing, f"Attributes: must have {sorted(missing)}"
        assert {*attributes} <= known, f"no attributes: {sorted({*attributes} - known)}"
        if not has_init:
            assert {*args} <= declared, f"no parameters: {sorted({*args} - declared)}"
            parameters = dict.fromkeys(args, "")
        types = {**{name: inspect.get_annotations(item.of).get(name, "") for name in declared}, **parameters}
    elif item.kind in ("function", "method"):
        parameters = types = _parameters(item.of)
        if item.kind == "method" and not args and (len(parameters) < 2 or _names_all(parameters, parts)):
            return  # in prose
    else:
        return
    wanted = {*parameters}
    assert {*args} == wanted, f"Args: lack {sorted(wanted - {*args})}, and have too much {sorted({*args} - wanted)}"
    for name, text in {**attributes, **args}.items():
        assert text.strip(), f"{name} must be described"
        _check_shape(name, types.get(name, ""), text)
        for quantity, unit in _UNITS.items():
            if re.search(quantity, name) and re.search(r"\b(int|float)\b", str(types.get(name, ""))):
                assert re.search(unit, text), f"{name} must have its unit ({unit}): {text!r}"


def _check_result(item: Documented, parts: dict[str, list[str]]) -> None:
    result = inspect.signature(_function(item.of)).return_annotation
    returns = " ".join(parts.get("Returns", []) + parts.get("Yields", []))
    if result in (None, "None", type(None)):
        assert not returns, "it returns nothing"
    elif result is not inspect.Signature.empty and not (item.kind == "method" and _says_result(parts)):
        assert returns.strip(), f"Returns: must say what it returns, {result}"
        _check_shape("the result", result, returns)


def _says_result(parts: dict[str, list[str]]) -> bool:
    return _SAYS_RESULT.match(parts[""][0]) is not None or re.search(r"\breturns?\b", " ".join(parts[""])) is not None


def _names_all(parameters: dict[str, Any], parts: dict[str, list[str]]) -> bool:
    return {name.lstrip("*") for name in parameters} <= {*re.findall(r"\w+", " ".join(parts[""]))}


def _check_shape(name: str, annotation: Any, text: str) -> None:
    """Arrays of jaxtyping have a shape in their description, or are as elsewhere."""
    is_array = "jaxtyping" in str(annotation) or re.search(r"\b(Float|Int|Shaped|Bool)\d*\[", str(annotation))
    if is_array and not _AS_ELSEWHERE.search(text):
        assert re.search(r"\[[^\]]*\]|\bshape", text), f"{name} must have its shape: {text!r}"


def _check_raises(item: Documented, parts: dict[str, list[str]]) -> None:
    """Raises names what the body raises, by itself or by a check; all that it names are exceptions."""
    text = " ".join(parts.get("Raises", []))
    names = {name for name in re.findall(r"\b[A-Z]\w+", text) if _exception(item, name)}
    listed = {*entries(parts["Raises"])} if "Raises" in parts else set()
    unknown = {name for name in listed if _exception(item, name) is None}
    assert not unknown, f"Raises: must name exceptions, not {sorted(unknown)}"
    documented_types = tuple(kind for name in names if (kind := _exception(item, name)))
    for function in _bodies(item):
        for raised in _raised(function):
            kind = _exception(item, raised)
            if kind is not None:
                assert issubclass(kind, documented_types), f"Raises: must have {raised}"
        if _calls_check(function):
            assert {ValueError, TypeError} & {*documented_types}, "Raises: must have what its check raises"


def _check_source(item: Documented, parts: dict[str, list[str]]) -> None:
    """There is a source where a paper is behind it, or is named elsewhere in the docstring."""
    elsewhere = " ".join(line for name, lines in parts.items() if name not in ("Source", "Examples") for line in lines)
    names_paper = item.kind in ("function", "class", "constant") and _PAPER.search(elsewhere)
    if item.name in SOURCED or names_paper:
        assert "Source" in parts, "Source: must say which paper is behind it, and which section"
    if "Source" in parts:
        assert " ".join(parts["Source"]).strip(), "Source: must not be empty"


def _check_example(item: Documented, parts: dict[str, list[str]]) -> None:
    assert "Examples" in parts, "Examples: must show how it is used"
    examples = doctest.DocTestParser().get_examples("\n".join(parts["Examples"]))
    short = item.name.rpartition(".")[2]
    # Objects of a class are often given by another name, as `EngineStats` by `engine.stats()`.
    uses = item.kind == "class" or any(re.search(rf"\b{short}\b", example.source) for example in examples)
    assert uses, f"no example uses {short}"
    assert any(example.want for example in examples), "no example shows a result"


def _function(value: Any) -> Any:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return value if inspect.isclass(value) else inspect.unwrap(value)


def _parameters(value: Any) -> dict[str, Any]:
    """Annotations of the parameters that callers give; `*args` and `**kwargs` with their stars."""
    function = value.__init__ if inspect.isclass(value) else _function(value)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    named = {stars.get(each.kind, "") + each.name: each.annotation for each in found}
    return {name: kind for name, kind in named.items() if name not in ("self", "cls") and not name.startswith("_")}


def _has_init(kind: Any) -> bool:
    """Whether users call an `__init__` that is written out. Exceptions are not theirs to make."""
    is_made = dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False)
    return "__init__" in vars(kind) and not is_made and not issubclass(kind, BaseException)


def _assigned(kind: Any) -> set[str]:
    """Public attributes that `__init__` sets."""
    if "__init__" not in vars(kind) or dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False):
        return set()
    nodes = ast.walk(_tree(kind.__init__))
    targets = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {each.attr for each in targets if not each.attr.startswith("_")}


def _bodies(item: Documented) -> Iterator[ast.AST]:
    """What runs when it is called: of a class, what makes an object."""
    if item.kind == "class" and not getattr(item.of, "_is_protocol", False):
        for name in ("__init__", "__post_init__", "__new__"):
            function = vars(item.of).get(name)
            with contextlib.suppress(OSError):  # that of a dataclass has no source
                if inspect.isfunction(function):
                    yield _tree(function)
    elif item.kind in ("function", "method"):
        yield _tree(_function(item.of))
    elif item.kind == "property":
        yield _tree(getattr(item.of, "fget", None) or item.of.func)


def _tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function's body without those of functions in it."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own_nodes(node)


def _raised(tree: ast.AST) -> Iterator[str]:
    for node in _own_nodes(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name | ast.Attribute):
                yield ast.unparse(raised).rpartition(".")[2]


def _calls_check(tree: ast.AST) -> bool:
    """Whether it calls a function whose name says that it raises if something is wrong."""
    calls = (node.func for node in _own_nodes(tree) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and re.match(r"_?check_", called.id) for called in calls)


def _exception(item: Documented, name: str) -> type[BaseException] | None:
    """The exception of a name: Python's, one of the module, or one of longctx for users."""
    module = inspect.getmodule(_function(item.of)) if item.of is not None else None
    exported = (each.of for each in documented().values() if each.name.endswith(f".{name}"))
    for found in (*(getattr(each, name, None) for each in (builtins, module, extras)), *exported):
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None

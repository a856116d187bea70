"""Every public name has a docstring that says what it takes, gives and raises, and an example that runs.

The form is Google's, which ruff checks. Here each parameter, field and exception is named and no other, arrays have
shapes, and examples give the results that they show. An example is what a user would paste: it starts from nothing, in
an empty folder.
"""

import ast
import doctest
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import Array
from jaxtyping import Float
from public_names import Documented, documented, fields, public_names

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Examples")
ENTRY = re.compile(r"^ {2}([\w*\\]+(?:, [\w*\\]+)*):(.*(?:\n {3,}.*)*)", re.MULTILINE)
AS_ELSEWHERE = re.compile(r"\b(as|like) (for|in|of|to|`)|\bth(ose|at) of\b|`plan_|what `")
# Examples that take more than a second of CPU, but those of `attention` and `ring_pass_kv`.
SLOW = {
    *("longctx.kernels.paged_attention", "longctx.kernels.merge_state", "longctx.kernels.plan_attention"),
    *("longctx.models.Llama", "longctx.models.load_checkpoint", "longctx.models.quantize_checkpoint"),
    *(f"longctx.nnx.{name}" for name in ("ContextParallelAttention", "LlamaModule", "attention_fn", "to_nnx")),
    *(f"longctx.parallel.{name}" for name in ("all_gather_kv", "context_parallel_attention", "kvp_attention")),
    *("longctx.parallel.merge_over_ranks", "longctx.parallel.ring_pass_q", "longctx.serving.Engine"),
    *("longctx.serving.recording.recorder.open_recorder", "longctx.simulation.Simulation"),
    "longctx.simulation.baselines.make_simulation",
}
NAMES = sorted(documented())
WITH_EXAMPLE = [name for name in NAMES if documented()[name].kind in ("function", "class", "constant")]


def section(doc: str, name: str) -> str:
    """Return the text of a section; empty: there is none."""
    assert name in SECTIONS
    found = re.search(rf"^{name}:\n((?: .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return "" if found is None else found[1]


def entries(doc: str, name: str) -> dict[str, str]:
    """Return the descriptions of a section by their names; `k, v: ...` describes two."""
    found = ENTRY.finditer(section(doc, name))
    return {each: entry[2] for entry in found for each in entry[1].replace("\\", "").split(", ")}


def parameters(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's parameters, with the stars of `*args`, but that of its object."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return {stars.get(x.kind, "") + x.name: x.annotation for x in found if x.name not in ("self", "cls")}


def raised(functions: list[Any]) -> set[str]:
    """Return the names of the exceptions that functions raise by themselves."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in functions]
    calls = [node.exc for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    names = {ast.unparse(call.func if isinstance(call, ast.Call) else call).rpartition(".")[2] for call in calls}
    return {name for name in names if name[0].isupper()} - {"StopIteration", "AttributeError", "AssertionError"}


def check(item: Documented) -> None:
    """Compare a docstring with what it describes; AssertionError says what is missing."""
    doc, args, attributes = item.doc, entries(item.doc, "Args"), entries(item.doc, "Attributes")
    assert doc.partition("\n")[0].strip(), f"{item.name} has no docstring"
    if item.kind == "class":
        missing = fields(item.of) - {*attributes, *args}
        assert not missing, f"Attributes: must have {sorted(missing)}"
        known = fields(item.of) | {*dir(item.of), *vars(item.of).get("__slots__", ())}
        is_protocol = getattr(item.of, "_is_protocol", False)
        own = [vars(item.of).get(name) for name in ("__init__", "__post_init__") if not is_protocol]
        functions = [each for each in own if hasattr(each, "__code__") and each.__code__.co_filename != "<string>"]
        if functions and functions[0].__name__ == "__init__":
            known |= {*re.findall(r"self\.(\w+)", inspect.getsource(functions[0]))}
            is_made_by_users = not issubclass(item.of, BaseException)
            assert {*args} == {*parameters(functions[0])} or not is_made_by_users, "Args: must be those of __init__"
        assert {*attributes} <= known, f"no attributes: {sorted({*attributes} - known)}"
    elif item.kind in ("function", "method"):
        function = item.of.__func__ if isinstance(item.of, classmethod | staticmethod) else inspect.unwrap(item.of)
        functions, wanted = [function], parameters(function)
        if item.kind == "function" or args:
            assert {*args} == {*wanted}, f"Args: lack {sorted({*wanted} - {*args})}, or have too much"
        for name, annotation in wanted.items():
            if "jaxtyping" in str(annotation) and name in args and not AS_ELSEWHERE.search(args[name]):
                assert re.search(r"\[[^\]]*\]|\bshape", args[name]), f"{name} must have its shape: {args[name]!r}"
        result = inspect.signature(function).return_annotation
        if item.kind == "function" and result not in (None, "None", inspect.Signature.empty):
            assert section(doc, "Returns") or section(doc, "Yields"), "Returns: must say what it returns"
    else:
        functions = []
    if raised(functions) - {"NotImplementedError"}:
        assert section(doc, "Raises"), f"Raises: must have {raised(functions)}"


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name: str) -> None:
    check(documented()[name])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WITH_EXAMPLE]
)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("examples show what CPU devices give")
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    examples = doctest.DocTestParser().get_doctest(documented()[name].doc, {"__name__": "__main__"}, name, None, 0)
    assert any(example.want for example in examples.examples), "no example shows a result"
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=options).run(examples, out=report.append)
    assert failed == 0, "".join(report)


def test_packages_that_users_import_are_walked() -> None:
    assert {"longctx", "longctx.kernels", "longctx.models", "longctx.parallel", "longctx.serving"} <= {*public_names()}
    assert {"longctx.kernels.attention", "longctx.nnx.to_nnx", "longctx.serving.Engine.generate", *SLOW} <= {*NAMES}


def halve(x: Float[Array, "T"], delay: float = 0.0) -> Float[Array, "T"]:
    """Divide by two.

    Args:
      x: float32 `[T]`.
      delay: seconds to wait before.

    Returns:
      float32 `[T]`.

    Raises:
      ValueError: the delay is negative.
    """
    if delay < 0:
        raise ValueError("delay must not be negative")
    return x / 2


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("  delay: seconds to wait before.\n", "", r"Args: lack \['delay'\]"),
        ("  delay:", "  delays:", r"lack \['delay'\], or have too much"),
        ("x: float32 `[T]`.", "x: what to divide.", "x must have its shape"),
        ("Returns:\n  float32 `[T]`.\n\n", "", "Returns: must say what it returns"),
        ("Raises:", "Source:", "Raises: must have"),
        ("Divide by two.", "", "has no docstring"),
    ],
)
def test_a_lack_in_a_docstring_is_found(right: str, wrong: str, message: str) -> None:
    doc = inspect.cleandoc(halve.__doc__ or "")  # from Python 3.13 on the compiler removes the indentation
    check(Documented("halve", "function", halve, doc))
    assert right in doc
    with pytest.raises(AssertionError, match=message):
        check(Documented("halve", "function", halve, doc.replace(right, wrong)))

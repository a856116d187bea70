"""Every public name has a docstring that says what it takes, gives and raises, and an example that runs.

The form is Google's, which ruff checks. Here each parameter and field is named and no other, arrays have shapes, and
examples, which start from nothing in an empty folder, give the results that they show.
"""

import ast
import doctest
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from public_names import Documented, documented, public_names

ENTRY = re.compile(r"^ {2}([\w*\\]+(?:, [\w*\\]+)*):(.*(?:\n {3,}.*)*)", re.MULTILINE)
AS_ELSEWHERE = re.compile(r"\b(as|like) (for|in|of|to|`)|\bth(ose|at) of\b|`plan_|what `")
# Examples that take more than a second of CPU, but those of `attention` and `ring_pass_kv`.
SLOW = {
    *("longctx.kernels.paged_attention", "longctx.kernels.merge_state", "longctx.kernels.plan_attention"),
    *("longctx.models.Llama", "longctx.models.load_checkpoint", "longctx.models.quantize_checkpoint"),
    *(f"longctx.nnx.{name}" for name in ("ContextParallelAttention", "LlamaModule", "attention_fn", "to_nnx")),
    *(f"longctx.parallel.{name}" for name in ("all_gather_kv", "context_parallel_attention", "kvp_attention")),
    *(
        "longctx.parallel.helix_attention",
        "longctx.parallel.ulysses_attention",
        "longctx.parallel.merge_over_ranks",
        "longctx.parallel.ring_pass_q",
        "longctx.serving.Engine",
    ),
    *("longctx.serving.recording.recorder.open_recorder", "longctx.simulation.Simulation"),
    "longctx.simulation.baselines.make_simulation",
}
NAMES = sorted(documented())
WITH_EXAMPLE = [name for name in NAMES if documented()[name].kind in ("function", "class", "constant")]


def entries(doc: str, name: str) -> dict[str, str]:
    """Return the descriptions of a section by their names; `k, v: ...` describes two."""
    section = re.search(rf"^{name}:\n((?: .*\n|\n)*)", doc + "\n", re.MULTILINE)
    found = ENTRY.finditer("" if section is None else section[1])
    return {each: entry[2] for entry in found for each in entry[1].replace("\\", "").split(", ")}


def parameters(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's parameters, with the stars of `*args`, but that of its object."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return {stars.get(x.kind, "") + x.name: x.annotation for x in found if x.name not in ("self", "cls")}


def lacks(item: Documented) -> list[str]:
    """Return what a docstring leaves out of what it describes, or has too much."""
    args = entries(item.doc, "Args")
    if not item.doc.partition("\n")[0].strip():
        return ["has no docstring"]
    if item.kind == "class":
        fields = {name for name in inspect.get_annotations(item.of) if not name.startswith("_")}
        fields = {name for name in fields if not isinstance(vars(item.of).get(name), property)}
        found = [f"Attributes: {name}" for name in fields - {*entries(item.doc, "Attributes"), *args}]
        init = vars(item.of).get("__init__")
        if args and inspect.isfunction(init) and init.__code__.co_filename != "<string>":
            found += [f"Args: {name}" for name in {*args} ^ {*parameters(init)}]
        return found
    if item.kind not in ("function", "method"):
        return []
    function = item.of.__func__ if isinstance(item.of, classmethod | staticmethod) else inspect.unwrap(item.of)
    wanted = parameters(function)
    found = []
    if (item.kind == "function" or args) and {*args} != {*wanted}:
        found.append(f"Args: {sorted({*args} ^ {*wanted})}")
    for name, annotation in wanted.items():
        if "jaxtyping" in str(annotation) and name in args and not AS_ELSEWHERE.search(args[name]):
            found += [] if re.search(r"\[[^\]]*\]|\bshape", args[name]) else [f"the shape of {name}"]
    result = inspect.signature(function).return_annotation
    if item.kind == "function" and result not in (None, "None", inspect.Signature.empty):
        found += [] if re.search("^(Returns|Yields):", item.doc, re.MULTILINE) else ["Returns"]
    raises = re.search(r"raise (?!NotImplemented|StopIter|Attribute|Assertion)[A-Z]\w+", source_of(function))
    return found + (["Raises"] if raises and not re.search("^Raises:", item.doc, re.MULTILINE) else [])


def source_of(function: Any) -> str:
    """Return a function's code without its comments and strings of documentation."""
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body[1:])  # type: ignore


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name: str) -> None:
    assert lacks(documented()[name]) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WITH_EXAMPLE]
)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

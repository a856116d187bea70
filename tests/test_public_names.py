"""Every public name has a docstring that says what it takes, gives and raises, and an example that runs.

The form is Google's, as docs/api shows it. What is checked is what can be: that each parameter, field and exception is
named and no other, that arrays have shapes and quantities units, that sources are papers, and that examples give the
results that they show. An example is what a user would paste, so it starts from nothing, in an empty folder.
"""

import doctest
import inspect
from pathlib import Path

import jax
import pytest
from docstring_check import SOURCED, check
from jax import Array
from jaxtyping import Float
from public_names import Documented, documented, public_names

# Examples that take more than some 3 seconds of CPU.
SLOW = {
    *("longctx.nnx.ContextParallelAttention", "longctx.nnx.to_nnx"),
    *("longctx.serving.Engine", "longctx.simulation.Simulation"),
}

NAMES = sorted(documented())
WITH_EXAMPLE = [name for name in NAMES if documented()[name].kind in ("function", "class", "constant")]


def test_packages_that_users_import_are_walked() -> None:
    assert {"longctx", "longctx.kernels", "longctx.models", "longctx.parallel", "longctx.serving"} <= {*public_names()}
    known = {"longctx.kernels.attention", "longctx.nnx.to_nnx", "longctx.serving.Engine.generate"}
    assert known | {*SOURCED} | SLOW <= {*NAMES}


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
    report: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=options).run(examples, out=report.append)
    assert tried > 0
    assert failed == 0, "".join(report)


def halve(x: Float[Array, "T"], delay: float = 0.0) -> Float[Array, "T"]:
    """Divide by two.

    Args:
      x: float32 `[T]`.
      delay: seconds to wait before.

    Returns:
      float32 `[T]`.

    Raises:
      ValueError: the delay is negative.

    Examples:
      >>> halve(4.0)
      2.0
    """
    if delay < 0:
        raise ValueError("delay must not be negative")
    return x / 2


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("  delay: seconds to wait before.\n", "", r"Args: lack \['delay'\]"),
        ("  delay:", "  delays:", r"lack \['delay'\], and have too much \['delays'\]"),
        ("x: float32 `[T]`.", "x: what to divide.", "x must have its shape"),
        ("seconds to wait", "to wait", "delay must have its unit"),
        ("Returns:\n  float32 `[T]`.\n\n", "", "Returns: must say what it returns"),
        ("  float32 `[T]`.\n\nRaises", "  Half of it.\n\nRaises", "the result must have its shape"),
        ("ValueError:", "KeyError:", "Raises: must have ValueError"),
        ("ValueError:", "Value:", r"must name exceptions, not \['Value'\]"),
        ("Divide by two.", "Divide by two, as in the paper.", "Source: must say"),
        ("  >>> halve(4.0)\n", "  >>> 4.0 / 2\n", "no example uses halve"),
        ("\n  2.0", "", "no example shows a result"),
        ("Raises:", "Text.\n\nRaises:", "sections come last"),
        ("Divide by two.", "", "the first line must say"),
    ],
)
def test_what_a_docstring_lacks_is_found(right: str, wrong: str, message: str) -> None:
    doc = inspect.cleandoc(halve.__doc__ or "")  # from Python 3.13 on the compiler removes the indentation
    check(Documented("halve", "function", halve, doc))
    assert right in doc
    with pytest.raises(AssertionError, match=message):
        check(Documented("halve", "function", halve, doc.replace(right, wrong)))

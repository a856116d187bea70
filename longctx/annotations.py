"""Types of arguments, as wide as what functions take, for type checkers at run time such as beartype.

`jaxtyping.install_import_hook("longctx", "beartype.beartype")` checks every annotation at run time. There, `float`
refuses the integer 1 and NumPy's float32, and no type of arrays accepts a list.
"""

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

Nested: TypeAlias = Sequence[Any]
"""Numbers in lists or tuples, as `numpy.asarray` takes them."""

if TYPE_CHECKING:  # a static checker lets an int be a float, and knows no operators of numbers.Real
    Real: TypeAlias = float
    Integer: TypeAlias = int
else:
    Real = numbers.Real
    """A number of Python or NumPy."""
    Integer = numbers.Integral
    """An integer of Python or NumPy."""

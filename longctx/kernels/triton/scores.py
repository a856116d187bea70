"""Scores inside a Triton kernel."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """The scale and the cap of scores, static.

    Weights are exp2((score - peak) * factor): the difference is taken first, so that no score, however large, differs
    from itself by what a contracted instruction rounds.
    """

    scale: float
    soft_cap: float | None

    @property
    def are_products(self) -> bool:
        """Whether products serve as scores of the forward pass, in which the factor then has the scale."""
        return self.soft_cap is None and 1e-6 < self.scale < 1e6

    @property
    def unit(self) -> float:
        """The natural score of a score of 1 of the forward pass."""
        return self.scale if self.are_products else 1.0

    @property
    def factor(self) -> float:
        """The ratio of logarithms of weights to base 2 and differences of scores of the forward pass."""
        return self.unit * LOG2E

    def scores(self, products: Array) -> Array:
        """The scores of the forward pass."""
        return products if self.are_products else self.natural(products)

    def natural(self, products: Array) -> Array:
        """The scores in the unit of lse."""
        scaled = products * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled * (1 / self.soft_cap))

    def slope(self, natural: Array) -> Array | float:
        """The derivative of the cap where its results are these."""
        return 1.0 if self.soft_cap is None else 1 - jnp.square(natural * (1 / self.soft_cap))

"""Figures of each paper, in its order: modules of the paper's folder and their functions.

A function `figure_15(inputs: Inputs) -> Figure` of a paper "medha" makes the figure that is called "medha_figure_15".
Functions of one module run in one process, one after another, so that they can share what is expensive.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from papers.figures.figure import Figure, Inputs

MNEMOSYNE: list[str] = [
    "ranks:figure_1",
    "resources:section_2_1",
    "resources:figure_5",
    "chunks:figure_7",
    "chunks:figure_8",
    "growth:section_4_4",
    "chunks:figure_13",
    "pipeline:figure_14",
    "pipeline:figure_15",
    "pipeline:figure_16",
    "growth:section_6_3",
    "ranks:figure_17",
    "ranks:figure_18",
    "growth:figure_19",
    "pipeline:figure_20",
    "ranks:figure_21",
    "growth:figure_22",
]

MEDHA: list[str] = [
    "capacity:figure_1",
    "capacity:equal_utilization",
    "capacity:figure_4",
    "capacity:figure_15",
    "capacity:figure_16",
    "ranks:figure_17",
    "ranks:figure_18",
    "capacity:figure_21",
    "capacity:figure_22",
    "capacity:figure_23",
]

META: list[str] = [
    "exchange:table_2",
    "prefill:figure_6",
    "prefill:figure_7",
    "prefill:figure_8",
    "prefill:appendix_a",
    "exchange:table_4",
    "exchange:table_5",
    "exchange:figure_10",
    "decode:table_6",
    "decode:table_7",
    "decode:table_8",
]

MOONCAKE: list[str] = [
    "stages:figure_2",
    "stages:figure_5",
    "stages:table_1",
    "policies:figure_6",
    "overload:figure_7",
    "overload:figure_8",
    "datasets:figure_9",
    "datasets:figure_10",
    "policies:figure_11",
    "overload:table_2",
    "stages:section_8",
]

PAPERS = {"mnemosyne": MNEMOSYNE, "medha": MEDHA, "meta": META, "mooncake": MOONCAKE}
TITLES = {
    "mnemosyne": "Mnemosyne: Parallelization Strategies for Efficiently Serving Multi-Million Context Length LLM "
    "Inference Requests Without Approximations",
    "medha": "Medha: Efficient LLM Inference on Multi-Million Context Lengths Without Approximation",
    "meta": "Context Parallelism for Scalable Million-Token Inference",
    "mooncake": "Mooncake: Kimi's KVCache-centric Architecture for LLM Serving",
}


class Registered(NamedTuple):
    """A figure that can be computed."""

    paper: str
    module: str
    function: str

    @property
    def path(self) -> str:
        """The module of `papers` that it is computed by, such as "medha.capacity"."""
        return f"{self.paper}.{self.module}"

    @property
    def name(self) -> str:
        """The name of its files, as `--only` takes it."""
        return f"{self.paper}_{self.function}"

    def compute(self, inputs: Inputs) -> Figure:
        """Compute it."""
        make: Callable[[Inputs], Figure] = getattr(importlib.import_module(f"papers.{self.path}"), self.function)
        return make(inputs)


def registered(only: list[str] | None = None) -> list[Registered]:
    """All figures, or those of such papers, modules or names; ValueError: there is none of one of these."""
    figures = [Registered(paper, *entry.split(":")) for paper, entries in PAPERS.items() for entry in entries]
    if not only:
        return figures
    for wanted in only:
        if not any(wanted in (figure.paper, figure.path, figure.name) for figure in figures):
            names = ", ".join(figure.name for figure in figures) or "none"
            raise ValueError(f"there is no figure, module or paper {wanted!r}; the figures: {names}")
    return [figure for figure in figures if {figure.paper, figure.path, figure.name} & set(only)]

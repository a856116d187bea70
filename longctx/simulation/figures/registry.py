"""The figures of each paper, in its order: modules of this folder and their functions.

A function `figure_15(inputs: Inputs) -> Figure` of a paper "medha" makes the figure that is called "medha_figure_15".
Functions of one module run in one process, one after another, so that they can share what is expensive.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from longctx.simulation.figures.figure import Figure, Inputs

MNEMOSYNE: list[str] = [
    "mnemosyne_ranks:figure_1",
    "mnemosyne_resources:section_2_1",
    "mnemosyne_resources:figure_5",
    "mnemosyne_chunks:figure_7",
    "mnemosyne_chunks:figure_8",
    "mnemosyne_growth:section_4_4",
    "mnemosyne_chunks:figure_13",
    "mnemosyne_pipeline:figure_14",
    "mnemosyne_pipeline:figure_15",
    "mnemosyne_pipeline:figure_16",
    "mnemosyne_growth:section_6_3",
    "mnemosyne_ranks:figure_17",
    "mnemosyne_ranks:figure_18",
    "mnemosyne_growth:figure_19",
    "mnemosyne_pipeline:figure_20",
    "mnemosyne_ranks:figure_21",
    "mnemosyne_growth:figure_22",
]

MEDHA: list[str] = [
    "medha_capacity:figure_1",
    "medha_capacity:equal_utilization",
    "medha_capacity:figure_4",
    "medha_capacity:figure_15",
    "medha_capacity:figure_16",
    "medha_ranks:figure_17",
    "medha_ranks:figure_18",
    "medha_capacity:figure_21",
    "medha_capacity:figure_22",
    "medha_capacity:figure_23",
]

META: list[str] = [
    "meta_exchange:table_2",
    "meta_prefill:figure_6",
    "meta_prefill:figure_7",
    "meta_prefill:figure_8",
    "meta_prefill:appendix_a",
    "meta_exchange:table_4",
    "meta_exchange:table_5",
    "meta_exchange:figure_10",
    "meta_decode:table_6",
    "meta_decode:table_7",
    "meta_decode:table_8",
]

MOONCAKE: list[str] = [
    "mooncake_stages:figure_2",
    "mooncake_stages:figure_5",
    "mooncake_stages:table_1",
    "mooncake_policies:figure_6",
    "mooncake_overload:figure_7",
    "mooncake_overload:figure_8",
    "mooncake_datasets:figure_9",
    "mooncake_datasets:figure_10",
    "mooncake_policies:figure_11",
    "mooncake_overload:table_2",
    "mooncake_stages:section_8",
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
    def name(self) -> str:
        """Of its files, and as `--only` takes it."""
        return f"{self.paper}_{self.function}"

    def compute(self, inputs: Inputs) -> Figure:
        """Compute it; ValueError: it has another name or paper than it is registered under."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        make: Callable[[Inputs], Figure] = getattr(module, self.function)
        figure = make(inputs)
        if (figure.name, figure.paper) != (self.name, self.paper):
            raise ValueError(f"figure must be called {self.name} of {self.paper}, got {figure.name} of {figure.paper}")
        return figure


def registered(only: list[str] | None = None) -> list[Registered]:
    """All figures, or those of such papers, modules or names; ValueError: there is none of one of these."""
    figures = [Registered(paper, *entry.split(":")) for paper, entries in PAPERS.items() for entry in entries]
    if not only:
        return figures
    for wanted in only:
        if not any(wanted in (figure.paper, figure.module, figure.name) for figure in figures):
            names = ", ".join(figure.name for figure in figures) or "none"
            raise ValueError(f"there is no figure, module or paper {wanted!r}; the figures: {names}")
    return [figure for figure in figures if {figure.paper, figure.module, figure.name} & set(only)]

"""Figures of each paper, in its order: modules of the paper's folder and their functions.

A function `figure_15(inputs: Inputs) -> Figure` of a paper "medha" makes the figure that is called "medha_figure_15".
Functions of one module run in one process, one after another, so that they can share what is expensive. The numbers
are seconds of a processor that a figure takes alone, and `TOGETHER` those of all figures of a module, where these share
runs. They are of 2026-11-27, on a core of a Xeon beside much other work: those up to 150 seconds and Mooncake's figure
6 were measured; larger ones follow from the number of their runs, of which single or shorter ones were measured.
"""

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

from papers.figures.figure import Figure, Inputs

MNEMOSYNE: dict[str, float] = {
    "ranks:figure_1": 1.7,
    "resources:section_2_1": 0.1,
    "resources:figure_5": 0.4,
    "chunks:figure_7": 2.4,
    "chunks:figure_8": 4.3,
    "growth:section_4_4": 14.7,
    "chunks:figure_13": 0.9,
    "pipeline:figure_14": 0.6,
    "pipeline:figure_15": 2.0,
    "pipeline:figure_16": 0.4,
    "growth:section_6_3": 4.8,
    "ranks:figure_17": 1.3,
    "ranks:figure_18": 11.4,
    "growth:figure_19": 0.8,
    "pipeline:figure_20": 1.5,
    "ranks:figure_21": 1.1,
    "growth:figure_22": 0.3,
}

MEDHA: dict[str, float] = {
    "capacity:figure_1": 139.0,
    "capacity:equal_utilization": 410.0,
    "capacity:figure_4": 3.2,
    "capacity:figure_15": 1400.0,
    "capacity:figure_16": 1400.0,
    "ranks:figure_17": 470.0,
    "ranks:figure_18": 700.0,
    "capacity:figure_21": 138.0,
    "capacity:figure_22": 1450.0,
    "capacity:figure_23": 740.0,
}

META: dict[str, float] = {
    "exchange:table_2": 0.3,
    "prefill:figure_6": 1.7,
    "prefill:figure_7": 0.2,
    "prefill:figure_8": 0.6,
    "prefill:appendix_a": 0.1,
    "exchange:table_4": 1.3,
    "exchange:table_5": 0.1,
    "exchange:figure_10": 1.1,
    "decode:table_6": 0.1,
    "decode:table_7": 0.3,
    "decode:table_8": 0.1,
}

MOONCAKE: dict[str, float] = {
    "stages:figure_2": 1.4,
    "stages:figure_5": 0.4,
    "stages:table_1": 1.9,
    "policies:figure_6": 380.0,
    "overload:figure_7": 250.0,
    "overload:figure_8": 500.0,
    "datasets:figure_9": 300.0,
    "datasets:figure_10": 480.0,
    "policies:figure_11": 190.0,
    "overload:table_2": 1830.0,
    "stages:section_8": 0.8,
}

TOGETHER = {"medha.capacity": 2400.0, "medha.ranks": 700.0, "mooncake.overload": 2080.0}

PAPERS = {"mnemosyne": MNEMOSYNE, "medha": MEDHA, "meta": META, "mooncake": MOONCAKE}
TITLES = {
    "mnemosyne": "Mnemosyne: Parallelization Strategies for Efficiently Serving Multi-Million Context Length LLM "
    "Inference Requests Without Approximations",
    "medha": "Medha: Efficient LLM Inference on Multi-Million Context Lengths Without Approximation",
    "meta": "Context Parallelism for Scalable Million-Token Inference",
    "mooncake": "Mooncake: Kimi's KVCache-centric Architecture for LLM Serving",
}


class Registered(NamedTuple):
    """A figure that can be computed, with the seconds of a processor that it takes alone."""

    paper: str
    module: str
    function: str
    seconds: float

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
    figures = [
        Registered(paper, module, function, seconds)
        for paper, entries in PAPERS.items()
        for (module, _, function), seconds in ((entry.partition(":"), took) for entry, took in entries.items())
    ]
    if not only:
        return figures
    for wanted in only:
        if not any(wanted in (figure.paper, figure.path, figure.name) for figure in figures):
            names = ", ".join(figure.name for figure in figures) or "none"
            raise ValueError(f"there is no figure, module or paper {wanted!r}; the figures: {names}")
    return [figure for figure in figures if {figure.paper, figure.path, figure.name} & set(only)]


def seconds_of(figures: list[Registered]) -> float:
    """Seconds of a processor that figures should take: each alone, or all of a module, where these are less."""
    modules: dict[str, float] = {}
    for figure in figures:
        modules[figure.path] = modules.get(figure.path, 0.0) + figure.seconds
    return sum(min(seconds, TOGETHER.get(path, math.inf)) for path, seconds in modules.items())


def in_words(seconds: float) -> str:
    """Seconds as text, in minutes from two of these on."""
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(1, math.ceil(seconds))} s"

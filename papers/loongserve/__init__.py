"""LoongServe, a system that Medha compares with, and whose scheduler is not ours."""

from papers.loongserve.server import LoongServe as LoongServe

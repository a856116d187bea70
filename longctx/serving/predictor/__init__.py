"""Predictors of the time that a batch takes, before it runs.

This package exports what deciding needs, in plain Python. `fit`, `roofline` and `file` make predictors from
measurements, from data sheets and from profiles on disk.
"""

from longctx.serving.predictor.measured import RuntimePredictor
from longctx.serving.predictor.runtime import CurvePredictor, Predictor, readable_tokens
from longctx.serving.predictor.work import Work

__all__ = ["CurvePredictor", "Predictor", "RuntimePredictor", "Work", "readable_tokens"]

"""How long a batch takes, said before it runs.

Here is what deciding needs, plain Python; `fit`, `roofline`, `tables` and `file` are where predictors come from.
"""

from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.runtime import CurvePredictor, Predictor, Program, RuntimePredictor
from longctx.serving.predictor.work import Work

__all__ = ["Corrected", "CurvePredictor", "Predictor", "Program", "RuntimePredictor", "Work"]

"""How long a batch takes, said before it runs."""

from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.file import load_profile, save_profile
from longctx.serving.predictor.fit import fit
from longctx.serving.predictor.roofline import roofline
from longctx.serving.predictor.runtime import CurvePredictor, Predictor, RuntimePredictor
from longctx.serving.predictor.work import Work

__all__ = [
    "Corrected",
    "CurvePredictor",
    "Predictor",
    "RuntimePredictor",
    "Work",
    "fit",
    "load_profile",
    "roofline",
    "save_profile",
]

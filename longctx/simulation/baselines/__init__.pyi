from .loongserve import LoongServe as LoongServe
from .presets import BASELINES as BASELINES
from .presets import Baseline as Baseline
from .presets import make_simulation as make_simulation
from .standard_pipeline import StandardPipeline as StandardPipeline

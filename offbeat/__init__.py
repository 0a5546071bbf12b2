"""Offbeat: train deep networks whose stages never wait for each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from offbeat import callbacks, optim
    from offbeat.correctors import (
        AutoCorrector,
        DelayCompensation,
        Discrepancy,
        NesterovMomentum,
        Rescheduling,
        Shrink,
        Speculation,
        SpikeCompensation,
        StepLookahead,
        WeightPrediction,
    )
    from offbeat.errors import (
        CallTimeout,
        LateGradients,
        ModelOutdated,
        NotCompiled,
        NotFinite,
        NotFused,
        NotRecorded,
        NotRestored,
        ScheduleLength,
        StageLost,
        Unbalanced,
        UserError,
    )
    from offbeat.method import Method
    from offbeat.methods import (
        ADL,
        ADL1F1B,
        ASGD,
        BP,
        DCASGD,
        DDG,
        DGL,
        DNI,
        DSP,
        FDG,
        FR,
        PB,
        AsyncDGL,
        GPipe,
        Mostafa,
        NAGAsync,
        PipeDream,
        PipeMare,
        Pred,
        PredSim,
        Sim,
        SpecTrain,
        TwoBW,
    )
    from offbeat.partitioning import partition
    from offbeat.pipeline import Pipeline
    from offbeat.runs.recipe import Recipe, make_recipe
    from offbeat.runs.train import train

__all__ = [
    "ADL",
    "ADL1F1B",
    "ASGD",
    "BP",
    "DCASGD",
    "DDG",
    "DGL",
    "DNI",
    "DSP",
    "FDG",
    "FR",
    "PB",
    "AsyncDGL",
    "AutoCorrector",
    "CallTimeout",
    "DelayCompensation",
    "Discrepancy",
    "GPipe",
    "LateGradients",
    "Method",
    "ModelOutdated",
    "Mostafa",
    "NAGAsync",
    "NesterovMomentum",
    "NotCompiled",
    "NotFinite",
    "NotFused",
    "NotRecorded",
    "NotRestored",
    "PipeDream",
    "PipeMare",
    "Pipeline",
    "Pred",
    "PredSim",
    "Recipe",
    "Rescheduling",
    "ScheduleLength",
    "Shrink",
    "Sim",
    "SpecTrain",
    "Speculation",
    "SpikeCompensation",
    "StageLost",
    "StepLookahead",
    "TwoBW",
    "Unbalanced",
    "UserError",
    "WeightPrediction",
    "__version__",
    "callbacks",
    "make_recipe",
    "optim",
    "partition",
    "train",
]

# Names load when they are used, so that drawing a program does not wait for torch.
_HOMES = ("errors", "correctors", "method", "methods", "partitioning", "pipeline", "runs.recipe", "runs.train")


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "optim"):
        return importlib.import_module(f"offbeat.{name}")
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"offbeat.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    if name[:1].isupper():  # a method that is not listed above: of a new file, or of another package
        methods = importlib.import_module("offbeat.methods")
        methods.add_packages()
        for make in methods.METHODS.values():
            if getattr(make, "__name__", None) == name:
                return make
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")

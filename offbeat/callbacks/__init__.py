"""Callbacks for `Pipeline.fit(loader, epochs, callbacks=[...])`.

    ProgressBar           epoch, loss and speed on the terminal
    EarlyStopping         stop when an evaluation no longer improves
    BestModel             keep the weights of the best evaluation
    EMA                   exponential moving average of the weights
    CSVLogger, TensorBoardLogger, WandbLogger
                          figures of training in files, or sent to Weights & Biases
    CheckpointEvery       checkpoints every N batches or minutes
    LearningRateMonitor   the learning rates of all updates

`Callback` has the methods that a callback may define, and `TrainingStep` what they are given.

May import the pipeline and what it may import; nothing of runs, reports and studies.
"""

from offbeat.callbacks.checkpoints import CheckpointEvery
from offbeat.callbacks.early_stopping import EarlyStopping
from offbeat.callbacks.learning_rates import LearningRateMonitor
from offbeat.callbacks.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from offbeat.callbacks.progress_bar import ProgressBar
from offbeat.callbacks.weights import EMA, BestModel
from offbeat.pipeline.callback import Callback, TrainingStep

__all__ = [
    "EMA",
    "BestModel",
    "CSVLogger",
    "Callback",
    "CheckpointEvery",
    "EarlyStopping",
    "LearningRateMonitor",
    "ProgressBar",
    "TensorBoardLogger",
    "TrainingStep",
    "WandbLogger",
]

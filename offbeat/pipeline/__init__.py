"""What users hold: a model, a method and an engine, trained batch by batch.

    pipeline      Pipeline, the public class: its methods call the modules below
    checks        what users give, checked before anything starts
    batches       batches as inputs and targets of the stages, and the loss of the model itself
    assembly      the cut model: stages, workers and links of this process, as all processes agree on them
    training      batches on their path from a loader into the first stage
    training_loop, callback, late_losses
                  what surrounds the batches of `fit`: callbacks, evaluation, losses in every process, stopping
    callback_states
                  the states of callbacks in checkpoints
    schedules     how many updates there are, and whether a scheduler has that length
    evaluation    a pass of a loader through the stages, beside training
    saving        the state of the stages between batches
    observation   traces, diagnoses, reports and measured staleness
    guard         what happens after a failure

May import everything that describes, computes, runs or observes stages; nothing of runs, reports and studies.
"""

from offbeat.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]

"""What users hold: a model, a method and an engine, trained batch by batch.

    pipeline      Pipeline, the public class: its calls, which use the modules below
    view          its read-only properties; summary: its text

Made from what users give:

    checks        what users give, checked before anything starts
    choice        the method: as given, or chosen for the model; placement: engine, device and precision
    model_cut     where the model is cut
    assembly      the cut model: stages, workers and links of this process, as all processes agree on them

Run batch by batch:

    local_stages  the stages of this process: made with the first batch, stepped, drained; what the parts share
    batches       batches as inputs and targets of the stages, and the loss of the model itself
    loading       batches on their path from a loader into the first stage; epochs: epoch after epoch
    training_loop, callback, late_losses
                  what surrounds the batches of `fit`: callbacks, evaluation, losses in every process, stopping
    callback_states
                  the states of callbacks in checkpoints
    schedules     how many updates there are, and whether a scheduler has that length
    evaluation    a pass of a loader through the stages, beside training
    state_trees   the state of the stages between batches, as trees; checkpoints: in a folder
    observation   traces, diagnoses, reports and measured staleness
    guard         what happens after a failure; model_state: whether the whole model is the newest

May import everything that describes, computes, runs or observes stages; nothing of runs, reports and studies.
"""

from offbeat.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]

"""Training runs from a recipe to a run folder: schedule, checkpoints, records, worker processes.

    recipe, epochs      what is run, and how its batches are counted
    tables/             the published experiments as recipes
    execute             a recipe from its check to its result; going on with a run
    train               one run; round_robin: several of them in one process
    saving, transfer    checkpoints of a run, also without a shared folder
    record, lock        the run folder
    telemetry, progress what is shown meanwhile
    launch, rendezvous, group   worker processes, and what they agree upon

May import: pipeline and all that is below it, observe, partitioning, checkpoint, data, models.
"""

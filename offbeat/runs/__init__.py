"""Training runs from a recipe to a run folder: schedule, checkpoints, records, worker processes.

    recipe, epochs              the settings of a run, and how its batches are counted
    task, optimizers            what follows from the data (metric, unit of speed, defaults); optimizers by name
    tables/                     the published experiments as recipes
    train                       offbeat.train: check a recipe, run it here or in worker processes, resume it
    build                       what a recipe names: data, model, cuts, engine, pipeline
    begin, training_run         one run in this process; round_robin: several of them
    signals                     Ctrl-C and SIGTERM
    saving, resuming, transfer  checkpoints of a run, also without a shared folder
    record, provenance, lock    the run folder
    history, telemetry, progress    figures of a run, reports of its stages, the terminal
    launch, rendezvous, group   worker processes, and what they agree on

May import: pipeline and all that is below it, observe, partitioning, checkpoint, data, models.
"""

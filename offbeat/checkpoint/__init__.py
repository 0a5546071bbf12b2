"""Checkpoints: folders that are complete or absent, contain no code, and are checked before anything in them is used.

    <run>/checkpoints/000000500/         batch index 500: the batches 0 to 499 have entered the first stage
        stage-01.safetensors             the tensors of stage 1
        stage-01.json                    the tree that contains them
        stage-02.safetensors ...
        callbacks-01.safetensors ...     states of the callbacks of the process of stage 1, if it has some
        run.json                         what belongs to the run rather than to a stage
        manifest.json                    written last: name, size and SHA-256 of every file, and its own SHA-256

Files are written into `000000500.part`, synced, read back, and the folder is renamed: one without the suffix is
complete. Stages may write their parts from different processes or machines into a shared folder; one process finishes:

    folder = begin(run, t)                                # any process, or all
    facts = write_part(folder, part_name(k), tree)        # each stage
    finish(folder, facts, t=t, mode=..., K=..., ...)      # one process, with the facts of all parts

Writing raises CheckpointFailed where the disk is full or broken: call `abandon(folder)` instead of `finish`, and
training can continue. `with_room(run, write)` removes old checkpoints of the run where the disk is full, and writes
again. Reading raises CheckpointDamaged. Call `clean(run)` once, before a run starts to write.

    checkpoint, notes = newest(run)                       # the newest sound one; notes on damaged ones
    tree = checkpoint.stage(k)

A tree (see `flatten`) is made of dicts, lists, tuples, None, bool, int, float, str, torch.dtype, torch.device and
tensors. Tensors are read with their bits and their memory layout, which is part of the numerics; the same tensor in
two places is stored once and read as one. Parameters are read as plain tensors, on the CPU.

The part of stage k holds what `Pipeline.stage_states` returns for it (defined in core/state.py and worker.py):

    stage
        model       {name: tensor}       parameters and buffers, by the names of the unsplit model, as they are now
        optimizer   {name: {...}}        per-parameter state (momentum_buffer, exp_avg, step, ...), by the same names
        groups      [{option, "names"}]  the optimizer's groups: options, and which parameters each holds
        scheduler   {...} | None         the learning-rate schedule
        random, evaluation_random        states of the stage's generators
        in_flight   [{t, x, target, version, random, ...}]   batches forwarded and not yet backwarded, in order; their
                                         graphs are computed again from the input, on the weights number `version`
        versions    [{name: tensor}]     weights that the forwards of batches in flight used
        window      {levels, gradients}  the open accumulation window
        counters, staleness, meter       figures
    worker
        entered     [first, next]        batches of the program
        messages    [[t, content]]       in flight to the stage below, in order

`model`, `optimizer` and `groups` are what a run with another K, and `offbeat export`, read; they may also be at
the top of the tree. A drained checkpoint has the same keys, with nothing in flight. Unknown keys are ignored.

May import errors, and codec and layout of core.
"""

from offbeat.checkpoint.files import CheckpointDamaged, CheckpointFailed, FileFacts
from offbeat.checkpoint.folder import (
    CALLBACKS,
    DIGITS,
    UNFINISHED,
    Checkpoint,
    Listed,
    abandon,
    begin,
    clean,
    finish,
    ls,
    newest,
    part_name,
    prune,
    read,
    verify,
)
from offbeat.checkpoint.parts import write_part
from offbeat.checkpoint.room import free, is_full, make_room, with_room
from offbeat.checkpoint.tree import flatten, unflatten

__all__ = [
    "CALLBACKS",
    "DIGITS",
    "UNFINISHED",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointFailed",
    "FileFacts",
    "Listed",
    "abandon",
    "begin",
    "clean",
    "finish",
    "flatten",
    "free",
    "is_full",
    "ls",
    "make_room",
    "newest",
    "part_name",
    "prune",
    "read",
    "unflatten",
    "verify",
    "with_room",
    "write_part",
]

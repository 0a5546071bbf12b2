"""What one stage does: its operations, weights, window and state, the worker that runs its program, and its links.

    stage                               forward, backward, update; made of the parts below
    stage_network                       its part of the network: how it is called and differentiated
    precision, compiled, fused, deferred_statistics, random_stream    of that part
    feedback                            losses, auxiliary heads, synthesisers
    optimization, corrections           optimizer, schedule, correctors
    weights, window, in_flight          weight versions, the open window, batches between forward and backward
    batch_guard                         batches whose gradients are not used
    launcher                            how tensor work gets to the device
    stage_report, metrics, memory       figures
    state                               all of it as a tree, for checkpoints
    worker                              the loop that runs the program of a stage over its links
    links/                              messages between stages
    compression                         messages in fewer bytes, and the error feedback of rounded gradients
    micro_batches, outputs, descriptions    batches, shapes, and how messages describe them
    codec, layout                       nested values as JSON and tensors, and the memory layouts that are kept

May import: errors, seeds, ops, interpreter, correctors, method, kernels.
"""

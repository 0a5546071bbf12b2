"""What one stage does: its operations, weights, window and state, the worker that runs its program, and its links.

    stage, weights, window, corrections, deferred_statistics, random_stream, memory, state, stage_report
    precision, compiled, fused      how it computes
    worker                          the loop that runs the program of a stage over its links
    links/                          messages between stages
    codec, layout                   nested values as JSON and tensors, and the memory layouts that are kept
    metrics, micro_batches, outputs batches, and what comes out of them

May import: errors, seeds, ops, interpreter, correctors, method, kernels.
"""

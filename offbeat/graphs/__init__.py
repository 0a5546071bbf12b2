"""Stages recorded as CUDA graphs: capture, the ring of slots, and the queues that launch the work of all stages.

    recorded_stage                      executes the operations of a stage by recordings
    slots, ring, slot_recordings        memory of one batch each, how many there are, what is recorded on them
    neighbour_copies                    recorded copies of what neighbours send
    recorded_optimization               recorded updates, learning rates on the device
    device_guard, device_counters       losses and gradients that are not finite, found without waiting
    recorder, capture, join             recordings of tensor work, and many of them as one graph
    launch_queue, ticks, windows        when recorded work is launched

May import: core, method, ops, errors.
"""

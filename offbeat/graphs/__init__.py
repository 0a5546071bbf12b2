"""Stages recorded as CUDA graphs: capture, the ring of slots, and the queues that launch the work of all stages.

May import: core, method, ops, errors.
"""

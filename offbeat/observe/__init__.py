"""Observation of a pipeline while it trains, without changing a result: traces, clock offsets, staleness of gradients.

May import: engines, core, method, timeline, errors.
"""

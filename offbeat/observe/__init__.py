"""Looking at a pipeline while it trains, without changing a number: traces, clock offsets, staleness of gradients.

May import: engines, core, method, timeline, errors.
"""

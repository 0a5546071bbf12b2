"""Questions that take several runs or none: compare, reproduce, bench, plan, and the demonstration.

May import: report, runs and all that is below them.
"""

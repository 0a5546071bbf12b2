"""Studies, which take several runs or none: compare, reproduce, bench, plan, and the demonstration.

runner     tasks in order: one process per folder, budget, failures, interruption, records
training   the training runs of compare and reproduce, executed in turn, in turns, or at the same time

May import: report, runs and all that is below them.
"""

"""`offbeat bench`: the methods of this package beside what people use today, on the same cuts, in one run.

rows        what can be timed, and under which name
where       the cuts that all rows share
contenders  each row as a worker of it: something with a `step()`
worker      a process that builds one contender and times it when told to
worker group        the workers of one row, seen from the process that started them
rounds      the run: every round times every row once
scaling     how time, memory and staleness grow; the clock beyond the cores that there are

What a record says is told by report/bench_table.py, in tables, pages and reports alike.
"""

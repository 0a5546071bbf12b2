"""`offbeat bench`: the methods of this package beside what people use today, on the same cuts, in one run.

rows            what can be timed, and under which name
cuts            the cuts that all rows share
contenders      each row as a worker of it: something with a `step()`
worker          a process that builds one contender and times it on request
worker_group    the workers of one row, seen from the process that started them
fork_server     the process that workers are forked from, which has imported torch
rounds          the run: every round times every row once
scaling         how time, memory and staleness grow; the clock beyond the cores that there are

report/bench_table.py makes the tables of a record, for pages and reports alike.
"""

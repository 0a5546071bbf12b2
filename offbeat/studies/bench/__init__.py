"""`offbeat bench`: the methods of this package beside what people use today, in one run.

rows            what can be timed, and under which name
request         the options, checked
cuts            the cuts of rows whose stages compute on the same number of samples
contenders      each row as one of its workers: an object with a `step()`
timing          a stopwatch, links with fixed messages, the memory of a process
flat_stage      stages as torch.distributed.pipelining takes them
worker          a process that builds one contender and times it on request
worker_group    the workers of one row, seen from the process that started them
fork_server     the process that workers are forked from, which has imported torch
machines        the same under torchrun, where each worker is started by a process of its own
memory          whether the workers of all rows fit into the memory of this machine
rounds          the benchmark: every round times every row once
until           the other benchmark: every row is trained until a loss or error
target          when a curve has reached it
row_training    a row that is trained on data, as one of its workers
scaling         how time, memory and staleness grow, measured and, for more stages than cores, by the clock
prediction      seconds per batch that are predicted beside the measured points of a study
records         where records are written, and which of them a command continues

report/bench_table.py and report/until_table.py make the tables of records, for pages and reports alike.
"""

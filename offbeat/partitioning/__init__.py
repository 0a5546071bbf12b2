"""Cut a model into stages: trace, profile, solve, partition.

May import errors, core, graphs, engines and what describes methods.
"""

from offbeat.partitioning.choose import Trace
from offbeat.partitioning.cut import balanced, check_stages, cut, forward_flops, is_sequence, split, units
from offbeat.partitioning.inputs import as_dict
from offbeat.partitioning.partition import (
    By,
    Partition,
    Units,
    block_cuts,
    check_cutting,
    default_units,
    needs_batch,
    partition,
)
from offbeat.partitioning.profile import Profile, UnitCost, profile
from offbeat.partitioning.solve import Memory, Solution, solve
from offbeat.partitioning.ties import Tied, TiedParameter
from offbeat.partitioning.trace import Traced, trace

__all__ = [
    "By",
    "Memory",
    "Partition",
    "Profile",
    "Solution",
    "Tied",
    "TiedParameter",
    "Trace",
    "Traced",
    "UnitCost",
    "Units",
    "as_dict",
    "balanced",
    "block_cuts",
    "check_cutting",
    "check_stages",
    "cut",
    "default_units",
    "forward_flops",
    "is_sequence",
    "needs_batch",
    "partition",
    "profile",
    "solve",
    "split",
    "trace",
    "units",
]

"""Where a model is cut into stages."""

from offbeat.cutting.cut import balanced, check_stages, cut, forward_flops, is_sequence, split, units
from offbeat.cutting.partition import By, Partition, Units, default_units, partition
from offbeat.cutting.profile import Profile, UnitCost, profile
from offbeat.cutting.solve import Memory, Solution, solve
from offbeat.cutting.trace import Traced, trace

__all__ = [
    "By",
    "Memory",
    "Partition",
    "Profile",
    "Solution",
    "Traced",
    "UnitCost",
    "Units",
    "balanced",
    "check_stages",
    "cut",
    "default_units",
    "forward_flops",
    "is_sequence",
    "partition",
    "profile",
    "solve",
    "split",
    "trace",
    "units",
]

"""Where a model is cut into stages."""

from offbeat.partition.cut import balanced, check_stages, cut, forward_flops, split, units

__all__ = ["balanced", "check_stages", "cut", "forward_flops", "split", "units"]

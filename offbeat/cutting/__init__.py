"""Where a model is cut into stages."""

from offbeat.cutting.cut import Part, balanced, check_stages, cut, forward_flops, split, units

__all__ = ["Part", "balanced", "check_stages", "cut", "forward_flops", "split", "units"]

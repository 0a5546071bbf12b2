"""How a batch becomes the arguments of a model's forward.

a tensor                 the first argument
a tuple or list          the arguments without a default, where forward has several of them
a dict (any mapping)     keyword arguments, where forward has arguments of these names; otherwise the first argument
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from offbeat.errors import UserError


@dataclass(frozen=True)
class Inputs:
    """The arguments of forward that a batch fills."""

    names: tuple[str, ...]
    keywords: bool = False  # the batch is a dict of them

    @classmethod
    def of(cls, model: nn.Module, sample: Any = None) -> Inputs:
        """Those that this sample fills; without a sample those without a default, or the first if all have one."""
        named = _parameters(model)
        positional = [each for each in named if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        required = [each.name for each in positional if each.default is each.empty]
        if isinstance(sample, Mapping) and sample and all(isinstance(key, str) for key in sample):
            order = _keywords(model, named, required, list(sample))
            if order is not None:
                return cls(order, keywords=True)
        rest = [each.name for each in named if each.kind is each.VAR_POSITIONAL]
        if rest and not positional:
            several = len(sample) if isinstance(sample, tuple | list) else 1
            return cls(tuple(f"{rest[0]}[{n}]" for n in range(several)))
        return cls(tuple(required or [each.name for each in positional[:1]]))

    def values(self, x: Any) -> dict[str, Any]:
        """The batch by the names of the arguments."""
        takes = ", ".join(self.names)
        if self.keywords:
            if not isinstance(x, Mapping) or set(x) != set(self.names):
                given = f"a dict of {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"a {type(x).__name__}"
                raise UserError(f"{given} given where the sample was a dict of {takes}: give every batch these keys")
            return {name: x[name] for name in self.names}
        if len(self.names) == 1:
            return {self.names[0]: x}
        if not isinstance(x, tuple | list) or len(x) != len(self.names):
            given = f"{len(x)} values" if isinstance(x, tuple | list) else f"a {type(x).__name__}"
            raise UserError(f"{given} given where the model's forward takes ({takes}): give a tuple of these")
        return dict(zip(self.names, x, strict=True))

    def call(self, model: nn.Module, values: Mapping[str, Any]) -> Any:
        """Call the model with these values of the arguments."""
        return model(**values) if self.keywords else model(*values.values())


def as_dict(batch: Any) -> Any:
    """A mapping, such as a BatchEncoding of transformers, as a dict; anything else unchanged."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def depends_on_batch(model: nn.Module) -> bool:
    """Whether the form of a batch decides which arguments of forward it fills."""
    named = _parameters(model)
    return len(named) != 1 or named[0].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def advice(model: nn.Module, sample: Any) -> str:
    """What to do about a sample that the model refused, where its form may be the reason; else nothing."""
    named = [each for each in _parameters(model) if each.kind is each.POSITIONAL_OR_KEYWORD]
    inputs = Inputs.of(model, sample)
    if isinstance(sample, tuple | list) and len(inputs.names) == 1 and 1 < len(sample) <= len(named):
        example = ", ".join(f'"{each.name}": ...' for each in named[: len(sample)])
        signature = ", ".join(each.name if each.default is each.empty else f"{each.name}=..." for each in named)
        return (
            f"; a {type(sample).__name__} is passed to forward({signature}) as its one required argument: "
            f"to fill several arguments give a dict {{{example}}}"
        )
    if isinstance(sample, Mapping) and not inputs.keywords:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = ", ".join(each.name for each in _parameters(model) if each.kind in kinds)
        keys = ", ".join(map(str, sample))
        return f"; a dict of {keys} is passed as {inputs.names[0]}: name its keys as forward({takes}) does"
    return ""


def settings_advice(model: nn.Module) -> str:
    """Settings of a transformers model that choose by random numbers what its forward does; nothing where none does."""
    config = getattr(model, "config", None)
    masks = any(getattr(config, name, 0) for name in ("mask_time_prob", "mask_feature_prob"))
    found = ["layerdrop = 0"] if getattr(config, "layerdrop", 0) else []
    found += ["apply_spec_augment = False"] if masks and getattr(config, "apply_spec_augment", False) else []
    return f" (to cut it, set {' and '.join(f'model.config.{each}' for each in found)})" if found else ""


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _keywords(
    model: nn.Module, named: list[inspect.Parameter], required: list[str], keys: list[str]
) -> tuple[str, ...] | None:
    """The keys in the order of forward's arguments; None where the dict itself is the argument."""
    known = [each.name for each in named if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    rest = any(each.kind is each.VAR_KEYWORD for each in named)
    matching, other = [name for name in known if name in keys], [key for key in keys if key not in known]
    missing = [name for name in required if name not in keys]
    if (matching or (rest and not known)) and (rest or not other) and not missing:
        return (*matching, *other)
    if not matching and (len(required) == 1 or (not required and len(known) == 1)):
        return None
    takes = ", ".join(known) or "no named arguments"
    problem = f"without {', '.join(missing)}" if missing and not other else f"with {', '.join(other or keys)}"
    raise UserError(
        f"a dict {problem} for {type(model).__name__}, whose forward takes {takes}: "
        "name the keys as forward names its arguments, or give a tuple"
    )

"""A network by the name of a function that returns it: my_package.my_module:build.

The function is imported from the current folder or from an installed package. Parameters named `shape` (of one sample)
and `classes` (of the data, or its vocabulary) get those of the data; all others keep their defaults.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from torch import nn

from offbeat.errors import UserError, first_line
from offbeat.models.spec import NetworkSpec, Shape


def spec(name: str) -> NetworkSpec:
    """Of the function that is named MODULE:FUNCTION."""
    module, _, function = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # of the user's module
        raise UserError(
            f"model {name!r} cannot be imported ({first_line(error)}): give MODULE:FUNCTION, a function that returns a "
            "torch.nn.Module"
        ) from error
    if not callable(found):
        raise UserError(f"model {name!r} is not a function: give MODULE:FUNCTION that returns a torch.nn.Module")

    def make(shape: Shape, classes: int) -> nn.Module:
        return _built(name, found, {"shape": shape, "classes": classes})

    return NetworkSpec(make, None, None, ours=False)


def _built(name: str, function: Any, known: dict[str, Any]) -> nn.Module:
    try:
        takes = inspect.signature(function).parameters
        model = function(**{option: value for option, value in known.items() if option in takes})
    except UserError:
        raise
    except Exception as error:  # of the user's function
        raise UserError(
            f"model {name!r} failed with {type(error).__name__} ({first_line(error)}): it is called with those of "
            "shape= and classes= that it has"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r} returned {type(model).__name__}: return a torch.nn.Module")
    return model

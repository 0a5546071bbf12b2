"""A value of a wrong type is refused in one line that names its argument, in every public function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import offbeat
from offbeat import UserError

X, Y = torch.ones(4, 2), torch.zeros(4, 2)
AS = {"turns": "trace", "every": "diagnose", "lambda_": "lambda"}  # the words of these arguments in errors
ANYTHING = {  # arguments that take any object, and classes whose fields are declared by authors of methods
    ("Pipeline", "sample"),
    ("partition", "sample"),
    ("train", "show"),
    ("train", "changes"),
}
DECLARATIONS = ("Method", "Recipe")


class Wrong:
    """Not a number, a text, a sequence or a function."""

    def __repr__(self) -> str:
        return "Wrong()"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {  # beside the wrong argument
    "Pipeline": lambda: {"model": model(), "K": 2, "loss": mse_loss, "optimizer": sgd},
    "partition": lambda: {"model": model(), "K": 2, "sample": X},
    "fit": lambda: {"loader": [(X, Y)]},
    "evaluate": lambda: {"loader": [(X, Y)]},
    "trace": lambda: {"turns": 2, "path": "trace.json"},
}


def public() -> list[str]:
    found = [name for name in offbeat.__all__ if name not in ("__version__", *DECLARATIONS)]
    functions = [name for name in found if callable(getattr(offbeat, name))]
    return [
        name for name in functions if not (isinstance(it := getattr(offbeat, name), type) and issubclass(it, Exception))
    ]


def arguments(function: Callable[..., Any]) -> list[str]:
    if function is offbeat.make_recipe:
        return [field.name for field in fields(offbeat.Recipe)]
    return [name for name in inspect.signature(function).parameters if name != "self"]


CALLS = [
    (name, argument)
    for name in public()
    for argument in arguments(getattr(offbeat, name))
    if (name, argument) not in ANYTHING
]
PIPELINE_CALLS = [
    (name, argument)
    for name in ("fit", "evaluate", "trace", "diagnose")
    for argument in arguments(getattr(offbeat.Pipeline, name))
]


def refused(function: Callable[..., Any], given: dict[str, Any], argument: str) -> None:
    with pytest.raises(UserError) as error:
        function(**{**given, argument: Wrong()})
    message = str(error.value)
    assert "\n" not in message
    assert AS.get(argument, argument) in message


@pytest.mark.parametrize(("name", "argument"), CALLS)
def test_a_wrong_type_is_refused_in_one_line_that_names_the_argument(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(getattr(offbeat, name), GIVEN.get(name, dict)(), argument)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "argument"), PIPELINE_CALLS)
def test_a_wrong_type_is_refused_by_a_pipeline_that_trains(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe = offbeat.Pipeline(**GIVEN["Pipeline"]())
    pipe.step(X, Y)
    refused(getattr(pipe, name), GIVEN.get(name, dict)(), argument)
    pipe.drain()


@pytest.mark.parametrize("name", sorted(field.name for field in fields(offbeat.Recipe)))
@pytest.mark.parametrize("value", ["?", -7.5, [Wrong()]], ids=str)
def test_a_recipe_takes_no_value_of_another_type(name, value):
    kind = str(next(field.type for field in fields(offbeat.Recipe) if field.name == name))
    if (value == "?" and kind.startswith("str")) or (value == -7.5 and kind.startswith("float")):
        return
    with pytest.raises(UserError, match=name):
        offbeat.make_recipe(**{name: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: offbeat.make_recipe(batch_size="a"), "batch_size='a': use an integer"),
        (lambda: offbeat.make_recipe(left_out="a"), "left_out='a': use a tuple of integers"),
        (lambda: offbeat.make_recipe(seed="a"), "seed='a': use an integer"),
        (
            lambda: offbeat.make_recipe(device=torch.device("cpu")),
            "device=device(type='cpu'): use one of 'cpu', 'cuda'",
        ),
        (lambda: offbeat.make_recipe(method=offbeat.ADL(M=2)), "method is a Method: give its name and settings"),
        (lambda: offbeat.make_recipe(warmup=10**400), "warmup=1000...0000 (401 digits): use a finite number of at"),
        (lambda: offbeat.make_recipe(data_dir=""), "data_dir='': give the name of a file or folder, or leave it out"),
        (lambda: offbeat.make_recipe(lr=float("nan")), "lr=nan: use a finite number of at least 0"),
        (lambda: offbeat.make_recipe(K=-(10**400)), "K=-1000...0000 (401 digits): use an integer of at least 1"),
        (lambda: offbeat.make_recipe(speeds=[math.inf]), "use finite numbers above 0"),
        (lambda: offbeat.Pipeline(**{**GIVEN["Pipeline"](), "K": 10**30}), "stages: use at most 10000"),
        (
            lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), cuts=(cut for cut in [1])),
            "give a list of numbers of units, or of names of modules",
        ),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), cuts={1}), "cuts={1}: give a list of numbers of units"),
        (
            lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), cuts=[False]),
            "cuts=[False]: give a list of numbers of units",
        ),
        (
            lambda: offbeat.Pipeline(**{**GIVEN["Pipeline"](), "model": torch.nn.Linear(2, 2, device="meta")}),
            "weight is on the meta device, without values: call model.to_empty(device='cpu')",
        ),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"]()).load(""), "path='': give a name, as text or a Path"),
        (lambda: offbeat.ADL(M=10**400), "M=1000...0000 (401 digits): use an integer of at most"),
        (lambda: offbeat.DNI(lr=10**400), "lr=1000...0000 (401 digits): use a finite number"),
        (lambda: offbeat.PredSim(beta=math.nan), "beta=nan: use a finite number"),
        (lambda: offbeat.SpikeCompensation(extra=10**400), "(401 digits): use a finite number of updates from 0 up"),
        (
            lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), clip_norm=10**400),
            "clip_norm=1000...0000 (401 digits): use a number above 0",
        ),
        (
            lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), method="auto", batch=4, latency=math.nan),
            "latency=nan: use a finite number",
        ),
        (lambda: offbeat.train(offbeat.make_recipe(), silence=10**400), "silence=1000...0000 (401 digits): use a"),
        (lambda: offbeat.make_recipe(modle="mlp"), "unknown setting 'modle': did you mean 'model'?"),
        (lambda: offbeat.ADL(N=3), "ADL got an unexpected keyword argument 'N': its settings are M (default 4)"),
        (lambda: offbeat.ADL(4, 5), "ADL too many positional arguments: its settings are M (default 4)"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), seed="a"), "seed='a': use a whole number from 0 up"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), left_out="a"), "left_out='a': give the numbers of batches"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"](), tied="share"), "unknown tied 'share': did you mean 'shared'?"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"]()).evaluate(5), "loader is of type int: give an iterable"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"]()).fit([(X, Y)], epochs=0), "epochs=0: use a whole number"),
        (lambda: offbeat.Pipeline(**GIVEN["Pipeline"]()).fit([(X, Y)], epochs=1.5), "epochs=1.5: use a whole number"),
    ],
)
def test_a_refusal_states_what_is_allowed(call, message):
    with pytest.raises(UserError) as error:
        call()
    assert message in str(error.value)


def test_lists_and_paths_are_taken_for_tuples_and_text(tmp_path):
    recipe = offbeat.make_recipe(K=2, cuts=[3], left_out=[4, 5], data_dir=tmp_path)
    assert (recipe.cuts, recipe.left_out, recipe.data_dir) == ((3,), (4, 5), str(tmp_path))

"""The answers of a method in a recipe: from the command line into config.json and back, refused where not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import check_refused

from offbeat.errors import UserError
from offbeat.recipe import ANSWERS, complete, load

DRY = ("train", "--data", "synthetic", "--samples", 8, "--model", "mlp", "-K", 2, "--dry-run", "--json")
GIVEN = {  # method, options, what the recipe holds
    "corrector": ("adl", ("--corrector", "sc"), {"corrector": "sc"}),
    "two correctors": ("adl", ("--corrector", "lwp+sc"), {"corrector": "lwp+sc"}),
    "micro-batches": ("gpipe", ("--micro-batches", 2, "--recompute"), {"m": 2, "recompute": True}),
    "no recompute": ("gpipe", ("--no-recompute",), {"m": None, "recompute": False}),
    "beta": ("fdg", ("--beta", 0.5), {"beta": 0.5, "weights": "stash"}),
    "workers": ("asgd", ("--workers", 3, "-K", 1), {"N": 3, "K": 1}),
    "barrier": ("ddg", ("--barrier",), {"barrier": True}),
    "no barrier": ("fr", ("--no-barrier",), {"barrier": False, "weights": "replay", "M": 1}),
    "conditional": ("dni", ("--conditional",), {"conditional": True}),
    "buffer": ("dgl-async", ("--buffer", 3), {"buffer": 3}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_answer_goes_through_the_recipe_and_its_json(offbeat, name):
    method, options, expected = GIVEN[name]
    outcome = offbeat(*DRY, "--method", method, *options)
    assert outcome.code == 0, outcome.err
    recipe = json.loads(outcome.out)["recipe"]
    assert {setting: recipe[setting] for setting in expected} == expected
    Path("config.json").write_text(json.dumps({"recipe": recipe}))
    again = complete(**load(Path("config.json")))
    assert json.loads(json.dumps(again.as_dict())) == recipe
    assert again.make_method().name.startswith(method)


def test_answers_that_were_not_given_are_none_and_m_weights_and_window_are_the_methods():
    recipe = complete(method="dsp", K=2)
    values = {answer: getattr(recipe, answer) for answer in ANSWERS}
    assert {answer: value for answer, value in values.items() if value is not None} == {
        "M": 1, "weights": "replay", "window": "count",
    }  # fmt: skip


REFUSED = {
    "M": ("dsp", ("-M", 4), ("dsp takes no M",)),
    "weights": ("fr", ("--weights", "stash"), ("fr takes no weights",)),
    "micro-batches": ("adl", ("--micro-batches", 4), ("adl takes no m",)),
    "beta": ("adl", ("--beta", 0.5), ("adl takes no beta",)),
    "workers": ("adl", ("--workers", 4), ("adl takes no N",)),
    "recompute": ("adl", ("--recompute",), ("adl", "recompute")),
    "barrier": ("adl", ("--barrier",), ("adl", "barrier")),
    "conditional": ("bp", ("--conditional",), ("bp takes no conditional",)),
    "buffer": ("dgl", ("--buffer", 2), ("dgl takes no buffer",)),
    "a corrector that there is not": ("adl", ("--corrector", "cs"), ("cs",)),
    "a corrector of exact gradients": ("gpipe", ("--corrector", "sc"), ("corrector sc with gpipe",)),
    "a corrector of delay without one": ("bp", ("--corrector", "lwp"), ("corrector lwp with bp", "not late")),
    "speculation off 1F1B": ("adl", ("--corrector", "spec"), ("corrector spec with adl", "use lwp")),
    "a look-ahead without momentum": ("nag-async", ("--momentum", 0), ("corrector nag with momentum = 0",)),
    "no micro-batch": ("gpipe", ("--micro-batches", 0), ("m = 0",)),
    "no worker": ("asgd", ("--workers", 0, "-K", 1), ("N = 0",)),
    "no buffer": ("dgl-async", ("--buffer", 0), ("buffer = 0",)),
    "beta below 0": ("fdg", ("--beta", -1), ("beta = -1",)),
    "beta that is no number": ("fdg", ("--beta", "nan"), ("beta = nan",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_makes_no_sense_is_refused_in_one_line(offbeat, name):
    method, options, words = REFUSED[name]
    check_refused(offbeat, (*DRY, "--method", method, *options), *words)


@pytest.mark.parametrize(("setting", "value"), [("barrier", 1), ("barrier", "yes"), ("m", True), ("corrector", 3)])
def test_an_answer_of_the_wrong_type_in_a_config_is_refused(offbeat, setting, value):
    Path("x.json").write_text(json.dumps({"recipe": {"model": "mlp", setting: value}}))
    check_refused(offbeat, ("train", "--config", "x.json"), "x.json", setting, "does not fit")


def test_the_help_names_every_method_and_every_answer(offbeat, monkeypatch):
    from offbeat.methods import METHODS

    monkeypatch.setenv("COLUMNS", "300")
    told = offbeat("train", "--help").out
    assert all(name in told for name in METHODS)
    for option in ("--corrector", "--micro-batches", "--beta", "--workers", "--recompute", "--no-recompute",
                   "--barrier", "--no-barrier", "--conditional", "--buffer"):  # fmt: skip
        assert option in told


def test_kernels_are_joined_on_a_gpu_alone_and_in_one_way():
    assert complete(device="cuda", fuse=True).fuse
    with pytest.raises(UserError, match="fuse without a GPU, whose kernels it joins: add --device cuda"):
        complete(fuse=True)
    with pytest.raises(UserError, match="compile and fuse, both of which join operations"):
        complete(device="cuda", fuse=True, compile=True)


def test_there_is_nothing_to_tune_without_a_gpu():
    assert complete(device="cuda", tune=True).tune
    with pytest.raises(UserError, match="tune without a GPU, where there is no cuDNN: add --device cuda"):
        complete(tune=True)


def test_streams_need_a_gpu_and_a_method_whose_iterations_are_alike():
    assert complete(K=4, device="cuda", engine="streams").engine == "streams"
    assert complete(K=4, device="cuda").engine == "streams"
    assert complete(device="cuda").engine == complete(K=4, method="gpipe", device="cuda").engine == "simulate"
    assert complete(K=4).engine == "processes"
    with pytest.raises(UserError, match="engine streams without a GPU"):
        complete(K=4, engine="streams")
    with pytest.raises(UserError, match="engine streams with dgl, which trains heads of its own: use simulate"):
        complete(K=4, engine="streams", device="cuda", method="dgl")

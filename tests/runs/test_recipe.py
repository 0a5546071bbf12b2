"""The settings of a method in a recipe: from the command line into config.json and back, refused where not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import check_refused

from offbeat.errors import UserError
from offbeat.runs import resuming
from offbeat.runs.recipe import changed, load, make_recipe

DRY = ("train", "--data", "synthetic", "--samples", 32, "--model", "mlp", "-K", 2, "--dry-run", "--json")
GIVEN = {  # --method, options, settings in the recipe beside M, weights and window
    "corrector": ("adl:corrector=sc", (), {"corrector": "sc"}),
    "a corrector in short": ("adl", ("--corrector", "sc"), {"corrector": "sc"}),
    "two correctors": ("adl:M=2,corrector=lwp+sc", (), {"M": 2, "corrector": "lwp+sc"}),
    "a corrector with a number": ("adl:corrector=dc:0.1,M=2", (), {"M": 2, "corrector": "dc:0.1"}),
    "no corrector": ("pb:corrector=none", (), {"corrector": None}),
    "no corrector in short": ("adl", ("--corrector", "none"), {"corrector": "none"}),
    "M in short": ("adl:weights=hybrid", ("-M", 2), {"M": 2, "weights": "hybrid"}),
    "M twice, the same": ("adl:M=2", ("-M", 2), {"M": 2}),
    "micro-batches": ("gpipe:m=2,recompute=yes", (), {"m": 2, "recompute": True}),
    "recompute": ("adl:recompute=yes", (), {"recompute": True}),
    "recompute in some stages": ("adl:recompute=1+2", (), {"recompute": [1, 2]}),
    "recompute in short": ("adl", ("--recompute", "yes"), {"recompute": True}),
    "recompute in some stages in short": ("gpipe", ("--recompute", "2"), {"recompute": [2]}),
    "recompute twice, the same": ("adl:recompute=1+2", ("--recompute", "1+2"), {"recompute": [1, 2]}),
    "no recompute": ("gpipe:recompute=no", (), {"recompute": False}),
    "beta": ("fdg:beta=0.5", (), {"beta": 0.5, "weights": "stash"}),
    "workers": ("asgd:N=3", ("-K", 1), {"N": 3}),
    "barrier": ("ddg:barrier=yes", (), {"barrier": True}),
    "no barrier": ("fr:barrier=no", (), {"barrier": False, "weights": "replay", "M": 1}),
    "what the method does anyway": ("dsp:weights=replay,M=1", (), {"weights": "replay", "M": 1}),
    "conditional": ("dni:conditional=yes", (), {"conditional": True}),
    "a rate that is not the recipe's": ("dni:lr=0.001", ("--lr", 0.5), {"lr": 0.001}),
    "a seed that is not the recipe's": ("dgl-async:buffer=3,seed=7", ("--seed", 2), {"buffer": 3, "seed": 7}),
    "a function": ("dni:synthesiser=test_settings:synthesiser", (), {"synthesiser": "test_settings:synthesiser"}),
    "a number among few": ("spectrain:version=2", (), {"version": 2, "weights": "stash"}),
    "an optional number": ("pipemare:anneal=50,C=0.2", (), {"anneal": 50, "C": 0.2}),
    "a word among few": ("mostafa:feedback=sign", (), {"feedback": "sign"}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_survives_the_recipe_and_its_json(offbeat, name):
    method, options, expected = GIVEN[name]
    outcome = offbeat(*DRY, "--method", method, *options)
    assert outcome.code == 0, outcome.err
    recipe = json.loads(outcome.out)["recipe"]
    assert recipe["settings"].keys() == {"M", "weights", "window", *expected}
    assert {setting: recipe["settings"][setting] for setting in expected} == expected
    Path("config.json").write_text(json.dumps({"recipe": recipe}))
    again = make_recipe(**load(Path("config.json")))
    assert json.loads(json.dumps(again.as_dict())) == recipe
    assert again.make_method().name == method.partition(":")[0]


def test_a_setting_that_shares_its_name_with_the_recipe_leaves_the_recipes_alone(offbeat):
    outcome = offbeat(*DRY, "--method", "dni:lr=0.001", "--lr", 0.5)
    recipe = json.loads(outcome.out)["recipe"]
    assert (recipe["lr"], recipe["settings"]["lr"]) == (0.5, 0.001)
    assert make_recipe(**load_text(recipe)).make_method().head_lr == 0.001


def load_text(recipe: dict) -> dict:
    Path("config.json").write_text(json.dumps({"recipe": recipe}))
    return load(Path("config.json"))


def test_settings_that_were_not_given_are_left_out_but_for_m_weights_and_window():
    assert make_recipe(method="dsp", K=2).settings == {"M": 1, "weights": "replay", "window": "count"}


def test_samples_per_update_stay_when_m_changes_on_resuming():
    before = make_recipe(batch_per_update=64, M=4, K=2).as_dict()
    assert make_recipe(**before).as_dict() == before
    after = make_recipe(**changed(before, {"settings": {"M": 2}}))
    assert (after.batch_size, after.batch_per_update, after.lr) == (32, 64, 0.1 * 64 / 256)
    own = make_recipe(**changed(before, {"batch_size": 8}))
    assert (own.batch_size, own.batch_per_update, own.samples_per_update) == (8, None, 32)
    again = make_recipe(**changed(make_recipe(batch_size=8, M=2).as_dict(), {"batch_per_update": 8}))
    assert (again.batch_size, again.batch_per_update) == (4, 8)


def test_an_update_may_have_more_samples_than_an_epoch_in_batches_that_it_has():
    recipe = make_recipe(batch_per_update=128, M=4, K=2, epochs=8)
    assert recipe.count(32).per_epoch == 1
    with pytest.raises(UserError, match="batch_per_update=128 in batches of 32, but an epoch has 31 samples: use"):
        recipe.count(31)


def test_configurations_written_before_have_no_samples_per_update(tmp_path):
    now = make_recipe(K=2, batch_size=8).as_dict()
    now.pop("batch_per_update")
    (tmp_path / "config.json").write_text(json.dumps({"recipe": now}))
    assert make_recipe(**load(tmp_path / "config.json")) == make_recipe(K=2, batch_size=8)


REFUSED = {
    "an update in unequal parts": ("adl:M=3", ("--batch-per-update", 8), ("--batch-per-update 8 with M = 3",)),
    "two batch sizes": (
        "adl:M=2",
        ("--batch-per-update", 8, "--batch-size", 8),
        ("--batch-size 8 with --batch-per-update 8 and M = 2: leave out --batch-size or --batch-per-update",),
    ),
    "no samples per update": ("adl", ("--batch-per-update", 0), ("--batch-per-update 0",)),
    "batches of more samples than an epoch": (
        "adl:M=4",
        ("--batch-per-update", 1000),
        ("--batch-per-update 1000 in batches of 250, but an epoch has 32 samples: use --batch-per-update 128 or less",),
    ),
    "a batch of more samples than an epoch": (
        "adl",
        ("--batch-size", 33),
        ("--batch-size 33, but an epoch has 32 samples: use --batch-size 32 or less",),
    ),
    "more samples than replicas have": (
        "adl:M=2",
        ("--batch-per-update", 132, "--replicas", 2),
        ("--replicas 2 with --batch-per-update 132 in batches of 33: a batch of each needs 66 samples", "has 32"),
    ),
    "M": ("dsp", ("-M", 4), ("dsp takes no M", "its settings are corrector (default none)")),
    "weights": ("fr", ("--weights", "stash"), ("fr takes no weights",)),
    "micro-batches": ("adl:m=4", (), ("adl takes no m",)),
    "beta": (
        "adl:beta=0.5",
        (),
        (
            "adl takes no beta",
            "M (default 4), window (default count), weights (default stash), recompute (default no), corrector",
        ),
    ),
    "workers": ("adl:N=4", (), ("adl takes no N",)),
    "recompute": ("dsp:recompute=yes", (), ("dsp takes no recompute",)),
    "stages that are no numbers": ("adl:recompute=first", (), ("'recompute=first': use yes, no or numbers of stages",)),
    "a stage that there is not": ("adl:recompute=1+9", (), ("recompute has stage 9",)),
    "recompute without stashed weights": ("adl:recompute=yes", ("--weights", "hybrid"), ("recompute needs", "stash")),
    "recompute in short of a method that repeats anyway": ("fr", ("--recompute", "yes"), ("fr takes no recompute",)),
    "a stage in short that there is not": ("adl", ("--recompute", "1+9"), ("recompute has stage 9", "from 1 to")),
    "a stage in short that is no number": ("adl", ("--recompute", "1,2"), ("use yes, no or numbers of stages",)),
    "recompute twice": ("adl:recompute=1", ("--recompute", "2"), ("recompute is 1 in", "give it once")),
    "barrier": ("adl:barrier=yes", (), ("adl", "barrier")),
    "conditional": ("bp:conditional=yes", (), ("bp takes no conditional",)),
    "buffer": ("dgl:buffer=2", (), ("dgl takes no buffer", "it has no settings")),
    "a setting that no method has": ("adl:wieghts=stash", (), ("adl takes no wieghts", "weights (default stash)")),
    "M twice": ("adl:M=2", ("-M", 4), ("M is 2 in 'adl:M=2' and 4", "give it once")),
    "weights twice": ("adl:weights=hybrid", ("--weights", "stash"), ("weights is hybrid", "stash", "give it once")),
    "a setting twice": ("adl:M=2,M=2", (), ("give each setting once",)),
    "a setting without a value": ("adl:M", (), ("'adl:M'", "adl:M=4,corrector=sc")),
    "a number in words": ("adl:M=two", (), ("'M=two': use an integer",)),
    "a fraction for a whole number": ("adl:M=2.5", (), ("'M=2.5': use an integer",)),
    "a truth that is none": ("ddg:barrier=2", (), ("'barrier=2': use yes or no",)),
    "a word of few": ("adl:window=align", (), ("unknown window 'align': did you mean 'aligned'?",)),
    "a number of few": ("spectrain:version=3", (), ("unknown version '3': use one of (1, 2)",)),
    "a function that there is not": ("dni:synthesiser=test_settings:gone", (), ("test_settings:gone", "imported")),
    "text for a function": ("dni:synthesiser=mine", (), ("use a function as package.module:name or none",)),
    "a corrector that there is not": ("adl:corrector=cs", (), ("cs",)),
    "a corrector of exact gradients": ("gpipe", ("--corrector", "sc"), ("corrector sc with gpipe",)),
    "a corrector of delay without one": ("bp", ("--corrector", "lwp"), ("corrector lwp with bp", "not late")),
    "speculation off 1F1B": ("adl:corrector=spec", (), ("corrector spec with adl", "use lwp")),
    "a look-ahead without momentum": ("nag-async", ("--momentum", 0), ("corrector nag with --momentum 0",)),
    "no micro-batch": ("gpipe:m=0", (), ("--method gpipe:m=0",)),
    "no worker": ("asgd:N=0", ("-K", 1), ("--method asgd:N=0",)),
    "no buffer": ("dgl-async:buffer=0", (), ("--method dgl-async:buffer=0",)),
    "beta below 0": ("fdg:beta=-1", (), ("--method fdg:beta=-1",)),
    "beta that is no number": ("fdg:beta=nan", (), ("--method fdg:beta=nan",)),
    "too many micro-batches": (f"gpipe:m={10**40}", (), ("use an integer of at most",)),
    "a method that there is not": ("ald:M=2", (), ("unknown method 'ald': did you mean 'adl'?",)),
    "a method auto in capitals": ("AUTO", (), ("unknown method 'AUTO': did you mean 'auto'?",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(offbeat, name):
    method, options, words = REFUSED[name]
    check_refused(offbeat, (*DRY, "--method", method, *options), *words)


@pytest.mark.parametrize(
    ("method", "setting", "value", "allowed"),
    [
        ("ddg", "barrier", 1, "true or false"),
        ("ddg", "barrier", "yes", "true or false"),
        ("gpipe", "m", True, "an integer"),
        ("adl", "corrector", 3, 'text such as "sc" or "lwp+sc"'),
        ("fdg", "beta", "half", "a number"),
    ],
)
@pytest.mark.parametrize("form", ["settings", "flat"])
def test_a_setting_of_the_wrong_type_in_a_config_is_refused(offbeat, form, method, setting, value, allowed):
    own = {setting: value} if form == "flat" else {"settings": {setting: value}}
    Path("x.json").write_text(json.dumps({"recipe": {"model": "mlp", "method": method, **own}}))
    check_refused(offbeat, ("train", "--config", "x.json"), "x.json", f'"{setting}": {json.dumps(value)}: use', allowed)


def test_the_help_names_every_method_and_the_short_forms(offbeat, monkeypatch):
    from offbeat.methods import METHODS

    monkeypatch.setenv("COLUMNS", "300")
    printed = offbeat("train", "--help").out
    assert all(name in printed for name in METHODS)
    for option in ("--corrector", "--weights", "--window", "-M", "adl:M=4,corrector=sc"):
        assert option in printed


# ---- recipes of earlier versions, in which the settings were fields of their own

EARLIER = Path(__file__).parent.parent / "earlier" / "config.json"


def test_a_config_of_an_earlier_version_is_the_recipe_that_it_was():
    there = json.loads(EARLIER.read_text())["recipe"]
    recipe = make_recipe(**load(EARLIER))
    assert recipe.settings == {"M": 1, "weights": "stash", "window": "count", "beta": 0.5, "corrector": "sc"}
    method = recipe.make_method()
    assert (method.name, [corrector.name for corrector in method.correctors]) == ("fdg", ["shrink", "sc"])
    now = json.loads(json.dumps(recipe.as_dict()))
    same = there.keys() & now.keys()
    assert len(there.keys() - same) == 11
    assert {name: now[name] for name in same} == {name: there[name] for name in same}
    assert resuming.exact(recipe, there)
    assert not resuming.exact(recipe, {**there, "beta": 0.6})
    assert not resuming.exact(recipe, {**there, "corrector": None})


def test_a_default_that_is_given_or_left_out_is_the_same_recipe_to_go_on_with():
    given, left_out = make_recipe(method="fdg", K=2, beta=1.0), make_recipe(method="fdg", K=2)
    assert resuming.exact(given, left_out.as_dict())
    assert resuming.exact(left_out, given.as_dict())


def test_another_method_than_the_configs_starts_from_its_own_settings(offbeat):
    Path("config.json").write_text(EARLIER.read_text())
    dry = ("train", "--config", "config.json", "--dry-run", "--json")
    wanted = {
        "fdg:corrector=none": {"M": 1, "weights": "stash", "window": "count", "beta": 0.5, "corrector": None},
        "adl": {"M": 4, "weights": "stash", "window": "count"},
    }
    for method, settings in wanted.items():
        assert json.loads(offbeat(*dry, "--method", method).out)["recipe"]["settings"] == settings


def test_what_a_method_states_without_taking_it_follows_its_settings():
    before = make_recipe(method="spectrain", K=2, version=2)
    assert before.weights == "stash"
    after = make_recipe(**changed(before.as_dict(), {"settings": {"version": 1}}))
    assert (after.weights, after.settings["version"]) == ("hybrid", 1)


def test_kernels_are_joined_on_a_gpu_alone_and_in_one_way():
    assert make_recipe(device="cuda", fuse=True).fuse
    with pytest.raises(UserError, match="fuse=True without a GPU: it joins kernels of a GPU, add device='cuda'"):
        make_recipe(fuse=True)
    with pytest.raises(UserError, match="compile=True with fuse=True: both join the operations"):
        make_recipe(device="cuda", fuse=True, compile=True)


def test_there_is_nothing_to_tune_without_a_gpu():
    assert make_recipe(device="cuda", tune=True).tune
    with pytest.raises(UserError, match="tune=True without a GPU: it is for cuDNN, add device='cuda'"):
        make_recipe(tune=True)


def test_streams_need_a_gpu_and_a_method_whose_iterations_are_alike():
    assert make_recipe(K=4, device="cuda", engine="streams").engine == "streams"
    assert make_recipe(K=4, device="cuda").engine == "streams"
    assert make_recipe(device="cuda").engine == make_recipe(K=4, method="gpipe", device="cuda").engine == "simulate"
    assert make_recipe(K=4).engine == "processes"
    with pytest.raises(UserError, match="engine='streams' without a GPU"):
        make_recipe(K=4, engine="streams")
    with pytest.raises(UserError, match="engine='streams' with dgl, which trains auxiliary heads: use engine="):
        make_recipe(K=4, engine="streams", device="cuda", method="dgl")


@pytest.mark.parametrize("name", ["units", "partition", "device", "precision", "on_nan", "weighting"])
@pytest.mark.parametrize("word", ["", "other"])
def test_a_field_of_a_few_words_refuses_others(name, word):
    with pytest.raises(UserError, match=f"unknown {name}[= ]'{word}': "):
        make_recipe(**{name: word})

"""Correctors: which settings are refused, and what an optimizer and its scheduler observe of them."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import offbeat
from offbeat.correctors import CORRECTORS, Corrector, optimizer_rules
from offbeat.correctors.corrector import CHANGES
from offbeat.methods import named, parsed
from offbeat.runs.recipe import from_json


def test_memory_of_correctors_of_gradients_differs_in_replicas():
    found = {name: offbeat.ADL(corrector=name).correctors[0].differs_in_replicas for name in ("dc", "sc", "lwp", "t1")}
    assert found == {"dc": True, "sc": False, "lwp": False, "t1": False}
    assert offbeat.Shrink(beta=0.5).differs_in_replicas, "it changes incoming gradients"


def test_every_corrector_of_the_folder_can_be_given_by_name():
    folder = Path(offbeat.correctors.__file__).parent
    modules = [importlib.import_module(f"offbeat.correctors.{path.stem}") for path in folder.glob("[!_]*.py")]
    declared = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Corrector) and value is not Corrector
    }
    assert declared == set(CORRECTORS.values())
    assert all(corrector.changes and {*corrector.changes} <= {*CHANGES} for corrector in declared)


@dataclass(frozen=True)
class Smaller(Corrector):
    name: ClassVar[str] = "smaller"
    changes: ClassVar[tuple[str, ...]] = ("gradient",)
    by: float = 0.5

    def gradients(self, gradients, parameters, forwarded, context):
        return [gradient * self.by for gradient in gradients]


def test_a_corrector_that_is_not_in_the_list_works_as_an_object():
    """It ended in a KeyError when the stages were made."""
    pipe = pipeline(offbeat.ADL(M=1, corrector=Smaller(by=0.25)))
    for x, y in batches(6):
        pipe.step(x, y)
    assert pipe.correctors == ["smaller:by=0.25"] * 3
    assert "corrector smaller:by=0.25" in str(pipe)


@pytest.mark.parametrize("directly", [False, True], ids=["of a method", "of a declaration"])
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"changes": ("gradient",)}, "corrector mine changes the gradient, but Mine does not override gradients"),
        ({"changes": ("forward weights",)}, "but Mine does not override forward_weights"),
        ({"changes": ("rate", "backward weights")}, "but Mine does not override backward_weights"),
        ({"changes": ("incoming gradient",)}, "but Mine does not override incoming"),
        ({"changes": ("gradients",)}, "unknown change of corrector mine 'gradients': did you mean 'gradient'?"),
        ({"changes": "gradient"}, "changes='gradient' of corrector mine: use a tuple of names, such as ('gradient',)"),
        ({"changes": ()}, "changes=() of corrector mine"),
        ({}, "corrector Mine has no changes: declare it"),
        ({"name": None, "changes": ("rate",)}, "corrector Mine has no name: declare it"),
    ],
)
def test_an_incomplete_corrector_is_refused_and_named(declared, message, directly):
    """It ended in a bare NotImplementedError at the first update."""
    mine = type("Mine", (Corrector,), {"name": "mine", **declared})
    if mine.name is None:
        del mine.name
    with pytest.raises(offbeat.UserError) as error:
        replace(offbeat.ADL(), correctors=(mine(),)) if directly else offbeat.ADL(corrector=mine())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_correctors_in_a_recipe_are_text_and_must_be_in_the_list():
    """config.json had their settings without their names, so that a run could be neither resumed nor repeated."""
    for given in ({"corrector": offbeat.SpikeCompensation(extra=1)}, {"settings": {"corrector": "sc:extra=1"}}):
        recipe = offbeat.make_recipe(method="adl", K=2, **given)
        assert recipe.settings["corrector"] == recipe.corrector == "sc:extra=1"
        assert offbeat.make_recipe(**from_json(json.loads(json.dumps(recipe.as_dict())), Path("x"))) == recipe
    both = [offbeat.WeightPrediction(), offbeat.SpikeCompensation()]
    assert offbeat.make_recipe(method="adl", K=2, corrector=both).corrector == "lwp+sc"
    with pytest.raises(
        offbeat.UserError, match=r"corrector Smaller has no name .* give it to offbeat\.Pipeline, or add"
    ):
        offbeat.make_recipe(method="adl", K=2, corrector=Smaller())


def test_a_corrector_with_the_name_of_another_is_not_written_as_that_one():
    """The run had the corrector of the list."""

    class Other(offbeat.SpikeCompensation):
        pass

    with pytest.raises(offbeat.UserError, match="corrector Other has no name that a recipe can be read from"):
        offbeat.make_recipe(method="adl", K=2, corrector=Other())


LATE = ("lwp", "sc", "dc", "t1", "lookahead")  # do nothing without a delay


def batches(n: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(n)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3} | options)


def pipeline(method: offbeat.Method, *, optimizer=sgd, model: nn.Sequential | None = None, **options):
    return offbeat.Pipeline(
        model or network(),
        3,
        method=method,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        cuts=[2, 4],
        **options,
    )


def trained(method: offbeat.Method, **options) -> dict[str, torch.Tensor]:
    pipe = pipeline(method, **options)
    for x, y in batches():
        pipe.step(x, y)
    return dict(pipe.drain().state_dict())


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("method", ["bp", "gpipe", "dgl", "dni", "predsim"])
def test_a_corrector_of_delay_is_refused_by_methods_that_are_never_late(method, name):
    with pytest.raises(offbeat.UserError, match=f"corrector {name} with {method}, whose gradients are not late"):
        named(method, corrector=name)


def test_on_back_propagation_a_look_ahead_is_allowed_since_it_does_something():
    plain, ahead = trained(named("bp")), trained(named("bp", corrector="nag:0.5"))
    assert not torch.equal(plain["0.weight"], ahead["0.weight"])


@pytest.mark.parametrize("method", ["adl", "adl-1f1b", "dsp", "asgd", "bp"])
def test_speculation_is_refused_off_its_own_schedule(method):
    with pytest.raises(offbeat.UserError, match=f"spec with .*{method}"):
        named(method, corrector="spec")
    assert named("pipedream", corrector="spec").correctors


BAD = {
    "a sign too much": ("lwp+", "corrector 'lwp+': a name is missing"),
    "only a sign": ("+", "a name is missing"),
    "no number after the colon": ("sc:", "give a number as the delay of sc"),
    "not a number": ("lwp:nan", "horizon of the weight prediction = nan: use a finite number of updates from 0 up"),
    "a horizon of the past": ("lwp:-3", "horizon"),
    "endless": ("sc:inf", "delay of the spike compensation = inf"),
    "a number that it has no use for": ("spec:2", "spec takes no number"),
    "part of an update": ("t1:2.5", "give a whole number as the updates of t1"),
    "nearly a name": ("lpw", "did you mean 'lwp'"),
    "two of a kind": ("sc+nag", "both set the step"),
    "a second number without its name": ("sc:2:1", "give only the first number without a name"),
    "a setting twice": ("sc:2:delay=1", "give each setting once"),
    "an unknown setting": ("sc:extar=1", "unknown setting of corrector sc 'extar': did you mean 'extra'"),
    "neither yes nor no": ("dc:adaptive=1", "use yes or no for adaptive"),
    "a negative fraction": ("lookahead:-1", "fraction of the look-ahead = -1"),
    "a negative least": ("lookahead:least=-1", "least of the look-ahead = -1"),
    "weights that it cannot work with": ("t2", "it needs hybrid"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_corrector_is_reported_in_one_line(case):
    given, message = BAD[case]
    with pytest.raises(offbeat.UserError) as error:
        named("adl", corrector=given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: offbeat.Shrink("a"),
        lambda: offbeat.SpikeCompensation(delay="2"),
        lambda: offbeat.WeightPrediction("x"),
        lambda: offbeat.Rescheduling(2.5),
        lambda: offbeat.Rescheduling(True),
        lambda: offbeat.NesterovMomentum(None),
        lambda: offbeat.DelayCompensation("x"),
        lambda: offbeat.Discrepancy(None),
        lambda: offbeat.ADL(corrector=3),
        lambda: offbeat.ADL(corrector=[offbeat.SpikeCompensation]),
        lambda: offbeat.PredSim("x"),
        lambda: offbeat.DNI(lr="x"),
        lambda: offbeat.AsyncDGL(2.0),
        lambda: named(3),
    ],
)
def test_settings_of_a_wrong_type_are_refused_as_wrong_numbers_are(make):
    with pytest.raises(offbeat.UserError):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"dampening": 0.5},
        {"nesterov": True},
        {"maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["lwp", "sc", "nag"])
def test_momentum_is_read_of_plain_sgd_only_and_the_error_names_what_was_given(name, options):
    ((option, value),) = options.items()
    with pytest.raises(offbeat.UserError, match=f"{name} with optimizer torch.optim.SGD with .*{option}={value}"):
        pipeline(named("adl", corrector=name), optimizer=lambda p: sgd(p, **options))


NEEDY = ("sc", "lwp", "nag", "lookahead+sc")
FREE = (offbeat.WeightPrediction(form="weight"), "t1:3", "t1:power=1", "dc", "shrink", "lookahead")


@pytest.mark.parametrize("name", NEEDY)
def test_an_optimizer_without_a_rule_is_refused_with_those_that_have_one(name):
    with pytest.raises(
        offbeat.UserError,
        match=r"with optimizer torch.optim.Adagrad: use SGD.* or NAdam of torch.optim, offbeat.optim.Muon",
    ) as e:
        pipeline(named("adl", corrector=name), optimizer=lambda p: torch.optim.Adagrad(p, lr=0.01))
    assert "\n" not in str(e.value)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_of_torch_is_told_from_the_one_that_is_recommended():
    """Both were called Muon in the error."""
    with pytest.raises(offbeat.UserError) as caught:
        pipeline(
            named("adl", corrector="sc"),
            optimizer=lambda p: torch.optim.Muon([each for _, each in p if each.dim() == 2]),
        )
    assert str(caught.value) == (
        "corrector sc with optimizer torch.optim.Muon: use SGD, Adam, AdamW or NAdam of torch.optim, offbeat.optim.Muon"
        ", or another that implements offbeat.correctors.SelfCompensating"
    )


@pytest.mark.parametrize("corrector", FREE, ids=str)
def test_correctors_without_needs_work_with_every_optimizer(corrector):
    adagrad = {"optimizer": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, weight_decay=0.1)}
    plain, found = trained(offbeat.ADL(M=1), **adagrad), trained(offbeat.ADL(M=1, corrector=corrector), **adagrad)
    assert not torch.equal(found["0.weight"], plain["0.weight"])


@pytest.mark.parametrize("corrector", ["sc", "sc:2.5", "nag"])
@pytest.mark.parametrize("make", [sgd, lambda p, **lr: torch.optim.NAdam(p, **lr)], ids=["sgd", "nadam"])
def test_learning_rates_as_tensors_give_the_steps_of_numbers(make, corrector):
    """As on a device, where steps are recorded and a schedule writes the rates."""
    method = offbeat.ADL(M=1, corrector=corrector)
    wanted = trained(method, optimizer=lambda p: make(p, lr=0.05))
    found = trained(method, optimizer=lambda p: make(p, lr=torch.tensor(0.05), foreach=False))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


class Elsewhere(torch.Tensor):
    """A number of updates that seems to be on a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_numbers_of_updates_on_a_device_are_read_after_steps_of_others_only(monkeypatch, kind):
    positions, read = optimizer_rules._positions, []
    monkeypatch.setattr(optimizer_rules, "_positions", lambda values: (read.append(len(values)), positions(values))[1])

    def stepped(elsewhere: bool) -> list[nn.Parameter]:
        given = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, generator=given, dtype=torch.float64)) for _ in range(3)]
        optimizer = kind(parameters, lr=0.1, foreach=False)
        rule = optimizer_rules.rule_of(optimizer)
        for which in ((0, 1, 2), (0, 1), (0, 2), (0, 1), (0, 1, 2), (0, 1, 2)):
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(3, generator=given, dtype=torch.float64)
                parameter.grad = gradient if index in which else None
            rule.before_step()
            kept = rule.before_compensated_step(2.0)
            optimizer.step()
            for state in optimizer.state.values() if elsewhere else ():
                for name in {"step", "mu_product"} & {*state}:
                    if type(state[name]) is torch.Tensor:
                        state[name] = state[name].as_subclass(Elsewhere)
            with torch.no_grad():
                rule.after_compensated_step(2.0, kept)
        return parameters

    here = stepped(False)
    read.clear()
    there = stepped(True)
    assert read == [3, 2, 2, 2, 3], "and not in the last update"
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.detach(), other.detach().as_subclass(torch.Tensor), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_options_of_adam_that_a_rule_does_not_cover_are_refused_in_one_line(kind, option):
    for name in ("sc", "lwp"):
        with pytest.raises(
            offbeat.UserError, match=f"{name} with optimizer torch.optim.{kind.__name__} with {option}=True: use"
        ):
            pipeline(named("adl", corrector=name), optimizer=lambda p: kind(p, lr=0.01, **{option: True}))
    assert pipeline(named("adl", corrector="lookahead"), optimizer=lambda p: kind(p, **{option: True}))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_nag_is_refused_by_optimizers_without_a_nesterov_form(kind):
    with pytest.raises(offbeat.UserError, match=f"nag with optimizer torch.optim.{kind.__name__}: use SGD or NAdam of"):
        pipeline(named("adl", corrector="nag"), optimizer=lambda p: kind(p, lr=0.01))


TEXTS = {
    "sc:2:extra=1": (offbeat.SpikeCompensation(2.0, extra=1.0),),
    "sc:extra=1": (offbeat.SpikeCompensation(extra=1.0),),
    "lwp:fraction=0.5:form=weight": (offbeat.WeightPrediction(form="weight", fraction=0.5),),
    "lookahead": (offbeat.StepLookahead(0.5),),
    "lookahead:k=2+sc:extra=1": (offbeat.StepLookahead(k=2.0), offbeat.SpikeCompensation(extra=1.0)),
    "dc:lambda=2:adaptive=yes": (offbeat.DelayCompensation(2.0, adaptive=True),),
    "t1:power=1": (offbeat.Rescheduling(power=1.0),),
}


@pytest.mark.parametrize("text", TEXTS)
def test_settings_of_a_corrector_can_be_given_by_name(text):
    assert named("adl", corrector=text).correctors == TEXTS[text]
    assert parsed(f"adl:corrector={text}:M=2") == ("adl", {"corrector": text, "M": 2})


@pytest.mark.parametrize("corrector", ["t1:50", "t1:power=1", "nag", "sc", "lwp+sc", "t1:50+nag", "lookahead"])
def test_the_scheduler_and_its_optimizer_keep_their_own_rate_and_momentum(corrector):
    """Steps are made at other rates, but what the schedule sees between them is what it set itself."""

    def rates(method: offbeat.Method) -> list:
        pipe = pipeline(method, scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        seen = []
        for x, y in batches():
            pipe.step(x, y)
            groups = [stage.optimization.optimizer.param_groups[0] for stage in pipe.stages.values()]
            seen.append([(group["lr"], group["momentum"], group["nesterov"]) for group in groups])
        return seen

    assert rates(offbeat.ADL(M=1, corrector=corrector)) == rates(offbeat.ADL(M=1))


@pytest.mark.parametrize("corrector", ["lwp", "sc", "lwp+sc", "nag", "dc:2", "t1:5", "shrink", "lookahead+sc"])
def test_groups_of_parameters_are_corrected_at_their_own_settings(corrector):
    """Two groups alike are one group; a group at rate 0 stays put whatever is done to the step."""

    def halves(first: dict):
        return lambda named: sgd(
            [
                {"params": [p for n, p in named if n.endswith("weight")], **first},
                {"params": [p for n, p in named if n.endswith("bias")]},
            ]
        )

    method = offbeat.ADL(M=1, corrector=corrector)
    whole = trained(method, optimizer=lambda named: sgd([p for _, p in named]))
    alike = trained(method, optimizer=halves({}))
    assert all(torch.equal(alike[name], whole[name]) for name in whole)
    still = trained(method, optimizer=halves({"lr": 0.0}))
    start = network().state_dict()
    for name in whole:
        assert torch.equal(still[name], start[name]) == name.endswith("weight"), name


@pytest.mark.parametrize(
    ("corrector", "weights"),
    [
        *(
            (name, weights)
            for name in ("lwp", "sc", "nag", "t1:5", "shrink", "lookahead+sc")
            for weights in ("stash", "hybrid", "replay")
        ),
        ("dc:2", "stash"),
        ("t2", "hybrid"),
    ],
)
def test_frozen_and_unused_parameters_stay_as_they_are(corrector, weights):
    class Partly(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.idle = nn.Parameter(torch.ones(3))

    torch.manual_seed(0)
    model = nn.Sequential(Partly(), nn.Tanh(), Partly(), nn.Tanh(), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = trained(offbeat.ADL(M=1, weights=weights, corrector=corrector), model=model)
    for name, value in found.items():
        assert torch.equal(value, before[name]) == (name in ("0.bias", "0.idle", "2.idle")), name


def test_a_declaration_that_no_engine_could_carry_out_is_refused():
    from offbeat.method import Method
    from offbeat.methods import lags

    head = offbeat.DGL().head
    for answers, message in (
        ({"lag": lags.none, "feedback": "local"}, "feedback local needs a head"),
        ({"lag": lags.none, "head": head}, "a head needs feedback"),
        ({"lag": lags.one_way, "feedback": "local", "head": head}, "no lag"),
        ({"lag": lags.none, "feedback": "local", "head": head, "m": 2}, "no micro-batches"),
        ({"lag": lags.one_way, "m": 2}, "with micro-batches there is one update per batch"),
        ({"lag": lags.none, "m": 2, "M": 2}, "with micro-batches there is one update per batch"),
    ):
        with pytest.raises(offbeat.UserError, match=f"method toy: .*{message}"):
            Method(name="toy", **answers)


def test_what_correctors_remember_counts_as_memory():
    def memory(corrector: str | None) -> int:
        pipe = pipeline(offbeat.ADL(M=1, weights="hybrid", corrector=corrector))
        for x, y in batches():
            pipe.step(x, y)
        return pipe.stages[1].memory()

    drift = sum(parameter.nbytes for parameter in network()[:2].parameters())
    assert memory("t2") == memory(None) + drift + drift, "what it remembers, and the second set that its backwards use"

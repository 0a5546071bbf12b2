"""corrector="auto": what it chooses by optimizer and delay, and that it is what it names."""

from __future__ import annotations

import pytest
import torch
from test_correctors import batches, pipeline, sgd

import offbeat
from offbeat.correctors import as_text, correctors
from offbeat.method import Method
from offbeat.methods import METHODS, named

LATE = "lookahead:least=1+t1:power=1:above=3+sc"
OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "muon": lambda p: offbeat.optim.Muon(p, lr=0.01),
    "rotated-adam": lambda p: offbeat.optim.RotatedAdam(p, lr=0.01),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-nesterov": lambda p: sgd(p, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
CHOSEN = {  # at a delay of 1 update, and of 4
    "sgd": ("sc", "sc"),
    **dict.fromkeys(("adam", "adamw", "muon", "rotated-adam"), ("lookahead:least=1+sc", LATE)),
    "nadam": ("", ""),
    **dict.fromkeys(("sgd-plain", "sgd-nesterov", "adagrad"), ("", "t1:power=1:above=3")),
}


def trained(method: Method, optimizer, **options) -> dict[str, torch.Tensor]:
    pipe = pipeline(method, optimizer=optimizer, **options)
    for x, y in batches():
        pipe.step(x, y)
    return dict(pipe.drain().state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_auto_chooses_by_the_rule_of_the_optimizer_and_the_delay(optimizer):
    near, far = CHOSEN[optimizer]
    found = pipeline(offbeat.TwoBW(M=3, corrector="auto"), optimizer=OPTIMIZERS[optimizer]).correctors
    assert [text.partition(" (")[0] for text in found] == [near or "none"] * 3  # one update late everywhere
    found = pipeline(offbeat.ADL(M=1, corrector="auto"), optimizer=OPTIMIZERS[optimizer]).correctors
    assert [text.partition(" (")[0] for text in found] == [
        far or "none",
        near or "none",
        "none",
    ]  # 4, 2 and 0 updates late


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_auto_gives_the_bits_of_the_correctors_that_it_names(optimizer):
    make, (near, far) = OPTIMIZERS[optimizer], CHOSEN[optimizer]
    assert same(
        trained(offbeat.ADL(M=1, corrector="auto"), make), trained(offbeat.ADL(M=1, corrector=far or None), make)
    )
    assert same(
        trained(offbeat.TwoBW(M=3, corrector="auto"), make), trained(offbeat.TwoBW(M=3, corrector=near or None), make)
    )
    assert same(trained(offbeat.ADL(M=1, corrector="auto"), make), trained(offbeat.ADL(M=1), make)) == (not far)


@pytest.mark.parametrize("name", ["bp", "gpipe", "dgl"])
def test_auto_changes_no_bit_of_a_method_that_is_not_late(name):
    assert same(trained(named(name, corrector="auto"), sgd), trained(named(name), sgd))


def test_auto_is_printed_with_the_pipeline_for_each_stage():
    pipe = pipeline(offbeat.ADL(M=2, corrector="auto"), optimizer=OPTIMIZERS["adagrad"])
    first, *stages = repr(pipe).splitlines()
    assert first == "Pipeline(method=adl, K=3, M=2, engine=simulate)"
    assert stages[0] == (
        "  stage 1: 20 parameters, staleness 2, corrector none (without sc, which does not work with optimizer "
        "torch.optim.Adagrad: use SGD, Adam, AdamW or NAdam of torch.optim, offbeat.optim.Muon, or another that "
        "implements offbeat.correctors.SelfCompensating)"
    )
    assert stages[2] == "  stage 3: 15 parameters, staleness 0, corrector none"


def test_auto_beside_a_corrector_of_the_same_is_refused_in_one_line():
    for text in ("auto+sc", "t1:power=1+auto"):
        with pytest.raises(offbeat.UserError, match=r"both set the (step|rate): use one of them"):
            offbeat.ADL(corrector=text)
    with pytest.raises(offbeat.UserError, match="correctors nag and auto both set the step"):
        named("nag-async", corrector="auto")
    assert offbeat.ADL(corrector="dc+auto").correctors


def test_the_rate_above_a_delay_is_continuous_and_needs_a_power():
    rate = offbeat.Rescheduling(power=1.0, above=3.0)
    context = offbeat.ADL(M=1).stage_context(1, 6)  # 10 updates late
    assert rate.rate(context) == pytest.approx(4 / 11)
    assert not rate.active(offbeat.ADL(M=2).stage_context(1, 4))  # 3 updates late
    with pytest.raises(offbeat.UserError, match="above=3 of rescheduling without power: give both"):
        offbeat.Rescheduling(above=3.0)


@pytest.mark.parametrize(
    "text",
    [
        "lwp:form=weight:fraction=0.5",
        "dc:lambda=0.1:adaptive=yes",
        "t1:updates=1234567",
        "sc:delay=1.23456789+lookahead:k=1e30",
        LATE,
        "auto",
        "none",
        "",
    ],
)
def test_correctors_as_text_can_be_read_again(text):
    given = correctors(text)
    assert correctors(as_text(given)) == given


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_auto_resumes_from_a_state_bit_for_bit(optimizer):
    def made() -> offbeat.Pipeline:
        return pipeline(offbeat.ADL(M=1, corrector="auto"), optimizer=OPTIMIZERS[optimizer])

    whole, first, second = made(), made(), made()
    for x, y in batches():
        whole.step(x, y)
    first.keep()
    for x, y in batches()[:7]:
        first.step(x, y)
    second.load_stage_states(first.stage_states(), 7)
    for x, y in batches()[7:]:
        second.step(x, y)
    assert same(dict(whole.drain().state_dict()), dict(second.drain().state_dict()))


def test_every_late_method_without_its_own_correctors_takes_auto():
    for name, make in METHODS.items():
        if not make().correctors and make().feedback == "above":
            assert named(name, corrector="auto").correctors == (offbeat.AutoCorrector(),), name

"""Methods with heads or micro-batches, misused: one line that names the batch, the stage and what was given."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import offbeat
from offbeat.methods import METHODS, named

LOCAL = [name for name in METHODS if named(name).feedback == "local"]
HEADS = [name for name in METHODS if named(name).head is not None]


def images(samples: int = 6, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(4, (samples,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()), nn.Conv2d(6, 6, 3, padding=1), head)


def train(model: nn.Module, batches: list, method: Any, *, loss: Any = cross_entropy, cuts: tuple[int, ...] = (1, 2)):
    pipe = offbeat.Pipeline(
        model,
        len(cuts) + 1,
        method=method,
        loss=loss,
        cuts=list(cuts),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )
    for x, y in batches:
        pipe.step(x, y)
    pipe.drain()
    return pipe


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(offbeat.UserError) as raised:
        train(*args, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", LOCAL)
def test_a_label_beyond_the_classes_is_reported_with_stage_and_batch(name):
    message = refusal(network(), [images(), (images()[0], torch.full((6,), 9))], name)
    assert "the head of stage 1 cannot take batch 1, outputs of shape (6, 6, 6, 6) float32 and targets of" in message


@pytest.mark.parametrize("name", ["dgl", "dgl-async"])
def test_a_batch_too_small_for_the_heads_own_batchnorm_is_reported(name):
    message = refusal(network(), [images(), images(1)], name)
    assert "the head of stage 1 cannot take batch 1, outputs of shape (1, 6, 6, 6)" in message
    assert "more than 1 value per channel" in message


@pytest.mark.parametrize("name", [name for name in LOCAL if name != "sim"])  # which classifies at the last stage only
def test_a_loss_that_is_not_of_class_labels_is_reported(name):
    def distance(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    assert "the head of stage 1 cannot take batch 0" in refusal(network(), [images()], name, loss=distance)


@pytest.mark.parametrize("conditional", [False, True])
def test_a_batch_that_a_synthesiser_cannot_take_is_reported(conditional):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    batch = torch.randn(1, 4), torch.zeros(1, dtype=torch.int64)
    message = refusal(model, [batch], offbeat.DNI(conditional=conditional), cuts=(1,))
    assert "the synthesiser of stage 1 cannot take batch 0 of shape (1, 4)" in message


@pytest.mark.parametrize("name", [name for name in HEADS if named(name).feedback == "local"])
def test_regression_is_refused(name):
    batch = torch.randn(5, 4), torch.randn(5, 1)
    message = refusal(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), [batch], name, loss=mse_loss, cuts=(1,))
    assert f"{name} trains every stage on class labels" in message


@pytest.mark.parametrize("name", HEADS)
def test_sequences_between_stages_are_refused(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 3))
    message = refusal(model, [(torch.randn(5, 3, 4), torch.zeros(5, dtype=torch.int64))], name, cuts=(1,))
    assert f"{name} needs vectors or images between stages, but stage 1 gives something else" in message


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("frozen", ["0", "1"])
def test_heads_are_in_the_precision_of_their_stage_also_where_it_is_frozen(name, frozen):
    model = network().double()
    model.get_submodule(frozen).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, [images(dtype=torch.float64)] * 9, name)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == key.startswith(frozen), key


@pytest.mark.parametrize("name", HEADS)
def test_memory_counts_all_of_a_head(name):
    """Its parameters, buffers, gradients and optimizer state, whoever trains it."""
    pipe = train(network(), [images()] * 8, name)
    for stage in (pipe.stages[1], pipe.stages[2]):
        weights = sum(p.nbytes for p in stage.feedback.head.parameters())
        fixed = sum(b.nbytes for b in stage.feedback.head.buffers())
        states = 2 if stage.feedback.teacher is not None else 1  # Adam's, or SGD's
        own = sum(p.nbytes for p in stage.network.module.parameters())
        assert stage.memory() >= 3 * own + (2 + states) * weights + fixed + stage.network.batch_bytes, (
            f"stage {stage.k}"
        )


def test_micro_batches_are_named_as_parts_of_their_batch():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
    message = refusal(model, [images(8), images(6)], offbeat.GPipe(4), cuts=(1,))
    assert "stage 2 cannot take micro-batch 3 of 4 of batch 1 of shape (1, 4, 4, 4) float32: Expected more" in message
    spoilt = images(8)
    spoilt[0][5] = float("nan")
    message = refusal(network(), [images(8), spoilt], offbeat.GPipe(4))
    assert "the loss of micro-batch 3 of 4 of batch 1 is nan" in message
    pipe = train(network(), [images(8)] * 3, offbeat.GPipe(4))
    assert [report.t for report in pipe.reports()] == [2, 2, 2]


def test_a_batch_without_samples_is_reported():
    assert "batch 1 holds no samples" in refusal(network(), [images(), images(0)], offbeat.GPipe(4))


def test_what_has_no_row_a_sample_is_not_split_into_micro_batches():
    def weighted(output: Tensor, target: dict[str, Any]) -> Tensor:
        return cross_entropy(output, target["y"]) * target["scale"]

    x, y = images(8)
    found, plain = (
        train(network(), [(x, {"y": y, "scale": torch.tensor(2.0), "note": "kept"})], method, loss=weighted).model
        for method in (offbeat.GPipe(4), offbeat.BP())
    )
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    message = refusal(network(), [(x, {"y": y, "scale": torch.ones(4)})], offbeat.GPipe(4), loss=weighted)
    assert "batch 0 of 8 samples cannot be split into micro-batches, one of its tensors is of shape (4,)" in message


def test_synthetic_gradients_need_no_class_labels_unless_they_are_conditional():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)]
    batch = torch.randn(5, 4), torch.randn(5, 2)
    options: dict = {"loss": mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.01), "sample": batch[0]}
    pipe = offbeat.Pipeline(layers, method=offbeat.DNI(), **options)
    for _ in range(4):
        pipe.step(*batch)
    pipe.drain()
    conditional = offbeat.Pipeline(layers, method=offbeat.DNI(conditional=True), **options)
    with pytest.raises(offbeat.UserError, match="class labels"):
        conditional.step(*batch)


def test_the_function_of_an_optimizer_may_take_the_stage():
    seen: list = []

    def made(parameters, stage):
        seen.append(stage)
        return torch.optim.SGD(parameters, lr=0.1)

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    offbeat.Pipeline(model, 3, method=offbeat.ADL(M=4), loss=mse_loss, optimizer=made, cuts=[1, 2])
    assert [(one.k, one.K, one.delay, one.lag, one.M) for one in seen] == [
        (1, 3, 1, 4, 4),
        (2, 3, 0.5, 2, 4),
        (3, 3, 0, 0, 4),
    ]
    with pytest.raises(FrozenInstanceError):
        seen[0].k = 2


ONE_ARGUMENT = {
    "a class": torch.optim.SGD,
    "a partial": partial(torch.optim.SGD, lr=0.1),
    "a default": lambda parameters, lr=0.1: torch.optim.SGD(parameters, lr=lr),
    "any number of arguments": lambda *parameters: torch.optim.SGD(*parameters),
}


@pytest.mark.parametrize("kind", ONE_ARGUMENT)
def test_the_function_of_an_optimizer_gets_one_argument_unless_it_needs_two(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = offbeat.Pipeline(model, 2, loss=mse_loss, optimizer=ONE_ARGUMENT[kind], cuts=[1])
    assert all(isinstance(stage.optimization.optimizer, torch.optim.SGD) for stage in pipe.stages.values())


@pytest.mark.parametrize("make", [lambda: None, lambda p, stage, more: None, lambda p, *, rate: None])
def test_an_optimizer_function_of_other_arguments_is_refused_in_one_line(make):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(offbeat.UserError, match=r"^optimizer takes \(.*\): give .* lambda parameters, stage: \.\.\.$"):
        offbeat.Pipeline(model, 2, loss=mse_loss, optimizer=make, cuts=[1])


def test_an_optimizer_or_scheduler_instance_is_refused():
    model = network()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(offbeat.UserError, match=r"^optimizer is of type SGD: give a function .* lambda parameters"):
        offbeat.Pipeline(model, 2, loss=cross_entropy, optimizer=made)
    schedule = torch.optim.lr_scheduler.StepLR(made, 10)
    with pytest.raises(offbeat.UserError, match=r"^scheduler is of type StepLR: give a function .* lambda optimizer"):
        offbeat.Pipeline(model, 2, loss=cross_entropy, optimizer=torch.optim.SGD, scheduler=schedule)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1.0],), "batch 0 is of type list without a tensor: give a tensor, or a tuple or a dict of tensors"),
        ((images()[0].numpy(), images()[1]), "batch 0 is of type ndarray without a tensor"),
        ((images(),), "x is of type tuple with two entries, and there is no y: give both, as in step(x, y)"),
        ((list(images()),), "x is of type list with two entries"),
    ],
)
def test_a_step_without_a_tensor_or_with_a_whole_batch_as_x_is_refused(given, message):
    """A unit of the model was said not to be measurable on it."""
    pipe = offbeat.Pipeline(network(), K=2, optimizer=torch.optim.SGD, loss=cross_entropy)
    with pytest.raises(offbeat.UserError) as error:
        pipe.step(*given)
    assert message in str(error.value)


class Difference(nn.Module):
    """Of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, a, b):
        return self.head(self.body(a) - self.body(b))


def test_a_model_of_two_inputs_needs_no_target():
    """They were taken for a whole batch."""
    pipe = offbeat.Pipeline(
        Difference(), K=2, optimizer=torch.optim.SGD, loss=lambda output, target: output.square().mean()
    )
    assert pipe.step((torch.ones(4, 3), torch.zeros(4, 3))) > 0


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten(), nn.Tanh()), network().requires_grad_(False)])
def test_a_model_of_which_nothing_is_trained_is_refused_when_it_is_trained(model, K):
    """It trained nothing, without a word; to evaluate it is no mistake."""
    pipe = offbeat.Pipeline(model, K=K, optimizer=torch.optim.SGD, loss=cross_entropy)
    assert pipe.evaluate([images()])["samples"] == 6
    for train in (lambda: pipe.step(*images()), lambda: pipe.fit([images()])):
        with pytest.raises(offbeat.UserError, match="no parameter of the model requires a gradient"):
            train()


def test_the_class_of_a_loss_is_no_loss():
    with pytest.raises(
        offbeat.UserError, match=r"loss is the class CrossEntropyLoss: give an object, CrossEntropyLoss\(\)"
    ):
        offbeat.Pipeline(network(), K=2, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss)

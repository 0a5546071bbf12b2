"""A stage and its parts: names of parameters, and who launches its work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from offbeat.core.stage import Stage
from offbeat.engines.streams import Streams
from offbeat.graphs.recorded_stage import RecordedStage

CPU = torch.device("cpu")


class Network(nn.Module):
    """A network whose first layers have the names that parameters of an auxiliary head get, if `name` is head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.add_module(name, nn.Module())
        self.get_submodule(name).net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
        self.name, self.out = name, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.get_submodule(self.name).net(x))


class Classifier(nn.Module):
    """A head whose parameters are called net.0.weight and so on, as those of the block."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(shape[0], classes))

    def forward(self, z, target, loss):
        return loss(self.net(z), target)


def pipeline(name: str) -> offbeat.Pipeline:
    return offbeat.Pipeline(
        Network(name),
        2,
        method=offbeat.Method(name="local", lag=lambda k, K: 0, M=1, feedback="local", head=Classifier),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        sample=torch.ones(2, 4),
        cuts=[2],
        units="layers",
    )


def steps(pipe: offbeat.Pipeline, n: int = 4, first: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(9)]
    for x, y in data[first : first + n]:
        pipe.step(x, y)
    return [p.detach().clone() for p in pipe.model.parameters()]


def test_a_module_named_head_is_trained_beside_an_auxiliary_head():
    assert all(map(torch.equal, steps(pipeline("head")), steps(pipeline("body"))))


def test_a_stage_with_a_module_named_head_resumes_bit_for_bit():
    whole, first, second = (pipeline("head") for _ in range(3))
    expected = steps(whole, 8)
    steps(first)
    second.load_stage_states(first.stage_states(), batches=4)
    assert all(map(torch.equal, steps(second, 4, first=4), expected))


def test_parameters_of_a_head_keep_their_names_in_checkpoints():
    pipe = pipeline("body")
    steps(pipe)
    saved = pipe.stage_states()[1]["stage"]
    assert {name for name in saved["optimizer"] if name not in saved["model"]} == {
        "head.net.0.weight",
        "head.net.0.bias",
    }


@pytest.mark.parametrize("recorded", [False, True])
def test_a_pipeline_holds_plain_stages_whoever_executes_their_operations(recorded):
    pipe = offbeat.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 3)],
        method=offbeat.ADL(M=2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        engine=Streams(2, CPU) if recorded else "simulate",
    )
    assert all(type(stage) is Stage for stage in pipe.stages.values())
    for worker in pipe.workers:
        assert isinstance(worker.executor, RecordedStage) == recorded
        assert (worker.executor if not recorded else worker.executor.stage) is worker.stage

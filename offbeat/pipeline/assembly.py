"""The cut model: stages, workers and links of this process, as all processes agree on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat import partitioning as cutting
from offbeat.core.compression import Compression, Messages
from offbeat.core.corrections import correctors_as_text
from offbeat.core.links import Link
from offbeat.core.links.local import Entrance
from offbeat.core.outputs import shapes_and_classes
from offbeat.core.precision import PrecisionPolicy
from offbeat.core.stage import Stage
from offbeat.core.stage_network import Loss
from offbeat.core.worker import Links, Worker
from offbeat.engines import Engine
from offbeat.engines.devices import present
from offbeat.errors import NotFinite, UserError, attempted, earliest, result_of
from offbeat.method import Method
from offbeat.ops import LESSON, Backward
from offbeat.pipeline.model_cut import ModelCut


@dataclass(frozen=True)
class Assembly:
    """A model that is cut, with the stages of this process; of one replica, and `others` are its other replicas."""

    engine: Engine
    parts: list[nn.Module]  # of all stages
    cuts: list[int]
    notes: list[str]  # what could not be traced
    outputs: list[Any]  # shape of one sample's output of every stage and the number of classes, for heads
    links: dict[int, Links]  # of the stages of this process
    evaluation_links: dict[int, Link | None]  # by the lower stage
    trained: list[tuple[str, nn.Parameter, bool]]  # parameters of the model, and whether they required gradients
    method: Method  # of the stages
    stages: dict[int, Stage] = field(default_factory=dict)  # of this process, by k
    workers: list[Worker] = field(default_factory=list)  # of the same stages
    correctors: list[str] = field(default_factory=list)  # of all stages, after a staleness warm-up
    replica: int = 0
    costs: tuple[float, ...] = ()  # of all stages, as Partition has them; empty where cuts were given
    others: list[Assembly] = field(default_factory=list)  # with copies of the model, in the order of the replicas

    @property
    def replicas(self) -> list[Assembly]:
        """All replicas of this process."""
        return [self, *self.others]

    @property
    def all_workers(self) -> list[Worker]:
        """The workers of all replicas of this process."""
        return [worker for assembly in self.replicas for worker in assembly.workers]

    def check_trained(self) -> None:
        """Refuse a parameter of the model that was frozen or unfrozen since the stages were made, and a model of
        which nothing is trained."""
        if not any(before for _, _, before in self.trained):
            raise UserError(
                "no parameter of the model requires a gradient, so nothing would be trained: call requires_grad_() on "
                "the model or a part of it before you make the Pipeline"
            )
        for name, parameter, before in self.trained:
            if parameter.requires_grad is not before:
                now = "is frozen" if before else "requires gradients"
                raise UserError(
                    f"parameter {name} {now} since the pipeline was built: set requires_grad back to {before} and "
                    "drain(), then change it and make a new Pipeline"
                )

    def settle(self) -> None:
        """Wait for all work of the stages; raises for what was first found to be not finite, from above: gradients
        come from the loss."""
        self.engine.settle()
        found = []
        for stage in reversed(self.stages.values()):
            try:
                stage.launcher.settle()
            except NotFinite as error:
                found.append(error)
        if found:
            raise earliest(found)

    def share_weights(self) -> None:
        """The newest weights of every stage, in all processes; buffers (BatchNorm) are those of replica 0, except that
        another replica keeps its own in the stages that it trains."""
        for k, part in enumerate(self.parts, start=1):
            trains = self.replica > 0 and k in self.stages
            tensors = [tensor for _, tensor in _named_tensors(part)]
            self.engine.share_tensors([tensor.clone() for tensor in tensors] if trains else tensors, k)


@dataclass(frozen=True)
class Assembler:
    """Cuts a model and makes the stages of this process. The process of the first stage decides for all."""

    engine: Engine
    cut: ModelCut
    method: Method
    device: torch.device
    precision: PrecisionPolicy
    loss: Loss
    make_stage: Callable[..., Stage]  # takes the arguments of Stage that are left
    messages: Messages = "exact"

    @property
    def K(self) -> int:  # noqa: N802
        return self.engine.K

    @property
    def model(self) -> nn.Module:
        return self.cut.model

    def assemble(self, cuts: Sequence[int | str] | None, sample: Any, entrance: Link, *, batch: int) -> Assembly:
        """Cut at the given cuts, or where the sample balances; agree on the cuts and initial weights of the first
        process; make links, and stages and workers for the method that trains this batch."""
        self.model.to(present(self.device))
        self.precision.lay_out(self.model)
        made = self._agree_on_cuts(cuts, sample)
        self._check_same_model()
        self.engine.share_tensors([tensor for _, tensor in _named_tensors(self.model)], 1)
        if not all(tie.shared for tie in made.ties):
            for part in made.stages:  # a copy may have no name in the model
                self.engine.share_tensors([tensor for _, tensor in _named_tensors(part)], 1)
        outputs = self._outputs(made.stages, sample) if self.method.head else [None] * self.K
        links, evaluation_links = self._connect(entrance)
        trained = [(name, parameter, parameter.requires_grad) for name, parameter in self.model.named_parameters()]
        cut = Assembly(
            self.engine,
            made.stages,
            list(made.cuts),
            made.notes,
            outputs,
            links,
            evaluation_links,
            trained,
            self.method,
            replica=self.engine.replicas_here[0],
            costs=made.costs,
        )
        others = [self._copied(cut, replica) for replica in self.engine.replicas_here[1:]]
        made_stages = self.with_method(replace(cut, others=others), self.method.phase(batch))
        return replace(made_stages, correctors=self._correctors(made_stages.stages))

    def with_method(self, assembly: Assembly, method: Method) -> Assembly:
        """New stages and workers for this method, on the same cut model and links, in all replicas."""
        others = [self._with_method(other, method) for other in assembly.others]
        made = replace(self._with_method(assembly, method), others=others)
        later = self.method.phases[self.method.phases.index(method) + 1 :]
        for worker, phase in product(made.all_workers, later):
            worker.stage.optimization.prepare_for(phase)
        return made

    def _copied(self, assembly: Assembly, replica: int) -> Assembly:
        """Another replica in this process, with its own copy of the model and its own links."""
        links, evaluation_links = self._connect(Entrance())
        parts = copy.deepcopy(assembly.parts)
        return replace(assembly, parts=parts, links=links, evaluation_links=evaluation_links, replica=replica)

    def _with_method(self, assembly: Assembly, method: Method) -> Assembly:
        order = self.engine.ordered(method)
        make_executor = self.engine.executor_maker(order)
        stages = {
            k: self.make_stage(
                k,
                self.K,
                assembly.parts[k - 1],
                method=order,
                loss=self.loss if k == self.K or method.feedback == "local" else None,
                output=assembly.outputs[k - 1],
                replica=assembly.replica,
                replicas=self.engine.replicas,
            )
            for k in self.engine.here
        }
        workers = [
            Worker(
                stage,
                order,
                assembly.links[k],
                executor=make_executor(stage),
                barrier=self.engine.barrier,
                window_sum=self.engine.window_sum(k, assembly.replica),
                norm_exchange=self.engine.norm_exchange(k, assembly.replica),
                compression=Compression(self.messages),
                interleaves=self.engine.interleaves,
            )
            for k, stage in stages.items()
        ]
        return replace(assembly, method=method, stages=stages, workers=workers)

    def _correctors(self, stages: dict[int, Stage]) -> list[str]:
        """The correctors of all stages, as text."""
        if not self.method.correctors:
            return ["none"] * self.K
        here = [correctors_as_text(self.method, k, self.K, stage.optimization.optimizer) for k, stage in stages.items()]
        return list(chain.from_iterable(self.engine.exchange(here)))[: self.K]

    def _agree_on_cuts(self, cuts: Sequence[int | str] | None, sample: Any) -> cutting.Partition:
        """The stages by the first process's cuts, or its refusal in all of them, so that none is left waiting.

        Where the model was traced on the sample, the others trace it on the same one.
        """
        made: cutting.Partition | None = None

        def decide() -> dict[str, Any]:
            nonlocal made
            made = self.cut.partition(sample, cuts=cuts)
            self._check_ties(made)
            traced_on = {"sample": pytree.tree_map_only(Tensor, Tensor.cpu, sample)} if made.trace == "sample" else {}
            return {"cuts": made.cuts, "trace": made.trace, "costs": list(made.costs), **traced_on}

        decision = result_of(self.engine.share(attempted(decide) if self.engine.leads else None, 1))
        if made is None:
            sample = pytree.tree_map_only(Tensor, lambda x: x.to(present(self.device)), decision.get("sample"))
            made = self.cut.partition(sample, cuts=list(decision["cuts"]), trace=decision["trace"])
            made = replace(made, costs=tuple(decision["costs"]))
        return made

    def _check_ties(self, made: cutting.Partition) -> None:
        """Refuse shared parameters where no gradients come back to their stage."""
        for tie in made.ties:
            if tie.shared and self.method.feedback != "above":
                (owner, own), (other, name) = sorted(tie.names.items())[:2]
                raise UserError(
                    f"{own} of stage {owner} is {name} of stage {other}, whose gradients {self.method.name} does not "
                    'send back: give tied="copies", or a method with gradients from above, such as adl'
                )

    def _check_same_model(self) -> None:
        names = [f"{name} {list(tensor.shape)}" for name, tensor in _named_tensors(self.model)]
        first = self.engine.share(names, 1)
        for here, there in zip([*names, "nothing"], [*first, "nothing"], strict=False):
            if here != there:
                raise UserError(
                    f"this process built {here} where the first has {there}: build the same model in all processes"
                )

    def _outputs(self, parts: list[nn.Module], sample: Any) -> list[Any]:
        """Shape of one sample's output of every stage, and the number of classes, found by the first process."""
        find = partial(shapes_and_classes, self.model, parts, sample, self.device, self.method.name)
        found = result_of(self.engine.share(attempted(find) if self.engine.leads else None, 1))
        return [(tuple(shape), found["classes"]) for shape in found["shapes"]]

    def _connect(self, entrance: Link) -> tuple[dict[int, Links], dict[int, Link | None]]:
        """Links of the stages of this process, and those of evaluation. A training link holds at most the batches in
        flight of its sender, and one mark after each."""
        up: dict[int, Link | None] = {0: entrance, self.K: None}
        down: dict[int, Link | None] = {0: None, self.K: None}
        evaluation: dict[int, Link | None] = {}
        free = self.method.feedback == "local"  # no gradient comes back, so only a full link stops the lower stage
        for k in range(1, self.K):
            held = max(method.held(k, self.K) for method in self.method.phases)
            capacity = 2 * (held + LESSON) + (8 * self.K if self.method.order else 0)
            up[k] = self.engine.link("activations", k, k + 1, capacity=capacity, patient=free)
            sent = self.method.sends(Backward(0), k + 1, self.K) is not None
            down[k] = self.engine.link("gradients", k + 1, k, capacity=capacity) if sent else None
            evaluation[k] = self.engine.link("evaluate", k, k + 1, capacity=4, patient=True)
        links = {}
        for k in self.engine.here:
            inputs = up[k - 1]
            assert inputs is not None
            links[k] = Links(inputs, outputs=up[k], gradients=down[k], feedback=down[k - 1])
        return links, evaluation


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()

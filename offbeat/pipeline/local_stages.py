"""The stages of this process: made with the first batch, run one local iteration at a time, and drained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from offbeat import partitioning as cutting
from offbeat.core.links import Message
from offbeat.core.links.local import Entrance
from offbeat.core.stage import Stage
from offbeat.core.worker import SAVE, Worker
from offbeat.errors import NotFinite, UserError, stage_name
from offbeat.method import Method
from offbeat.pipeline import batches, checkpoints, loading, state_trees
from offbeat.pipeline.assembly import Assembler, Assembly
from offbeat.pipeline.callback_states import CallbackStates
from offbeat.pipeline.choice import MethodChoice
from offbeat.pipeline.guard import Guard
from offbeat.pipeline.model_state import ModelState
from offbeat.pipeline.observation import Observation

if TYPE_CHECKING:
    from offbeat.pipeline.training_loop import TrainingLoop

Given = list[tuple[Any, Any]]  # a batch (x, y) for each replica of this process


class LocalStages:
    """What the parts of a pipeline share: how stages are made, the stages once they are, and how far they are.

    assembly      the cut model with its stages; None until the first batch makes them
    batches       t of the next batch
    epoch_start   an epoch, and the number of its first batch
    found         a checkpoint to load once there are stages
    start_named   whether a warning has named a long synchronous start, if there is one
    loop          during a call of fit that has callbacks in some process
    """

    def __init__(self, assembler: Assembler, choice: MethodChoice, *, batch: int | None) -> None:
        """batch: samples per update of a replica, if they are given."""
        self.assembler, self.choice, self.batch = assembler, choice, batch
        self.given_cuts = assembler.cut.cuts
        self.engine, self.device, self.precision = assembler.engine, assembler.device, assembler.precision
        self.model, self.loss = assembler.model, assembler.loss
        self.K, self.replicas = self.engine.K, self.engine.replicas
        self.entrance = Entrance()
        self.guard = Guard(self.engine, self.precision)
        self.observation = Observation(self.engine, choice.method, self.device)
        self.model_state = ModelState(whole=len(self.engine.here) == self.K)
        self.assembly: Assembly | None = None
        self.batches = 0
        self.epoch_start = (0, 0)
        self.found: checkpoints.Found | None = None
        self.start_named = False
        self.loop: TrainingLoop | None = None
        self.callback_states = CallbackStates()

    @property
    def method(self) -> Method:
        return self.choice.method

    @property
    def cuts(self) -> list[int] | None:
        return self.assembly.cuts if self.assembly else None

    @property
    def first(self) -> bool:
        return 1 in self.engine.here

    @property
    def last(self) -> bool:
        return self.K in self.engine.here

    @property
    def stages(self) -> dict[int, Stage]:
        return self.assembly.stages if self.assembly else {}

    @property
    def workers(self) -> list[Worker]:
        return self.assembly.workers if self.assembly else []

    @property
    def all_workers(self) -> list[Worker]:
        return self.assembly.all_workers if self.assembly else []

    @property
    def all_stages(self) -> list[Stage]:
        return [worker.stage for worker in self.all_workers]

    # ---- made with the first batch

    @property
    def needs_batch(self) -> bool:
        """Whether the stages cannot be made without a sample."""
        return self.choice.measures or self.method.head is not None or self.assembler.cut.needs_batch

    def assembled(self, sample: Any) -> Assembly:
        """The stages of this process; made with the first batch, where they could not be made before."""
        if self.assembly is None:
            self.choose_method(sample)
            with self.guard():
                self.assembly = self.assembler.assemble(self.given_cuts, sample, self.entrance, batch=self.batches)
                self.observation.begin(self.assembly, self.batches)
            self.load_found()
        return self.assembly

    def choose_method(self, sample: Any) -> None:
        """Method "auto": choose M and the lag, once; the first process measures, on the first batch or `sample`."""
        if self.choice.measures:
            with self.guard():
                made = self.choice.made(self.engine, self.model, sample, device=self.device, precision=self.precision)
                self.set_choice(made)

    def set_choice(self, choice: MethodChoice) -> None:
        self.choice, self.observation.method = choice, choice.method
        self.assembler = replace(self.assembler, method=choice.method)

    def load_found(self) -> None:
        """Load the checkpoint that was found, into stages."""
        found, self.found = self.found, None
        if found is not None:
            with self.guard():
                self.settle()
                checkpoints.restore(self, found)
            self.gather()
            if self.loop:
                self.loop.count_updates()

    def start_at(self, batches: int, *, new: bool = False) -> Assembly:
        """Stages of the method that trains the next batch, after that many batches; `new`: made again, with new
        optimizers and schedulers."""
        self.batches, assembly, method = batches, self.assembled(None), self.method.phase(batches)
        if new or assembly.method != method:
            before, assembly = assembly, self.assembler.with_method(assembly, method)
            for old, made in zip(before.all_workers, assembly.all_workers, strict=True):
                made.stage.keep(old.stage.keeping)
            self.assembly = assembly
            self.observation.change_stages(assembly, batches)
        return assembly

    # ---- batch by batch

    @property
    def iterations_per_call(self) -> int:
        """Local iterations of each batch that the user gives."""
        return 1 if self.batch is None else self.method.M

    def micro_batches(self, x: Any, y: Any) -> Given:
        """The micro-batches of an update, if `batch` is given; otherwise the batch itself."""
        if self.batch is None:
            return [(x, y)]
        if self.assembly is None:
            self.choose_method(cutting.as_dict(x))
        if not self.first or x is None:
            return [(x, y)] * self.method.M
        return loading.split(x, y, M=self.method.M, batch=self.batch, t=self.batches)

    def step(self, given: Given) -> None:
        """A local iteration of every stage, with a batch for each replica of this process."""
        for x, _ in given:
            batches.check_tensors(x, self.batches)
        read = self.loss is not batches.own_loss
        entering = [batches.input_and_target(x, y, target_is_read=read) for x, y in given]
        assembly = self.assembled(entering[0][0])
        assembly.check_trained()
        with self.guard():
            if self.first:
                for replica, each in zip(assembly.replicas, entering, strict=True):
                    batch = self.engine.take(each, self.device)
                    loading.enter(self.batches, *batch, entrance=replica.links[1].inputs, m=self.method.m)
            self._run(assembly, self.batches)
        self.batches += 1
        self.model_state.newest = False
        if self.method.phase(self.batches) != assembly.method:
            self._change_method(assembly)

    def _run(self, assembly: Assembly, t: int) -> None:
        try:
            work = [worker.iteration(t, wait=self.engine.waits) for worker in assembly.all_workers]
            self.observation.run(t, work)
        except NotFinite:
            assembly.settle()  # another stage may have found the cause
            raise
        except KeyboardInterrupt:
            self.guard.failure = f"it was interrupted within batch {t}, which some of its stages have done"
            raise

    def newest_losses(self) -> list[Tensor]:
        """The newest loss of each replica whose last stage is in this process."""
        assembly = self.assembled(None)
        losses = [each.workers[-1].loss for each in assembly.replicas] if self.last else []
        return [self.engine.give(loss) for loss in losses if loss is not None]

    def _change_method(self, before: Assembly) -> None:
        """Continue with the method of the next batch, after a drain; in all processes after the same batch."""
        self.finish()
        with self.guard():
            diagnoses = self.observation.diagnoses
            states = [state_trees.states(one, diagnoses, keep_on=True) for one in before.replicas]
            after = self.start_at(self.batches)
            for old, new, trees in zip(before.replicas, after.replicas, states, strict=True):
                state_trees.hand_over(old, new, diagnoses, trees, self.batches)

    # ---- the end of the batches in flight

    def finish(self) -> None:
        """Finish every batch in flight and the open window."""
        if self.found is not None and self.found.mode != "drained":
            raise UserError(f"drain() before the first batch, which loads {self.found.path}: give sample=")
        with self.guard():
            self.compare_replicas()
            self._compare_processes()
            self.engine.settle()  # a drain is many turns in one
            with self.observation.draining(self.batches):
                if self.loop and self.loop.observes_updates:
                    self._drain_in_turns(self.loop)
                else:
                    self.engine.run([worker.drain(wait=self.engine.waits) for worker in self.all_workers])
                self.settle()
            done = self.engine.exchange([stage.update_index for stage in self.stages.values()])
            for worker in self.all_workers:
                worker.stage.catch_up(max(chain.from_iterable(done)))

    def _drain_in_turns(self, loop: TrainingLoop) -> None:
        """Drain one local iteration at a time, in each of which a stage makes at most one update."""
        loop.after_turn()
        for turn in zip_longest(*(worker.draining(wait=self.engine.waits) for worker in self.all_workers)):
            self.engine.run([iteration for iteration in turn if iteration is not None])
            loop.after_turn()

    def compare_replicas(self) -> None:
        """Raise where another replica has had other batches, instead of waiting for it without end."""
        for worker in self.workers:
            if worker.window_sum is not None:
                worker.window_sum.end(worker.stage.window, batches=self.batches)

    def _compare_processes(self) -> None:
        """Raise where the process of another stage has had other batches, instead of waiting for it without end."""
        first, *others = self.engine.exchange(self.batches)
        for rank, there in enumerate(others, start=1):
            if there != first:
                names = [stage_name(each, self.K, self.replicas) for each in (0, rank)]
                raise UserError(
                    f"drain() after {first} batches in the process of {names[0]}, but after {there} in that of "
                    f"{names[1]}: call step() equally often in every process"
                )

    def settle(self) -> None:
        """Wait for all work of the stages, if there are any."""
        if self.assembly is not None:
            with self.guard():
                self.assembly.settle()

    def complete_updates(self) -> None:
        """Complete updates of this process that wait for the gradients of other replicas (see core/worker.py)."""
        if any(worker.under_way for worker in self.workers):
            with self.guard():
                self.engine.settle()

    def gather(self) -> nn.Module:
        """The model with the newest weights of all stages, in every process."""
        if self.assembly is not None:
            with self.guard():
                self.assembly.settle()
                self.assembly.share_weights()
                self.observation.share_staleness(self.assembly)
        self.model_state.newest = True
        return self.model

    # ---- the state between batches

    def mark(self, batches: int, *, stop: str) -> None:
        """Have all stages save after that many batches, from the first process."""
        if len(self.workers) == self.K:
            for worker in self.assembled(None).all_workers:
                worker.marks[batches] = stop
                worker.stage.keep()
        else:
            self.entrance.send(Message(batches, stop, SAVE))

    def states(self, *, keep_on: bool) -> dict[int, Any]:
        """The state of each stage of this process, in all of its replicas."""
        if self.assembly is None:
            return {}
        pipelined = [worker for worker in self.all_workers if worker.method.pipelined]
        if pipelined:
            with self.guard():
                self.engine.run([worker.catch_up(wait=self.engine.waits) for worker in pipelined])
        self.settle()
        return state_trees.states_of_replicas(self.assembly, self.observation.diagnoses, keep_on=keep_on)

    def load_states(self, trees: Mapping[int, Any], batches: int) -> None:
        """Continue from states that were saved after that many batches."""
        if self.assembly is None:
            raise UserError("load_stage_states() before there are stages, which the first batch makes: give sample=")
        self.check_drained("load_stage_states")
        with self.guard():
            self.assembly.settle()
            for replica in self.start_at(batches).replicas:
                state_trees.load(replica, self.observation.diagnoses, trees, batches)

    def check_drained(self, call: str) -> None:
        """Refuse a call that would lose batches in flight."""
        if any(stage.in_flight for stage in self.stages.values()):
            raise UserError(f"{call}() with batches in flight: call drain() before, or load into a new pipeline")

    def begin_observing(self) -> None:
        """Begin what was requested, if there are stages."""
        if self.assembly is not None:
            with self.guard():
                self.observation.begin(self.assembly, self.batches)

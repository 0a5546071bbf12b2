"""What a pipeline shows of itself: read-only properties, most of them of the stages of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from offbeat.core.stage import Stage
from offbeat.core.stage_report import Staleness
from offbeat.core.worker import Worker
from offbeat.method import Method
from offbeat.observe.tracing import Tracing
from offbeat.pipeline.local_stages import LocalStages
from offbeat.pipeline.summary import summary
from offbeat.recommended import Recommendation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PipelineView:
    """The properties of `Pipeline`, which has the calls.

    >>> import torch
    >>> from offbeat import Pipeline
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> pipe = Pipeline(layers, K=2, method="adl", M=2, loss=torch.nn.functional.mse_loss, cuts=[1],
    ...                 optimizer=torch.optim.SGD)
    >>> pipe.fit([(torch.ones(4, 2), torch.zeros(4, 1))] * 6, epochs=2)
    >>> pipe.method.name, pipe.recommendation, pipe.cuts, len(pipe.parts), pipe.notes
    ('adl', None, [1], 2, [])
    >>> pipe.replica, pipe.leads, pipe.first, pipe.last, pipe.mesh  # one process has all stages
    (0, True, True, True, None)
    >>> list(pipe.stages), len(pipe.workers), len(pipe.all_stages)
    ([1, 2], 2, 2)
    >>> pipe.model is layers, pipe.batches, pipe.epoch_start
    (True, 12, (2, 12))
    >>> [stage.mean for stage in pipe.staleness], pipe.marks, pipe.tracing, pipe.trace_requested
    ([1.0, 0.0], {}, None, False)
    """

    _local: LocalStages

    # ---- the method and the cut model

    @property
    def method(self) -> Method:
        """The method that trains; of "auto", the one that was chosen, once it is."""
        return self._local.method

    @property
    def recommendation(self) -> Recommendation | None:
        """What method "auto" chose, with its measurements (in the process of the first stage); None otherwise."""
        return self._local.choice.recommendation

    @property
    def cuts(self) -> list[int] | None:
        """Where the model is cut; None until it is."""
        return self._local.cuts

    @property
    def parts(self) -> list[nn.Module]:
        """The part of the model of every stage; empty until the model is cut."""
        return self._local.assembly.parts if self._local.assembly else []

    @property
    def notes(self) -> list[str]:
        """What could not be traced, and so stays one unit."""
        return self._local.assembly.notes if self._local.assembly else []

    @property
    def correctors(self) -> list[str]:
        """The correctors of every stage, as text; empty until the model is cut.

        >>> import torch
        >>> from offbeat import Pipeline
        >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> pipe = Pipeline(layers, K=2, method="adl:M=2,corrector=auto", loss=torch.nn.functional.mse_loss, cuts=[1],
        ...                 optimizer=torch.optim.Adam)
        >>> pipe.correctors
        ['lookahead:least=1+sc', 'none']
        """
        return self._local.assembly.correctors if self._local.assembly else []

    def __repr__(self) -> str:
        """Method, stages, balance, engine, and the staleness of every stage, in updates; printed by `print(pipe)`.

        Balance is the mean work of the stages divided by the largest. It is known where the pipeline chose the cuts.

        >>> import torch
        >>> from offbeat import Pipeline
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> pipe = Pipeline(layers, K=2, M=2, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD,
        ...                 sample=torch.ones(1, 4))
        >>> print(pipe)
        Pipeline(method=adl, K=2, M=2, engine=simulate, balance=1.00)
          stage 1: 40 parameters, 50 % of the work, staleness 1, corrector none
          stage 2: 40 parameters, 50 % of the work, staleness 0, corrector none
        """
        return summary(self._local)

    # ---- this process

    @property
    def replica(self) -> int:
        """The replica of this process, from 0; 0 where one process has all of them."""
        return self._local.engine.replicas_here[0]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a torch DeviceMesh, the one given or one of the pipeline's own; None in one process.

        `pipe.mesh["stage"].get_group()` has the stages of this replica, `pipe.mesh["replica"]` the replicas of this
        stage. To read it for the first time is collective. The pipeline does not use its groups, and leaves them open.
        """
        return self._local.engine.mesh

    @property
    def leads(self) -> bool:
        """Whether this process decides for all: it holds the first stage of replica 0."""
        return self._local.engine.leads

    @property
    def first(self) -> bool:
        """Whether this process holds the first stage (of its replica), where batches enter."""
        return self._local.first

    @property
    def last(self) -> bool:
        """Whether this process holds the last stage, where the loss is."""
        return self._local.last

    @property
    def stages(self) -> dict[int, Stage]:
        """The stages of this process, by k; empty until the model is cut."""
        return self._local.stages

    @property
    def workers(self) -> list[Worker]:
        """What runs the stages of this process, in the same order."""
        return self._local.workers

    @property
    def all_stages(self) -> list[Stage]:
        """The stages of all replicas of this process."""
        return self._local.all_stages

    # ---- how far it is

    @property
    def model(self) -> nn.Module:
        """The model, with the newest weights of the stages of this process.

        The weights of stages in other processes are as of the last `drain`, `gather` or `load`; reading an outdated
        model warns once (`offbeat.ModelOutdated`).
        """
        self._local.model_state.check()
        self._local.complete_updates()
        return self._local.model

    @property
    def batches(self) -> int:
        """The number of the next batch."""
        return self._local.batches

    @property
    def epoch_start(self) -> tuple[int, int]:
        """An epoch, and the number of its first batch."""
        return self._local.epoch_start

    @property
    def marks(self) -> dict[int, str]:
        """After which batches the first stage asked this process to save, and the reason to stop there, or ""."""
        return self.workers[-1].marks

    @property
    def staleness(self) -> list[Staleness]:
        """Measured staleness of every stage, counted from when it is full.

        In several processes the stages elsewhere are as of the last drain, gather or evaluate.
        """
        self._local.complete_updates()
        return self._local.observation.staleness(self._local.assembly)

    @property
    def tracing(self) -> Tracing | None:
        """The trace that is being recorded or collected, if any."""
        return self._local.observation.tracing

    @property
    def trace_requested(self) -> bool:
        """Whether a trace has yet to begin: before the first batch, or in the warm-up of the staleness."""
        return self._local.observation.trace_requested

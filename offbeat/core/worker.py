"""The loop: runs the program of one stage over its links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from offbeat.core.clipping import NormExchange
from offbeat.core.compression import Compression
from offbeat.core.links import Link, Message
from offbeat.core.replicas import WindowSum
from offbeat.core.stage import Stage
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.ops import Backward, Barrier, Drop, Forward, Iteration, Operation, Program, Take, Teach, Update

SAVE = "save"  # the kind of a mark that asks for a checkpoint


class Actor(Protocol):
    """Who does a stage's operations: the stage itself, its recordings (graphs/recorded_stage.py), or an observer of
    these (observe/tracing.py, observe/diagnosis.py)."""

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any: ...

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]: ...

    def update(self, over: int) -> None: ...

    def teach(self, t: int, gradients: list[Tensor | None]) -> None: ...


@dataclass
class Links:
    """The four directions of a stage; None where there is no neighbour."""

    inputs: Link  # activations (or batches) from below
    outputs: Link | None = None  # activations to the stage above
    gradients: Link | None = None  # from the stage above
    feedback: Link | None = None  # gradients to the stage below


class Worker:
    """Runs one stage. Results depend on the order of its program alone, never on when messages arrive.

    executor    who executes the stage's operations: by default the stage
    actor       whom the operations are given to: the executor, or an observer of it
    loss        of the newest batch, at the last stage
    marks       batches after which to save -> the reason to stop there, or an empty text
    compression of the messages to the neighbours; plain: whether they are sent as they are
    window_sum  adds the windows of all replicas of the stage, where there are several
    norm_exchange
                brings the norms of all stages together, where the gradient is clipped by the norm of the model
    interleaves whether generators yield after each operation, so that other stages can continue in between
    under_way   an update whose sum over the replicas is under way. It is completed where something first needs it: a
                forward on the new version, a backward on the parameters themselves, the next update, the end of a
                drain, or a caller, by `complete_update`
    """

    def __init__(
        self,
        stage: Stage,
        method: Method,
        links: Links,
        *,
        executor: Actor | None = None,
        barrier: Callable[[], None] = lambda: None,
        compression: Compression | None = None,
        window_sum: WindowSum | None = None,
        norm_exchange: NormExchange | None = None,
        interleaves: bool = True,
    ) -> None:
        self.stage, self.method, self.links, self.barrier, self.window_sum = stage, method, links, barrier, window_sum
        self.interleaves = interleaves
        self.executor: Actor = executor or stage
        self.actor = self.executor
        self.compression = compression or Compression()
        self.clipping = stage.optimization.clipping
        self.plain = self.compression.messages == "exact" and not self.clipping.carried
        self.norm_exchange = norm_exchange if self.clipping.exchanged else None
        self.under_way: Update | None = None
        self.request = 0  # what a replica has sent with the window of the last update
        self.loss: Tensor | None = None
        self.marks: dict[int, str] = {}
        acts: dict[Operation, Callable[[Any, Link | None], None]] = {
            Forward(0): self._forward,
            Backward(0): self._backward,
            Update(1): self._update,
            Barrier(): self._barrier,
            Teach(0): self._teach,
            Take(0): self._take,
            Drop(0): self._drop,
        }
        self._acts = {type(operation): (act, self._side(operation)) for operation, act in acts.items()}
        self._restart()

    def _restart(self) -> None:
        self.feed: deque[int | None] = deque()  # batches as they become known; None makes the program drain
        batches: Iterator[int] = iter(self.feed.popleft, None)
        self.program: Program = self.method.program(self.stage.k, self.stage.K, batches)
        self.buffer: dict[int, Any] = {}  # batches taken ahead, to draw from
        self.empty: set[int] = set()  # micro-batches without samples
        self.entered: list[int] = []  # first and next batch of this program
        unused = self.method.unused(self.stage.k, self.stage.K)
        self.sent: deque[Message] = deque(maxlen=unused)  # gradients that the stage below has not used yet
        self.stage.restart()

    def iteration(self, t: int, *, wait: bool) -> Iterator[bool]:
        """The local iteration that batch t starts; yields True after each operation, if the worker interleaves.

        With wait=False it yields False instead of waiting for a message that has not arrived.
        """
        return self._perform(self._enter(t), wait=wait)

    def _enter(self, t: int) -> Iteration:
        self.feed.append(t)
        if not self.entered:
            self.entered = [t, t]
        self.entered[1] = t + 1
        return next(self.program)

    def newest(self) -> int:
        """The newest batch that has entered, which counts the local iterations."""
        return self.entered[1] - 1

    def save(self) -> dict[str, Any]:
        """The position in the program, the gradients that the stage below has not used, and the buffer; where messages
        are compressed, the state of the compression."""
        compressed = self.compression.messages != "exact"
        return {
            "entered": list(self.entered),
            "messages": [[message.t, message.content] for message in self.sent],
            "buffer": [[t, list(content)] for t, content in self.buffer.items()],
            **({"compression": self.compression.save()} if compressed else {}),
            **({"clipping": self.clipping.save()} if self.clipping.carried else {}),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from what was saved: the program at its position, the messages sent again."""
        for t in range(*saved["entered"]) if saved["entered"] else ():  # none right after a drain
            self._enter(t)
        self.buffer = {t: tuple(content) for t, content in saved["buffer"]}
        self.compression.load(saved.get("compression"), self.stage.network.device, drained=not saved["entered"])
        if self.clipping.carried and "clipping" in saved:
            self.clipping.load(saved["clipping"])
        for t, content in saved["messages"]:
            self._feed_back(Message(t, content))

    def _feed_back(self, message: Message) -> None:
        if self.links.feedback:
            self.links.feedback.send(message)
            self.sent.append(message)

    def catch_up(self, *, wait: bool) -> Iterator[bool]:
        """Run the backwards of a pipelined window before their turn, in which they are then left out: the state is that
        of one batch after the other, with gradients in the window instead of batches in flight."""
        yield from self._perform(tuple(map(Backward, self.stage.in_flight)), wait=wait)

    def drain(self, *, wait: bool) -> Iterator[bool]:
        """The rest of the program when no further batch will enter; the next iteration starts a new program."""
        for iteration in self.draining(wait=wait):
            yield from iteration

    def draining(self, *, wait: bool) -> Iterator[Iterator[bool]]:
        """`drain`, one local iteration at a time; each is run before the next is taken."""
        self.feed.append(None)
        for iteration in self.program:
            yield self._perform(iteration, wait=wait)
        self.complete_update()
        self._publish_request()
        self._restart()

    def _perform(self, iteration: Iteration, *, wait: bool) -> Iterator[bool]:
        launcher = self.stage.launcher
        if self.method.pipelined:
            done = {Backward(t) for t in self.stage.window.batches}  # by catch_up
            iteration = tuple(operation for operation in iteration if operation not in done)
        for operation in iteration:
            act, side = self._acts[type(operation)]
            if self.buffer and type(operation) is Forward and operation.buffered:
                side = None  # its input has been received before
            source = getattr(self.links, side) if side else None
            while source is not None and not wait and not source.ready():
                launcher.pause()
                yield False
            if self.window_sum is not None and type(operation) is Update:
                yield from self._add_replicas(self.window_sum, operation, wait=wait)
                if self.under_way is not None:
                    yield True
                    continue
            if self.norm_exchange is not None and type(operation) is Update:
                yield from self._exchange_norms(self.norm_exchange, operation.over, wait=wait)
            act(operation, source)
            if self.interleaves:
                yield True
        launcher.end_turn()

    # ---- updates of several replicas

    def _add_replicas(self, window_sum: WindowSum, operation: Update, *, wait: bool) -> Iterator[bool]:
        """Replace the gradients of the window by their sum over all replicas of the stage, or begin to do so."""
        self.complete_update()
        self._publish_request()
        stage, launcher = self.stage, self.stage.launcher
        launcher.flush()
        window_sum.start(stage.window, update=stage.update_index, over=operation.over, unit=stage.batch_weights.unit)
        if window_sum.overlaps and not self.clipping.over_model:  # whose norms go with the next message
            self.under_way, window_sum.complete = operation, self.complete_update
            return
        while not wait and not window_sum.ready():
            launcher.pause()
            yield False
        self.request = window_sum.finish(stage.window)

    def complete_update(self) -> None:
        """Complete the update that is under way, if there is one: before its weights or figures are read."""
        operation, window_sum = self.under_way, self.window_sum
        if operation is None:
            return
        assert window_sum is not None
        self.under_way = window_sum.complete = None
        with self.stage.window_under_way():
            self.request = window_sum.finish(self.stage.window)
            self._update(operation, None)

    def _publish_request(self) -> None:
        """What a replica has requested with the last window is known from here on: after the same operation in all
        replicas, where callers may have completed the update at different times."""
        if self.window_sum is not None:
            self.window_sum.requested = self.request or self.window_sum.requested
            self.request = 0

    def forget_requests(self) -> None:
        """Forget what replicas have requested, at the end of a training loop."""
        self.complete_update()
        if self.window_sum is not None:
            self.request = self.window_sum.request = self.window_sum.requested = 0

    def _exchange_norms(self, norm_exchange: NormExchange, over: int, *, wait: bool) -> Iterator[bool]:
        """Bring the norms of all stages together, before an update of a method without lag."""
        stage = self.stage
        stage.launcher.flush()
        norm_exchange.start(stage.optimization.norms(stage.window, over * self._replicas()))
        while not wait and not norm_exchange.ready():
            stage.launcher.pause()
            yield False
        self.clipping.exchange(norm_exchange.finish())

    def _replicas(self) -> int:
        return 1 if self.window_sum is None else self.window_sum.replicas

    def _side(self, operation: Operation) -> str | None:
        """The name of the link from which operations of this kind receive."""
        source = self.method.receives(operation, self.stage.k, self.stage.K)
        if source is None:
            return None
        return "gradients" if source > self.stage.k else "inputs"

    def _receive(self, operation: Forward | Backward | Take | Teach, source: Link | None) -> Any:
        if source is None:
            return None
        message = source.receive()
        while message.kind == SAVE and source is self.links.inputs:
            self._mark(message)
            message = source.receive()
        if message.kind != "batch" or message.t != operation.t:
            raise UserError(
                f"stage {self.stage.k} is at {operation} but was sent {message.kind} {message.t}: "
                "call step() and drain() equally often in every process"
            )
        content = message.content
        if self.plain or (source is self.links.inputs and self.stage.k == 1):  # a batch is not encoded
            return content
        if self.clipping.carried:
            content, norms = content
            self.clipping.learn(norms)
        return self.compression.received(content)

    def _with_norms(self, content: Any) -> Any:
        """What is sent to a neighbour: with the norms that are known, where these are carried by messages."""
        return (content, self.clipping.table()) if self.clipping.carried else content

    def ahead(self) -> Message:
        """The next message from below, left in place; marks before it that ask for a checkpoint are handled."""
        while (message := self.links.inputs.peek()).kind == SAVE:
            self._mark(self.links.inputs.receive())
        return message

    def _mark(self, message: Message) -> None:
        """A checkpoint is wanted after `message.t` batches: prepare for it, and pass the mark on."""
        if self.entered and message.t < self.entered[1]:
            raise UserError(f"stage {self.stage.k} was asked too late to save after {message.t} batches")
        self.marks[message.t] = str(message.content)
        self.stage.keep()
        if self.links.outputs:
            self.links.outputs.send(message)

    def _update(self, operation: Update, source: Link | None) -> None:
        self.actor.update(operation.over * self._replicas())

    def _barrier(self, operation: Barrier, source: Link | None) -> None:
        self.barrier()

    def _teach(self, operation: Teach, source: Link | None) -> None:
        self.actor.teach(operation.t, self._receive(operation, source))

    def _take(self, operation: Take, source: Link | None) -> None:
        self.buffer[operation.t] = self._receive(operation, source)

    def _drop(self, operation: Drop, source: Link | None) -> None:
        del self.buffer[operation.t]

    def _forward(self, operation: Forward, source: Link | None) -> None:
        t = operation.t
        x, target, share = self.buffer[t] if source is None else self._receive(operation, source)
        if self.under_way is not None and self.stage.weights.needs_next():
            self.complete_update()
        if self.window_sum is not None and self.method.forward == "newest":
            self._publish_request()
        if share:
            output = self.actor.forward(t, x, target, share)
        else:  # more micro-batches than samples: nothing to compute, but the stages above expect a message
            output = None
            self.empty.add(t)
        if self.links.outputs:
            content: Any = output, target, share
            if not self.plain:
                content = self._with_norms((self.compression.activations(output), target, share))
            self.links.outputs.send(Message(t, content))
        elif output is not None:
            part = output if share == 1 else share * output
            self.loss = part if self.loss is None or t % self.method.m == 0 else self.loss + part

    def _backward(self, operation: Backward, source: Link | None) -> None:
        t = operation.t
        incoming = self._receive(operation, source)
        if self.under_way is not None and not self.stage.open_next_window():
            self.complete_update()
        if t in self.empty:
            self.empty.remove(t)
            gradients = None
        else:
            gradients = self.actor.backward(t, incoming)
        content = gradients if self.plain else self._with_norms(self.compression.gradients(gradients))
        self._feed_back(Message(t, content))

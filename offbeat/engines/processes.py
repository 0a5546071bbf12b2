"""Engine `processes`: one stage per process, on torch.distributed.

On GPUs each process uses the GPU of its local rank (round robin where there are fewer), and records its stage as engine
`streams` does. Where each process has its own GPU, activations and gradients are sent from device to device
(core/links/device.py), otherwise through host memory.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.call_stack import calling_function
from offbeat.core.clipping import NormExchange
from offbeat.core.links import LOOPBACK_INTERFACE, Link, Message, network
from offbeat.core.links.device import Carrier, DeviceReceiver, DeviceSender
from offbeat.core.links.distributed import STOPPED, Receiver, Sender, cause
from offbeat.core.links.heartbeat import Heartbeat
from offbeat.core.links.wire import LIMIT, MalformedMessage, pack, unpack
from offbeat.core.replica_group import GroupWindowSum
from offbeat.core.replicas import WindowSum
from offbeat.engines import MakeExecutor, eager
from offbeat.engines.calls import Calls
from offbeat.engines.devices import agreed, present
from offbeat.engines.failures import Failures
from offbeat.engines.meshes import make_mesh
from offbeat.engines.stage_streams import StageStream, many_queues
from offbeat.errors import FolderTaken, StageLost, UserError, first_line, named, stage_name
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.method import Method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CHANNELS = ("activations", "gradients", "evaluate", "report", "checkpoint", "heartbeat", "abort", "trace", "training")
JOINING = timedelta(minutes=10)  # for all processes to join
PARTING = 5.0  # seconds to wait for the last messages of neighbours
BROKEN_PARTING = 1.0  # after a failure, when connections may be closed: for the reason to reach the others
PATIENCE = timedelta(days=365)  # of threads that wait for the next message: an idle link is no failure
TIMEOUT = 600.0  # seconds that a call waits for other processes
LOOK = timedelta(seconds=0.5)  # between two looks whether a wait has been ended
GRACE = 0.5  # seconds until others hear of a failure, the cause of which some of them are about to report
SILENCE = 30.0  # seconds without a sign of life from a neighbour


def available() -> int:
    """Processes in the group that torchrun started (or that the user joined); 1 where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def own_device(device: torch.device) -> torch.device:
    """The device of this process: the GPU of its local rank, unless one was named by its index."""
    if device.type != "cuda":
        return device
    present(device)
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    own = torch.device("cuda", local if device.index is None else device.index)
    torch.cuda.set_device(own)  # also for work outside of the stages
    return own


def silence_allowed(silence: float | None) -> float:
    """Seconds that a neighbour may be silent: as given, by OFFBEAT_SILENCE, or 30; `inf`: without limit."""
    return seconds_of(os.environ.get("OFFBEAT_SILENCE", SILENCE) if silence is None else silence, "silence")


def seconds_of(given: Any, name: str) -> float:
    """A limit in seconds.

    >>> seconds_of("7.5", "timeout"), seconds_of("inf", "timeout")
    (7.5, inf)
    """
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds > 0:
        raise UserError(f"{name}={given!r}: use a number of seconds above 0, or math.inf for no limit")
    return seconds


class Processes:
    """Stage k of replica r runs in the process of rank r K + k-1.

    A neighbour that dies is noticed at once, one that is frozen or cut off after `silence` seconds (see
    `silence_allowed`); then every wait of this process ends, and the next call raises. Where all processes are alive
    and a call has waited for others for `timeout` seconds, all of them raise CallTimeout.
    """

    waits = True
    interleaves = False
    on_one_device = False
    defers = False  # recorded work is launched at once, since the neighbours wait for it

    def __init__(
        self,
        K: int,
        *,
        replicas: int = 1,
        silence: float | None = None,
        timeout: float = TIMEOUT,
        device: torch.device | None = None,
        recorded: bool | None = None,
        payloads: str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """recorded: whether the operations of the stage are, by default on a GPU; payloads: the backend that sends
        tensors from device to device, by default NCCL where every process has its own GPU; mesh: of all processes, see
        meshes.py."""
        self.silence, self.timeout = silence_allowed(silence), seconds_of(timeout, "timeout")
        device = device or torch.device("cpu")
        many_queues(device)
        self.device = own_device(device)
        self.recorded = self.device.type == "cuda" if recorded is None else recorded
        self.stage_stream = StageStream(self.device)
        size = K * replicas
        if available() != size:
            copies = f" of {replicas} replicas" if replicas > 1 else ""
            raise UserError(
                f"{K} stage{'s' * (K > 1)}{copies} but {available()} process{'es' * (available() > 1)}: start with "
                f"torchrun --nproc-per-node {size}, or use engine='simulate'"
            )
        opened = network.descriptors()
        self.joined = not dist.is_initialized()
        if self.joined:
            join(size)
        self.K, self.replicas, self._mesh = K, replicas, mesh
        self.rank = dist.get_rank()
        self.here: Sequence[int] = [self.rank % K + 1]
        self.replicas_here: Sequence[int] = [self.rank // K]
        self.patience = min(PATIENCE, timedelta(seconds=min(self.timeout, PATIENCE.total_seconds())))
        self.aborted = False  # whether this process ended its own waits
        self.failed = False  # whether it has reported a failure of its own
        self.collectives = dist.new_group(backend="gloo", timeout=self.patience)
        self.messages = dist.new_group(backend="gloo", timeout=PATIENCE)
        beats = dist.new_group(backend="gloo", timeout=PATIENCE)  # which must not wait for a long message to be sent
        self.waited_in = [self.messages, beats, self.collectives]
        self.groups = [*self.waited_in]  # made here
        self.stage_group = self._make_stage_group()
        self.sum: GroupWindowSum | None = None
        if self.stage_group is not None:
            self.sum = GroupWindowSum(self.stage_group, replicas, collective=self._collective, wait=self._wait)
        self.links: list[Sender | Receiver] = []
        name = self.collectives.group_name  # each pipeline of a process has its own reports
        store = dist.PrefixStore(f"offbeat/{name}", dist.distributed_c10d._get_default_store())
        self.calls = Calls(self.rank, [self._name(rank) for rank in range(size)], store, timeout=self.timeout)
        self.failures = Failures(self.rank, self._name, store, lambda: self.links, self.calls)
        self.open = True
        self.carriers = self._carriers(payloads or self._payloads())
        network.shorten_retransmission(network.descriptors() - opened, self.silence)
        neighbours = {self._rank(k) for k in (self.here[0] - 1, self.here[0] + 1) if 1 <= k <= K}
        neighbours |= {rank for rank in (self.rank - K, self.rank + K) if 0 <= rank < size}
        self.heartbeat = Heartbeat(
            neighbours if math.isfinite(self.silence) else (),
            lambda rank: self._tag("heartbeat", min(rank, self.rank)),
            beats,
            silence=self.silence,
            silent=self._on_silence,
            broken=self._on_break,
        )
        atexit.register(self._end)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        if self._mesh is None:
            with self.guard():
                self.barrier()  # names the calls of all processes, where some do not read it
                self._mesh = make_mesh(self.device.type, self.K, self.replicas)
        return self._mesh

    def _rank(self, k: int) -> int:
        """The process of stage k in this replica."""
        return self.replicas_here[0] * self.K + k - 1

    def _name(self, rank: int) -> str:
        """The stage of a process, for errors."""
        return stage_name(rank, self.K, self.replicas)

    def _make_stage_group(self) -> dist.ProcessGroup | None:
        """The group of the replicas of this stage; all processes make all groups, in the order of the stages."""
        if self.replicas == 1:
            return None
        for k in range(1, self.K + 1):
            ranks = range(k - 1, self.K * self.replicas, self.K)
            group = dist.new_group(list(ranks), backend="gloo", timeout=self.patience)
            if self.rank in ranks:
                own = group
        self.groups.append(own)
        return own

    def window_sum(self, k: int, replica: int) -> WindowSum | None:
        return self.sum

    def norm_exchange(self, k: int, replica: int) -> NormExchange:
        return ProcessNormExchange(self)

    def _tag(self, channel: str, lower: int) -> int:
        return 2 * (CHANNELS.index(channel) * (self.K * self.replicas + 1) + lower)

    def link(
        self,
        channel: str,
        source: int,
        target: int,
        *,
        capacity: int,
        patient: bool = False,
        from_replica: int | None = None,
    ) -> Link | None:
        replica = self.replicas_here[0]
        from_rank = (replica if from_replica is None else from_replica) * self.K + source - 1
        to_rank = (replica if from_replica is None else 0) * self.K + target - 1
        lower = min(source, target)
        tag, carrier = self._tag(channel, lower), self.carriers.get((channel, lower))
        link: Sender | Receiver
        if from_rank == self.rank:
            sender = Sender if carrier is None else partial(DeviceSender, carrier=carrier)
            lost = self.failures.error_of_link(to_rank)
            link = sender(to_rank, tag, self.messages, capacity=capacity, patient=patient, lost=lost)
        elif to_rank == self.rank:
            receiver = Receiver if carrier is None else partial(DeviceReceiver, carrier=carrier)
            lost = self.failures.error_of_link(from_rank)
            link = receiver(from_rank, tag, self.messages, capacity=capacity, lost=lost)
        else:
            return None
        link.timeout = self.timeout
        self.links.append(link)
        return link

    def _payloads(self) -> str | None:
        """NCCL, if every process has its own GPU and can send from it, and OFFBEAT_PAYLOADS=host is set in none."""
        able = self.device.type == "cuda" and dist.is_nccl_available() and os.environ.get("OFFBEAT_PAYLOADS") != "host"
        mine = str(torch.cuda.get_device_properties(self.device).uuid) if able else ""
        there = [one[0] for one in self.exchange([mine])]
        return "nccl" if all(there) and len(set(there)) == len(there) else None

    def _carriers(self, backend: str | None) -> dict[tuple[str, int], Carrier]:
        """This process's ends of the links between devices, by channel and lower stage; all make all groups."""
        found = {}
        pairs = [(r, lower) for r in range(self.replicas) for lower in range(1, self.K)] if backend else []
        for replica, lower in pairs:
            ranks = [replica * self.K + lower - 1, replica * self.K + lower]
            for channel in ("activations", "gradients"):
                group = dist.new_group(ranks, backend=backend, timeout=PATIENCE)
                if self.rank in ranks:
                    self.groups.append(group)
                    found[channel, lower] = Carrier(sum(ranks) - self.rank, group, self.device)
        return found

    def run(self, work: list[Iterator[bool]]) -> None:
        with self.stage_stream.between():
            for generator in work:
                for _ in generator:
                    pass

    def device_for(self, given: torch.device | None) -> torch.device:
        return agreed(given, self.device)

    def ordered(self, method: Method) -> Method:
        return method

    def executor_maker(self, method: Method) -> MakeExecutor:
        """Recordings, where stages are to be recorded and the method's operations can be; else the stage itself."""
        if not self.recorded or method.why_not_capturable() is not None:
            return eager
        return partial(RecordedStage, launch_queue=LaunchQueue(), replicas=self.replicas)

    def take(self, batch: Any, device: torch.device) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), batch)

    def give(self, loss: Tensor) -> Tensor:
        return loss.detach().clone()  # of a recorded stage it is in a slot, which is used again

    def share(self, value: Any, source: int) -> Any:
        return self._broadcast(value, source - 1, calling_function())

    def _broadcast(self, value: Any, rank: int, function: str) -> Any:
        """The value of one process, in all of them, which must be in the same function of the package."""
        sends = rank == self.rank
        buffer = torch.empty(0, dtype=torch.uint8)
        with self._collective():
            if sends:
                buffer = pack(Message(0, [str(self.calls), value], kind=function))
            length = torch.tensor([buffer.numel()])
            self._wait(dist.broadcast(length, rank, group=self.collectives, async_op=True))
            if not 0 < int(length) <= LIMIT:
                raise MalformedMessage(f"malformed message: {int(length)} bytes announced")
            if not sends:
                buffer = torch.empty(int(length), dtype=torch.uint8)
            self._wait(dist.broadcast(buffer, rank, group=self.collectives, async_op=True))
            if sends:
                return value
            received = unpack(buffer)
            call, value = received.content
            if received.kind != function:
                error = self.failures.calls_differ(rank, call)
                self._end_all_waits(str(error))
                raise error
        return value

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in alike])
            with self._collective():
                self._wait(dist.broadcast(flat, source - 1, group=self.collectives, async_op=True))
            if source - 1 != self.rank:
                for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def exchange(self, value: Any) -> list[Any]:
        function = calling_function()
        return [self._broadcast(value, rank, function) for rank in range(self.K * self.replicas)]

    def barrier(self) -> None:
        with self._collective():
            self._wait(dist.barrier(group=self.collectives, async_op=True))

    def stage_context(self) -> AbstractContextManager[object]:
        return self.stage_stream.between()

    def settle(self) -> None:
        with self.stage_stream.between():
            if self.sum is not None and self.sum.complete is not None:
                self.sum.complete()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """When this process fails, report the reason to the others and close the links, whatever its user does next."""
        try:
            with self.calls:
                yield
        except Exception as error:
            reason = str(error)
            if not isinstance(error, StageLost | FolderTaken):  # which all processes know of
                reason = self.failures.first_report(f"{self._name(self.rank)} failed: {named(error)}")
            for link in self.links:
                link.close(reason)
            if self.sum is not None:
                self.sum.complete = None  # it has lost what it would complete
            self._fail_sums()
            self._fail_collectives()
            raise

    @contextmanager
    def _collective(self) -> Iterator[None]:
        with self.calls:
            try:
                yield
            except RuntimeError as error:
                if "imed out" in str(error) and not self.aborted:
                    raise self.failures.timed_out() from error
                time.sleep(2 * GRACE)  # a neighbour of the lost stage knows the cause, and reports it after GRACE
                calls = f" ({self.calls.report()})" if math.isfinite(self.timeout) else ""
                raise self.failures.error(f"another stage is gone: {cause(error)}{calls}") from error

    def _wait(self, work: Any) -> None:
        """Wait for a collective, until this process ends its waits.

        gloo forgets a send that is being written when its connection breaks: nothing but the timeout would end it.
        """
        while not work.is_completed():
            with suppress(RuntimeError):  # not yet, or failed
                work.wait(LOOK)
            if self.aborted and not work.is_completed():
                raise RuntimeError("its connection is closed")
        work.wait()

    def _on_silence(self, rank: int) -> None:
        failures = self.failures
        failures.silent = f"{self._name(rank)} has not answered for {self.silence:g} s{failures.last_message(rank)}"
        failures.silent = failures.first_report(failures.silent)
        self._end_all_waits(failures.silent)

    def _on_break(self, rank: int) -> None:
        time.sleep(GRACE)  # a process that ends may still send the reason on its links
        if self.open:
            report = f"{self._name(rank)} is gone: its process has died{self.failures.last_message(rank)}"
            self._end_all_waits(self.failures.first_report(report))

    def _end_all_waits(self, reason: str) -> None:
        """Make every thread of this process that waits for another process raise.

        A receive that times out makes gloo fail everything else that waits in its group and close the connections,
        which the other processes notice.
        """
        self.aborted = True
        for link in list(self.links):
            link.failure = link.failure or reason
        for group in self.waited_in:
            self._fail_waits(group)
        self._fail_sums()
        for carrier in self.carriers.values():
            carrier.abort()

    def _fail_sums(self) -> None:
        """Make the other replicas of this stage raise, which wait for its gradients."""
        if self.stage_group is not None:
            self._fail_waits(self.stage_group)

    def _fail_collectives(self) -> None:
        """Make the processes raise that wait for this one in a collective, after those that raise the same by
        themselves."""
        if not self.failed and not self.aborted:
            self.failed = True
            time.sleep(GRACE)
            self._fail_waits(self.collectives)

    def _fail_waits(self, group: dist.ProcessGroup) -> None:
        """Close the connections of this process in a group: by a receive that times out, from any process whose
        connection is open, since one that is closed fails at once and leaves the others open."""
        for other in set(dist.get_process_group_ranks(group)) - {self.rank}:
            with suppress(RuntimeError, ValueError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8), other, group, self._tag("abort", 0))
                assert work is not None
                work.wait(timedelta(milliseconds=1))

    def _end(self) -> None:
        """Close at the end of the process; an exception that ends it is reported to the others."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, Exception):
            self.close()
            return
        with suppress(Exception), self.guard():
            raise error
        with suppress(Exception):  # which follow from the one that was printed
            self.close()

    def close(self) -> None:
        """Send a last message on every link and wait for those of the neighbours.

        A thread that is still inside gloo when the interpreter ends would abort the process as it wakes up.
        """
        atexit.unregister(self._end)
        last = self.calls.call
        try:
            with self.guard():
                self.settle()
        finally:
            self.calls.call = last  # the one before, which tells the others more
            self._leave()

    def _leave(self) -> None:
        links, self.links = self.links, []
        for link in links:
            link.close(f"{STOPPED}, after {self.calls.call}" if self.calls.call else "")
        self.calls.close(publish=self.failures.store_answers)
        self.heartbeat.close()
        threads = [*(link.thread for link in links), *self.heartbeat.threads, *self.calls.threads]
        threads += self.sum.threads if self.sum is not None else []
        broken = self.failed or self.aborted
        seconds = BROKEN_PARTING if broken else PARTING
        join_all(threads, seconds)
        if any(thread.is_alive() for thread in threads):  # of a process that waits, or works, for longer
            for group in self.waited_in:
                self._fail_waits(group)
            join_all(threads, seconds)
        if not self.open or not dist.is_initialized():
            return
        self.open = False
        if any(link.thread.is_alive() for link in links):  # NCCL would wait for the other end, which may have ended
            for carrier in self.carriers.values():
                carrier.abort()
        if broken:
            keep_until_exit(self.groups)
            return
        for group in self.groups:
            dist.destroy_process_group(group)
        if self.joined:
            dist.destroy_process_group()


def keep_until_exit(groups: Iterable[dist.ProcessGroup]) -> None:
    """Never destroy these groups, also when the interpreter ends: that waits for sends which gloo has forgotten."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def join_all(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait until all threads have ended, but at most that long."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class ProcessNormExchange:
    """The stages of all processes, see NormExchange; all replicas of a stage have the same gradients."""

    def __init__(self, engine: Processes) -> None:
        self.engine = engine
        self.norms: list[float] = []

    def start(self, norms: list[float]) -> None:
        self.norms = norms

    def ready(self) -> bool:
        return False

    def finish(self) -> list[list[float]]:
        return self.engine.exchange(self.norms)[: self.engine.K]


def join(K: int) -> None:
    """Join the process group that the environment of torchrun (or of the launcher) describes."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if alone and sys.platform in LOOPBACK_INTERFACE:
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE[sys.platform]
        )  # one machine: no other interface is needed
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=JOINING))
        store = dist.PrefixStore(
            f"offbeat/{store.add(f'offbeat/groups/{rank}', 1)}", store
        )  # groups may follow each other
        trial = None if alone else network.connect(store, rank, K, patience=JOINING)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=K, timeout=JOINING)
        del trial
    except RuntimeError as error:
        raise StageLost(f"the {K} processes did not find each other: {first_line(error)}") from error

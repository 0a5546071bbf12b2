"""Engine `processes`: one stage a process, on torch.distributed.

On GPUs each process takes that of its local rank (round robin where there are fewer), and records its stage as engine
`streams` does. Where each has a GPU of its own, activations and gradients go from one to the other
(core/links/device.py), else through host memory.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.links import LOOPBACK_INTERFACE, Link, Message, network
from offbeat.core.links.device import Carrier, DeviceReceiver, DeviceSender
from offbeat.core.links.distributed import Receiver, Sender, cause
from offbeat.core.links.heartbeat import Heartbeat
from offbeat.core.links.wire import LIMIT, MalformedMessage, pack, unpack
from offbeat.engines.stage_streams import StageStream, many_queues
from offbeat.errors import FolderTaken, StageLost, StageSilent, UserError, first_line
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.method import Method

CHANNELS = ("activations", "gradients", "evaluate", "report", "checkpoint", "heartbeat", "abort", "trace")
JOINING = timedelta(minutes=10)  # for all processes to come
PARTING = 5.0  # seconds to wait for goodbyes
PATIENCE = timedelta(days=365)  # an idle link is no failure: death closes a connection, and heartbeats tell of silence
SILENCE = 30.0  # seconds without a sign of life from a neighbour
STORE_SECONDS = 2.0  # for the store to answer, which may be beyond a link that is cut


def available() -> int:
    """Processes in the group that torchrun started (or that the user joined); 1 where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def own_device(device: torch.device) -> torch.device:
    """The device of this process: of several GPUs that of its local rank, if none was named."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"device {device}, but torch sees no CUDA device here: use cpu")
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    own = torch.device("cuda", local if device.index is None else device.index)
    torch.cuda.set_device(own)  # also for what is done beside the stages
    return own


def silence_allowed(silence: float | None) -> float:
    """Seconds that a neighbour may be silent: as given, by OFFBEAT_SILENCE, or 30; `inf` for ever."""
    given = os.environ.get("OFFBEAT_SILENCE", SILENCE) if silence is None else silence
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise UserError(f"silence={given}: use a number of seconds above 0, or inf for no limit")
    return seconds


class Processes:
    """Stage k lives in the process of rank k-1.

    A neighbour that dies is noticed at once, one that is frozen or cut off after `silence` seconds (see
    `silence_allowed`); then every wait of this process ends, and the next call raises.
    """

    waits = True
    records = False

    def __init__(
        self,
        K: int,
        *,
        silence: float | None = None,
        device: torch.device | None = None,
        recorded: bool | None = None,
        payloads: str | None = None,
    ) -> None:
        """recorded: whether the stage is, which by default it is on a GPU; payloads: the backend by which tensors go
        from device to device, by default NCCL where every process has a GPU of its own."""
        self.silence = silence_allowed(silence)
        device = device or torch.device("cpu")
        many_queues(device)
        self.device = own_device(device)
        self.recorded = self.device.type == "cuda" if recorded is None else recorded
        self.stage_stream = StageStream(self.device)
        if available() != K:
            raise UserError(
                f"{K} stage{'s' * (K > 1)} but {available()} process{'es' * (available() > 1)}: start with "
                f"torchrun --nproc-per-node {K}, or use the engine simulate"
            )
        opened = network.descriptors()
        self.joined = not dist.is_initialized()
        if self.joined:
            join(K)
        self.K = K
        self.rank = dist.get_rank()
        self.here: Sequence[int] = [self.rank + 1]
        self.collectives = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.messages = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.groups = [self.messages, self.collectives]  # that are ours
        self.store = dist.distributed_c10d._get_default_store()
        self.store_answers = True
        self.links: list[Sender | Receiver] = []
        self.silent: str | None = None  # what was told of a neighbour that does not answer
        self.open = True
        self.carriers = self._carriers(payloads or self._payloads())
        network.shorten_retransmission(network.descriptors() - opened, self.silence)
        neighbours = {rank for rank in (self.rank - 1, self.rank + 1) if 0 <= rank < K}
        self.heartbeat = Heartbeat(
            neighbours if math.isfinite(self.silence) else (),
            lambda rank: self._tag("heartbeat", min(rank, self.rank)),
            self.messages,
            silence=self.silence,
            silent=self._on_silence,
            broken=self._on_break,
        )
        atexit.register(self.close)

    def _tag(self, channel: str, lower: int) -> int:
        return 2 * (CHANNELS.index(channel) * (self.K + 1) + lower)

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        lower = min(source, target)
        tag, carrier = self._tag(channel, lower), self.carriers.get((channel, lower))
        link: Sender | Receiver
        if source - 1 == self.rank:
            sender = Sender if carrier is None else partial(DeviceSender, carrier=carrier)
            lost = self._lost(target)
            link = sender(target - 1, tag, self.messages, capacity=capacity, patient=patient, lost=lost)
        elif target - 1 == self.rank:
            receiver = Receiver if carrier is None else partial(DeviceReceiver, carrier=carrier)
            link = receiver(source - 1, tag, self.messages, capacity=capacity, lost=self._lost(source))
        else:
            return None
        self.links.append(link)
        return link

    def _payloads(self) -> str | None:
        """NCCL, if no two processes share a GPU, all have one that they can send from, and OFFBEAT_PAYLOADS is not host
        in any of them."""
        able = self.device.type == "cuda" and dist.is_nccl_available() and os.environ.get("OFFBEAT_PAYLOADS") != "host"
        mine = str(torch.cuda.get_device_properties(self.device).uuid) if able else ""
        there = [one[0] for one in self.exchange([mine])]
        return "nccl" if all(there) and len(set(there)) == self.K else None

    def _carriers(self, backend: str | None) -> dict[tuple[str, int], Carrier]:
        """This process's ends of the ways of payloads, by channel and lower stage; all processes make all groups."""
        found = {}
        for lower in range(1, self.K) if backend else ():
            for channel in ("activations", "gradients"):
                group = dist.new_group([lower - 1, lower], backend=backend, timeout=PATIENCE)
                if self.rank in (lower - 1, lower):
                    self.groups.append(group)
                    found[channel, lower] = Carrier(2 * lower - 1 - self.rank, group, self.device)
        return found

    def run(self, work: list[Iterator[bool]]) -> None:
        with self.stage_stream.between():
            for generator in work:
                for _ in generator:
                    pass

    def make_launch_queue(self, method: Method) -> LaunchQueue | None:
        """Whatever is asked for is launched at once, since the neighbours wait for it."""
        if not self.recorded or method.why_not_capturable() is not None:
            return None
        return LaunchQueue()

    def share(self, value: Any, source: int) -> Any:
        sends = source - 1 == self.rank
        buffer = pack(Message(0, value)) if sends else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([buffer.numel()])
        with self._collective():
            dist.broadcast(length, source - 1, group=self.collectives)
            if not 0 < int(length) <= LIMIT:
                raise MalformedMessage(f"malformed message: {int(length)} bytes announced")
            if not sends:
                buffer = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(buffer, source - 1, group=self.collectives)
        return value if sends else unpack(buffer).content

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in alike])
            with self._collective():
                dist.broadcast(flat, source - 1, group=self.collectives)
            if source - 1 != self.rank:
                for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def exchange(self, value: Any) -> list[Any]:
        return [self.share(value, source) for source in range(1, self.K + 1)]

    def barrier(self) -> None:
        with self._collective():
            dist.barrier(group=self.collectives)

    def beside(self, k: int) -> AbstractContextManager[object]:
        return self.stage_stream.between()

    def settle(self) -> None:
        with self.stage_stream.between():
            pass

    @contextmanager
    def guard(self) -> Iterator[None]:
        """When this process fails, leave word for the others and part from them, whatever its user does next."""
        try:
            yield
        except Exception as error:
            word = str(error)
            if not isinstance(error, StageLost | FolderTaken):  # of which all have heard
                word = self._first_story(f"stage {self.rank + 1} failed: {first_line(error)}")
            for link in self.links:
                link.close(word)
            raise

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            time.sleep(0.5)  # a neighbour of the lost one knows more and is about to say so
            raise self._loss(f"another stage is gone: {cause(error)}") from error

    def _lost(self, stage: int) -> Callable[[str], StageLost]:
        def loss(reason: str) -> StageLost:
            why = "it no longer heard this stage" if self._is_about_this_stage(reason) else reason
            return self._loss(f"stage {stage} is gone: {why}{self._heard_of(stage - 1)}")

        return loss

    def _is_about_this_stage(self, story: str) -> bool:
        """Whether another process reports the loss of this one, whose own report must be another."""
        me = f"stage {self.rank + 1}"
        return story.startswith((f"{me} has not answered", f"{me} is gone"))

    def _heard_of(self, rank: int) -> str:
        """Where a process was, as far as its messages tell."""
        heard = [link.last_batch for link in self.links if isinstance(link, Receiver) and link.from_rank == rank]
        batches = [t for t in heard if t is not None]
        return f" (its last message was of batch {max(batches)})" if batches else ""

    def _loss(self, story: str) -> StageLost:
        """The error for a stage that is lost; the first story is the cause, later ones are consequences."""
        return StageSilent(self.silent) if self.silent else StageLost(self._first_story(story))

    def _first_story(self, story: str) -> str:
        """What the first process to notice told, if the store can be asked and it is not that this stage is lost."""
        answer: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # gone with its process
                answer.append(self.store.compare_set("offbeat/failed", "", story).decode())

        if self.store_answers:
            asking = threading.Thread(target=ask, name="offbeat-store", daemon=True)
            asking.start()
            asking.join(STORE_SECONDS)
            self.store_answers = bool(answer)
        first = answer[0] if answer else ""
        return story if self._is_about_this_stage(first) else first or story

    def _on_silence(self, rank: int) -> None:
        story = f"stage {rank + 1} has not answered for {self.silence:g} s{self._heard_of(rank)}"
        self.silent = story
        self.silent = self._first_story(story)
        self._end_all_waits(self.silent)

    def _on_break(self, rank: int) -> None:
        time.sleep(0.5)  # the one that ends may have more to say of it on its links
        if self.open:
            story = f"stage {rank + 1} is gone: its process has died{self._heard_of(rank)}"
            self._end_all_waits(self._first_story(story))

    def _end_all_waits(self, reason: str) -> None:
        """Make every thread of this process that waits for another process raise.

        A receive that times out makes gloo fail whatever else waits in its group, and close the connections, which the
        other processes notice.
        """
        for link in list(self.links):
            link.failure = link.failure or reason
        other = 1 if self.rank == 0 else 0
        for group in (self.messages, self.collectives):
            with suppress(RuntimeError, ValueError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8), other, group, self._tag("abort", 0))
                assert work is not None
                work.wait(timedelta(milliseconds=1))
        for carrier in self.carriers.values():
            carrier.abort()

    def close(self) -> None:
        """Say goodbye on every link and wait for the neighbours' goodbyes.

        A thread that gloo still holds when the interpreter ends would abort the process as it wakes up.
        """
        atexit.unregister(self.close)
        links, self.links = self.links, []
        for link in links:
            link.close()
        self.heartbeat.close()
        deadline = time.monotonic() + PARTING
        for thread in [*(link.thread for link in links), *self.heartbeat.threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self.open or not dist.is_initialized():
            return
        self.open = False
        if any(link.thread.is_alive() for link in links):  # NCCL would wait for the other end, which may be gone
            for carrier in self.carriers.values():
                carrier.abort()
        for group in self.groups:
            dist.destroy_process_group(group)
        if self.joined:
            dist.destroy_process_group()


def join(K: int) -> None:
    """Join the group that torchrun (or the launcher) has described."""
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if alone and sys.platform in LOOPBACK_INTERFACE:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE[sys.platform])  # one machine: nothing leaves it
    try:
        store, rank, _ = next(dist.rendezvous("env://", timeout=JOINING))
        store = dist.PrefixStore(f"offbeat/{store.add(f'offbeat/groups/{rank}', 1)}", store)  # one may follow another
        trial = None if alone else network.connect(store, rank, K, patience=JOINING)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=K, timeout=JOINING)
        del trial
    except RuntimeError as error:
        raise StageLost(f"the {K} processes did not find each other: {first_line(error)}") from error

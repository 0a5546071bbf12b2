"""Engine `processes`: one stage a process, on torch.distributed."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import StageLost, UserError, first_line
from offbeat.links import Link, Message
from offbeat.links.distributed import Receiver, Sender
from offbeat.links.wire import pack, unpack

CHANNELS = ("activations", "gradients", "evaluate", "report")
PARTING = 5.0  # seconds to wait for goodbyes
PATIENCE = timedelta(days=365)  # an idle link is no failure; a dead process closes its connections at once


def available() -> int:
    """Processes in the group that torchrun started (or that the user joined); 1 where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


class Processes:
    """Stage k lives in the process of rank k-1."""

    waits = True

    def __init__(self, K: int) -> None:
        if available() != K:
            raise UserError(
                f"{K} stage{'s' * (K > 1)} but {available()} process{'es' * (available() > 1)}: start with "
                f"torchrun --nproc-per-node {K}, or use the engine simulate"
            )
        self.joined = not dist.is_initialized()
        if self.joined:
            dist.init_process_group("gloo", timeout=PATIENCE)
        self.K = K
        self.rank = dist.get_rank()
        self.here: Sequence[int] = [self.rank + 1]
        self.collectives = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.messages = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.store = dist.distributed_c10d._get_default_store()
        self.links: list[Sender | Receiver] = []
        self.open = True
        atexit.register(self.close)

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        tag = 2 * (CHANNELS.index(channel) * self.K + min(source, target))
        link: Sender | Receiver
        if source - 1 == self.rank:
            lost = self._lost(target)
            link = Sender(target - 1, tag, self.messages, capacity=capacity, patient=patient, lost=lost)
        elif target - 1 == self.rank:
            link = Receiver(source - 1, tag, self.messages, capacity=capacity, lost=self._lost(source))
        else:
            return None
        self.links.append(link)
        return link

    def run(self, work: list[Iterator[bool]]) -> None:
        for generator in work:
            for _ in generator:
                pass

    def share(self, value: Any, source: int) -> Any:
        sends = source - 1 == self.rank
        buffer = pack(Message(0, value)) if sends else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([buffer.numel()])
        with self._collective():
            dist.broadcast(length, source - 1, group=self.collectives)
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

    @contextmanager
    def guard(self) -> Iterator[None]:
        """When this process fails, leave word for the others and part from them, whatever its user does next."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, StageLost):
                self._first_story(f"stage {self.rank + 1} failed: {first_line(error)}")
            for link in self.links:
                link.close()
            raise

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            time.sleep(0.5)  # a neighbour of the lost one knows more and is about to say so
            raise StageLost(self._first_story(f"another stage is gone: {first_line(error)}")) from error

    def _lost(self, stage: int) -> Callable[[str], StageLost]:
        return lambda reason: StageLost(self._first_story(f"stage {stage} is gone: {reason}"))

    def _first_story(self, story: str) -> str:
        """What the first process to notice told; later ones see only the consequences."""
        try:
            return self.store.compare_set("offbeat/failed", "", story).decode() or story
        except RuntimeError:  # the store is gone with its process
            return story

    def close(self) -> None:
        """Say goodbye on every link and wait for the neighbours' goodbyes.

        A thread that gloo still holds when the interpreter ends would abort the process as it wakes up.
        """
        atexit.unregister(self.close)
        links, self.links = self.links, []
        for link in links:
            link.close()
        deadline = time.monotonic() + PARTING
        for link in links:
            link.thread.join(max(0.0, deadline - time.monotonic()))
        if not self.open or not dist.is_initialized():
            return
        self.open = False
        for group in (self.messages, self.collectives):
            dist.destroy_process_group(group)
        if self.joined:
            dist.destroy_process_group()

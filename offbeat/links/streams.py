"""Links between stages that run on streams of one GPU: tensors stay where they are, events say when they are ready."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.links import Message
from offbeat.links.local import Entrance


class Later(Tensor):
    """A tensor that a stream is still making: whatever is done with it first waits for that."""

    event: torch.cuda.Event

    @classmethod
    def of(cls, tensor: Tensor) -> Later:
        """What the current stream is making."""
        later = tensor.as_subclass(cls)
        later.event = torch.cuda.Event()
        later.event.record(torch.cuda.current_stream(tensor.device))
        return later

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in pytree.tree_leaves((arguments, options)):
                if isinstance(leaf, Later):
                    here = torch.cuda.current_stream(leaf.device)
                    here.wait_event(leaf.event)
                    leaf.record_stream(here)
            return function(*arguments, **(options or {}))


class News:
    """What is known of messages on the way: when they are ready, and which were read by work that is not done yet."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.event: torch.cuda.Event | None = None  # recorded once the stage that is at work has launched it
        self.stream: torch.cuda.Stream | None = None  # of that stage
        self.waited: dict[torch.cuda.Event, torch.cuda.Stream] = {}  # which stream waits for it in this turn anyway
        self.read: list[Any] = []

    def ready(self) -> torch.cuda.Event | None:
        """For a message that is sent now; outside of any stage it is the caller's, whose stream has it ready."""
        if not self.on_gpu or self.event is not None:
            return self.event
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def taken(self) -> list[Any]:
        """What was read since this was last asked: its memory is not to be used again before that work is done."""
        read, self.read = self.read, []
        return read


class StreamLink(Entrance):
    """The receiver's stream waits until the sender's has done what the message is made of.

    It holds no copy: the sender leaves the memory alone until the receiver has read it (see engines/streams.py).
    """

    def __init__(self, news: News) -> None:
        super().__init__()
        self.news = news
        self.events: deque[torch.cuda.Event | None] = deque()  # of the messages under way, in order

    def send(self, message: Message) -> None:
        self.events.append(self.news.ready())
        super().send(message)

    def receive(self) -> Message:
        message, event = super().receive(), self.events.popleft()
        if event is not None:
            if self.news.waited.get(event) is not self.news.stream:
                event.wait(self.news.stream)
            self.news.read.append(message.content)
        return message

    def close(self) -> None:
        super().close()
        self.events.clear()

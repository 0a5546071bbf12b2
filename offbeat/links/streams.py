"""Links between stages that run on streams of one GPU: tensors stay where they are, events say when they are ready."""

from __future__ import annotations

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


class StreamLink(Entrance):
    """The receiver's stream waits until the sender's has done what the message is made of.

    It holds no copy: the sender leaves the memory alone until the receiver has read it (see engines/streams.py).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.on_gpu = device, device.type == "cuda"
        self.ready_events: list[torch.cuda.Event] = []  # of the messages under way, in order
        self.spare: list[torch.cuda.Event] = []

    def send(self, message: Message) -> None:
        if self.on_gpu:
            event = self.spare.pop() if self.spare else torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            self.ready_events.append(event)
        super().send(message)

    def receive(self) -> Message:
        message = super().receive()
        if self.on_gpu:
            event = self.ready_events.pop(0)
            here = torch.cuda.current_stream(self.device)
            here.wait_event(event)
            self.spare.append(event)
            for leaf in pytree.tree_leaves(message.content):
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    leaf.record_stream(here)  # its memory is not given to others before this stream is through with it
        return message

"""The rendezvous of worker processes on one machine: a store in the launcher that listens on loopback only.

The rendezvous of torch binds its store to every address of the machine, also for an endpoint such as 127.0.0.1, unless
it gets a socket that is already bound. The store is in the launcher, so that the report of a failed stage outlives the
stage. Each start of the group has a new store.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "offbeat-loopback"
LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


class Loopback(RendezvousHandler):
    """A group of one node: complete at once, and no other node can join."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store: Store | None = None

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True  # workers connect to this store and open none of their own

    def next_rendezvous(self) -> RendezvousInfo:
        self.store, port = loopback_store()
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self.store = None
        return True


def loopback_store() -> tuple[Store, int]:
    """A store that listens on the loopback address, and its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            None,
            True,
            TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.fileno(),
            use_libuv=False,  # libuv takes no open socket in torch 2.6
        )
        listener.detach()  # the store closes it
    return store, port


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


def register() -> str:
    """Register it with the launcher of torch; returns its name."""
    rendezvous_handler_registry.register(NAME, create)
    return NAME

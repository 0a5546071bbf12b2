"""Where the workers of one machine meet: a store in the launcher that listens on the loopback address alone.

torch's own rendezvous binds its store to every address of the machine, also for an endpoint such as 127.0.0.1. A
socket that is bound already leaves it no choice. The store is the launcher's, so what a stage tells about a failure
outlives the stage; each start of the group gets a new one, so that nothing is left of the one before.
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
    """A group of one node: it is complete at once, and no other can join."""

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
            use_libuv=False,  # which takes no open socket in torch 2.6
        )
        listener.detach()  # the store closes it
    return store, port


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


def register() -> str:
    """Make it known to torch's launcher; returns the name to ask for."""
    rendezvous_handler_registry.register(NAME, create)
    return NAME

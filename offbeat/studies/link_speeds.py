"""Published speeds of links, by which the clock predicts what cannot be measured on one machine."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.studies.plan import LinkCost


@dataclass(frozen=True)
class PublishedLink:
    """A link one way: latency in seconds and bandwidth in bytes per second, and where the bandwidth is published.

    Makers publish bandwidths; latencies are the order of magnitude of a message between two processes.
    """

    cost: LinkCost
    source: str


PUBLISHED = {
    "NVLink": PublishedLink(
        LinkCost(5e-6, 450e9), "NVIDIA H100 data sheet: fourth-generation NVLink, 900 GB/s in both directions together"
    ),
    "InfiniBand": PublishedLink(LinkCost(5e-6, 50e9), "NVIDIA ConnectX-7 data sheet: NDR, 400 Gbit/s"),
    "10 GbE": PublishedLink(
        LinkCost(5e-5, 1.17e9),
        "IEEE 802.3ae: 10 Gbit/s, less the headers of Ethernet, IP and TCP in frames of 1500 bytes",
    ),
    "WAN": PublishedLink(
        LinkCost(5e-2, 12.5e6), "100 Mbit/s and 50 ms one way: assumed, a line between two continents"
    ),
}
LINKS = {"no cost": LinkCost(0.0, float("inf")), **{name: link.cost for name, link in PUBLISHED.items()}}

"""Trainings that clip by the norm over all stages; as a script under torchrun it writes their final weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from callback_cases import data, hexed, pipeline

import offbeat

NORM = 0.3
CASES: dict[str, dict[str, Any]] = {
    "bp": {"method": offbeat.BP(M=2)},
    "gpipe": {"method": offbeat.GPipe(m=2)},
    "adl": {"method": offbeat.ADL(M=2)},
    "hybrid": {"method": offbeat.ADL(M=1, weights="hybrid")},
    "2bw": {"method": offbeat.TwoBW(M=4)},
    "warmed-up": {"method": offbeat.ADL(M=2), "staleness_warmup": 2},
    "int8": {"method": offbeat.ADL(M=2), "messages": "int8"},
    "replicas": {"method": offbeat.ADL(M=2), "K": 2, "replicas": 2},
    "bp-replicas": {"method": offbeat.BP(M=2), "K": 2, "replicas": 2},
}


def trained(name: str, **options: Any) -> dict[str, str]:
    pipe = pipeline(M=None, clip_norm=NORM, clip_over="model", **{**CASES[name], **options})
    pipe.fit(data(13))
    pipe.close()
    return hexed(pipe.model.state_dict())


def main(out: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    fits = [name for name, case in CASES.items() if case.get("K", 3) * case.get("replicas", 1) == size]
    found = {name: trained(name) for name in fits}
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Golden hashes: the bits of small runs of every method, engine, precision and kind of checkpoint.

    python benchmarks/golden.py --out golden.json      run all cases and write their hashes
    python benchmarks/golden.py --check golden.json    run them again; one line per difference, then exit code 1
    python benchmarks/golden.py --list                 print the names of the cases

For each case: the SHA-256 of the final weights, of the losses and of the checkpoints. A change that must not alter
numerics leaves all of them as they are. Hashes depend on the CPU and on the version of torch, so compare two commits on
one machine. It uses `offbeat.Pipeline`, `python -m offbeat train` and the files of run folders alone, so that the same
script runs on both commits, however the package is organised; recorded stages on a CPU run as tests/captured.py
emulates them. Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
METHODS = {  # name on the command line -> name in Python
    "bp": "BP",
    "gpipe": "GPipe",
    "ddg": "DDG",
    "fr": "FR",
    "fdg": "FDG",
    "dsp": "DSP",
    "adl": "ADL",
    "dgl": "DGL",
    "dgl-async": "AsyncDGL",
    "dni": "DNI",
    "mostafa": "Mostafa",
    "pred": "Pred",
    "sim": "Sim",
    "predsim": "PredSim",
    "asgd": "ASGD",
    "dc-asgd": "DCASGD",
    "pipedream": "PipeDream",
    "2bw": "TwoBW",
    "adl-1f1b": "ADL1F1B",
    "pipemare": "PipeMare",
    "spectrain": "SpecTrain",
    "pb": "PB",
    "nag-async": "NAGAsync",
}
WHOLE = ("asgd", "dc-asgd")  # one stage
BATCHES, SAVED = 16, 9  # batches of a run, and after how many of them its state is taken
CUTS = {1: [], 2: [2], 3: [1, 2], 4: [1, 2, 3]}
RECORDED = ("recorded", "streams")
SINCE_REPORT = ("meter", "samples")  # figures of a checkpoint that depend on when somebody last asked for them
Hashes = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One run of a pipeline.

    engine    "simulate", "processes", "streams" (CUDA), or "recorded": streams without a GPU, as the tests emulate it
    drains    batches before which the pipeline is drained
    resumed   whether the state after SAVED batches is loaded into a new pipeline, which then trains the rest
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    K: int = 3
    engine: str = "simulate"
    device: str = "cpu"
    optimizer: str = "sgd"
    drains: tuple[int, ...] = ()
    resumed: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the pipeline


def pipeline_cases() -> dict[str, Case]:
    cases = {f"simulate/{name}": Case(name, K=1 if name in WHOLE else 3) for name in METHODS}

    def add(group: str, name: str, method: str, settings: dict[str, Any] | None = None, **more: Any) -> None:
        cases[f"{group}/{name}"] = Case(method, settings or {}, **more)

    for M, weights in ((1, "stash"), (1, "hybrid"), (2, "hybrid"), (2, "replay"), (3, "replay")):
        add("weights", f"adl-M{M}-{weights}", "adl", {"M": M, "weights": weights})
    add("weights", "ddg-hybrid", "ddg", {"weights": "hybrid", "barrier": False})
    add("weights", "pb-stash", "pb", {"weights": "stash"})
    add("weights", "gpipe-recompute", "gpipe", {"m": 3, "recompute": True})
    add("weights", "2bw-K4-M3", "2bw", {"M": 3}, K=4)
    for M, weights in ((2, "stash"), (3, "stash"), (4, "hybrid")):
        add("aligned", f"adl-M{M}-{weights}", "adl", {"M": M, "window": "aligned", "weights": weights})
    add("aligned", "bp-M3", "bp", {"M": 3, "window": "aligned"})
    for corrector in ("sc", "lwp+sc", "dc", "t1:20", "nag", "shrink"):
        add("corrector", f"adl-{corrector}", "adl", {"M": 2, "corrector": corrector})
    add("corrector", "adl-t2", "adl", {"M": 2, "weights": "hybrid", "corrector": "t2"})
    add("corrector", "2bw-sc", "2bw", {"M": 4, "corrector": "sc"})
    add("corrector", "spectrain-2", "spectrain", {"version": 2})

    bf16: dict[str, Any] = {"options": {"precision": "bf16"}}
    for weights in ("stash", "hybrid", "replay"):
        add("bf16", f"adl-{weights}", "adl", {"M": 2, "weights": weights}, **bf16)
    for name in ("bp", "gpipe", "2bw", "pipemare"):
        add("bf16", name, name, **bf16)

    for name in ("adl", "2bw", "dni", "gpipe", "ddg", "dgl-async", "pipemare", "adl-1f1b"):
        add("resumed", name, name, resumed=True)
    add("resumed", "adl-hybrid", "adl", {"M": 2, "weights": "hybrid"}, resumed=True)
    add("resumed", "adl-replay", "adl", {"M": 2, "weights": "replay"}, resumed=True)
    add("resumed", "adl-aligned-sc", "adl", {"M": 3, "window": "aligned", "corrector": "sc"}, resumed=True)
    add("resumed", "adl-bf16", "adl", {"M": 2}, resumed=True, **bf16)

    for name in ("adl", "2bw", "bp"):
        add("drained", name, name, {"M": 3}, drains=(SAVED, 13))
    add("drained", "adl-aligned", "adl", {"M": 3, "window": "aligned"}, drains=(4, 11))

    add("optimizer", "adl-adamw", "adl", {"M": 2}, optimizer="adamw")
    add("optimizer", "adl-scheduled", "adl", {"M": 2}, optimizer="scheduled", options={"clip_norm": 0.5})
    add("optimizer", "adl-left-out", "adl", {"M": 2}, options={"on_nan": "skip", "left_out": [3, 7]})

    for name, settings in (
        ("adl", {"M": 2}),
        ("adl-1f1b", {"M": 2}),
        ("2bw", {"M": 4}),
        ("bp", {"M": 4}),
        ("fdg", {}),
        ("pipemare", {}),
        ("nag-async", {}),
    ):
        add("recorded", name, name, settings, engine="recorded", optimizer="fused", drains=(13,))
    for name in ("adl", "gpipe", "dni", "dgl-async", "ddg", "2bw", "pipemare", "bp"):
        add("processes-2", name, name, K=2, engine="processes")
    add("processes-2", "adl-bf16", "adl", {"M": 2}, K=2, engine="processes", **bf16)
    aligned = {"M": 3, "window": "aligned"}
    add("processes-2", "adl-aligned-drained", "adl", aligned, K=2, engine="processes", drains=(6,))
    add("processes-2", "adl-resumed", "adl", {"M": 2}, K=2, engine="processes", resumed=True)
    for name in ("adl", "2bw", "adl-1f1b", "fr"):
        add("processes-3", name, name, engine="processes")
    if torch.cuda.is_available():
        for name, settings in (("adl", {"M": 2}), ("adl-1f1b", {"M": 2}), ("2bw", {"M": 4}), ("bp", {"M": 4})):
            for engine in ("simulate", "streams"):
                add(f"cuda-{engine}", name, name, settings, engine=engine, device="cuda", optimizer="fused")
    return cases


SMALL = shlex.split(
    "--model mlp --data synthetic --shape 1,4,4 --samples 128 --batch-size 8 --epochs 2 --warmup 0.5 "
    "--threads-per-stage 1 --checkpoint-every 6b --keep 20 --json"
)
COMMANDS = {  # options of a run; "resumed": of the one that goes on from its second checkpoint
    "train/adl": "-K 2 -M 2 --engine simulate",
    "train/adl/resumed": "",
    "train/adl/resumed-K3": "-K 3",
    "train/hybrid-aligned": "-K 3 -M 3 --engine simulate --weights hybrid --window aligned",
    "train/hybrid-aligned/resumed": "",
    "train/2bw-drained": "--method 2bw -K 2 -M 4 --engine simulate --checkpoint-mode drained",
    "train/2bw-drained/resumed": "",
    "train/bf16-sc": "-K 2 -M 2 --engine simulate --precision bf16 --corrector sc",
    "train/processes": "-K 2 -M 2 --engine processes",
    "train/processes/resumed": "",
}


# ---- hashes


def update(digest: Any, value: Any) -> None:
    """Add a tree of containers, plain values and tensors to a hash: types, order, names, shapes and bits."""
    if isinstance(value, Tensor):
        dense = value.detach().cpu().contiguous()
        digest.update(f"tensor {dense.dtype} {tuple(dense.shape)} ".encode())
        digest.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)} ".encode())
        for key, item in value.items():
            if key not in SINCE_REPORT:
                digest.update(f"{key!r}: ".encode())
                update(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            update(digest, item)
    else:
        digest.update(f"{value.hex() if isinstance(value, float) else value!r} ".encode())


def sha(value: Any) -> str:
    digest = hashlib.sha256()
    update(digest, value)
    return digest.hexdigest()


# ---- runs of a pipeline


def network(dropout: float) -> nn.Sequential:
    def block(wide: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(wide, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())

    torch.manual_seed(0)
    if not dropout:  # random numbers are not recorded
        return nn.Sequential(block(3, 6), block(6, 6), block(6, 6), nn.Sequential(nn.Flatten(), nn.Linear(216, 4)))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, 4))
    return nn.Sequential(block(3, 6), block(6, 6), block(6, 6), head)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [6] * (BATCHES - 1) + [3]  # a short last one
    return [(torch.randn(b, 3, 6, 6, generator=generator), torch.randint(4, (b,), generator=generator)) for b in sizes]


def optimizers(kind: str) -> dict[str, Any]:
    def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-3, **options)

    return {
        "sgd": {"optimizer": sgd},
        "fused": {"optimizer": lambda parameters: sgd(parameters, fused=True)},
        "adamw": {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)},
        "scheduled": {"optimizer": sgd, "scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 2, 0.5)},
    }[kind]


def make(case: Case, engine: Any) -> Any:
    import offbeat

    method = getattr(offbeat, METHODS[case.method])(**case.settings)
    options = {**optimizers(case.optimizer), **case.options}
    model = network(0.0 if case.engine in RECORDED else 0.1)
    return offbeat.Pipeline(
        model,
        case.K,
        method=method,
        loss=nn.functional.cross_entropy,
        cuts=CUTS[case.K],
        sample=batches()[0][0],
        seed=3,
        engine=engine,
        device=case.device,
        **options,
    )


def run_case(case: Case, engine: Any) -> dict[str, Any]:
    """Train; the final weights as a hash, the losses that this process has seen, the states of its stages as hashes."""
    pipe = make(case, engine)
    losses: list[float | None] = []
    states: dict[int, list[str]] = {}

    def save() -> Any:
        state = pipe.stage_states()
        for k, tree in state.items():
            states.setdefault(k, []).append(sha(tree))
        return state

    pipe.keep()
    for t, (x, y) in enumerate(batches()):
        if t in case.drains:
            pipe.drain()
        if t == SAVED:
            state = save()
            if case.resumed:
                pipe.close()
                pipe = make(case, engine)
                pipe.load_stage_states(state, SAVED)
        loss = pipe.step(x, y)
        losses.append(None if loss is None else float(loss))
    weights = sha(dict(pipe.drain().state_dict()))
    save()
    pipe.close()
    return {"weights": weights, "losses": losses, "states": states}


def joined(found: list[dict[str, Any]]) -> Hashes:
    """The hashes of a case from what each of its processes has found."""
    last = min((part["losses"] for part in found), key=lambda losses: losses.count(None))  # where the loss is
    states = {int(k): hashes for part in found for k, hashes in part["states"].items()}
    weights = {part["weights"] for part in found}
    assert len(weights) == 1, f"the processes ended with different weights: {weights}"
    return {"weights": weights.pop(), "losses": sha(last), "checkpoint": sha(dict(sorted(states.items())))}


def emulated(case: Case) -> dict[str, Any]:
    """A case on recorded stages without a GPU."""
    sys.path.insert(0, str(ROOT / "tests"))
    import pytest
    from captured import capture, streams

    with pytest.MonkeyPatch.context() as patch:
        capture(patch, seed=1)
        return run_case(case, streams.Streams(case.K, torch.device("cpu")))


def in_this_process(cases: dict[str, Case]) -> Iterator[tuple[str, Hashes]]:
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    for name, case in cases.items():
        yield name, joined([emulated(case) if case.engine == "recorded" else run_case(case, case.engine)])


def in_processes(cases: dict[str, Case], K: int, folder: Path) -> Iterator[tuple[str, Hashes]]:
    """The cases of K processes, all of them in one group."""
    out = folder / f"processes-{K}"
    out.mkdir()
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(K)]
    command = [*start, __file__, "--stage", str(out)]
    finish(subprocess.run(command, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1")), command)
    parts = [json.loads((out / f"{rank}.json").read_text()) for rank in range(K)]
    for name in cases:
        yield name, joined([part[name] for part in parts])


def stage_process(out: Path) -> None:
    """What one of those processes does."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mine = {name: case for name, case in pipeline_cases().items() if case.engine == "processes" and size == case.K}
    found = {name: run_case(case, case.engine) for name, case in mine.items()}
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# ---- runs of the command line


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def finish(done: subprocess.CompletedProcess[str], command: list[str]) -> None:
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def from_command_line(commands: dict[str, str], folder: Path) -> Iterator[tuple[str, Hashes]]:
    """A run that is named after another goes on from that one's second checkpoint."""
    for name, options in commands.items():
        out = folder / name.replace("/", "-")
        before = name.rpartition("/")[0]
        if before in commands:
            shutil.copytree(folder / before.replace("/", "-"), out)
            for checkpoint in sorted((out / "checkpoints").iterdir())[2:]:
                shutil.rmtree(checkpoint)
            given = ["--resume", str(out), "--epochs", "3", "--json", *options.split()]
        else:
            given = [*SMALL, *options.split(), "--out", str(out)]
        command = [sys.executable, "-m", "offbeat", "train", *given]
        finish(subprocess.run(command, capture_output=True, text=True, env=environment()), command)
        yield name, of_folder(out)


def of_folder(run: Path) -> Hashes:
    """The hashes of a run folder: final weights, losses after each epoch, all checkpoints."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [[line["test_loss"], line["test_error"]] for line in lines if line["kind"] == "epoch"]
    checkpoints = {
        place.name: {
            file.name: json_content(file) if file.suffix == ".json" else tensors(file)
            for file in sorted(place.glob("stage-*"))
        }
        for place in sorted((run / "checkpoints").iterdir())
    }
    weights = tensors(run / "model.safetensors")
    return {"weights": sha(weights), "losses": sha(losses), "checkpoint": sha(checkpoints)}


def json_content(file: Path) -> Any:
    def known(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [
            known(item) for item in value if not (isinstance(item, list) and len(item) == 2 and item[0] in SINCE_REPORT)
        ]

    content = json.loads(file.read_text())
    return {key: known(value) for key, value in content.items()}


def tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(sorted(load_file(file).items()))


# ---- all of them


def everything(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Hashes]]:
    cases = {name: case for name, case in pipeline_cases().items() if wanted(name)}
    commands = {name: options for name, options in COMMANDS.items() if wanted(name)}
    yield from in_this_process({name: case for name, case in cases.items() if case.engine != "processes"})
    with tempfile.TemporaryDirectory(prefix="offbeat-golden-") as folder:
        for K in (2, 3):
            group = {name: case for name, case in cases.items() if case.engine == "processes" and case.K == K}
            if group:
                yield from in_processes(group, K, Path(folder))
        yield from from_command_line(commands, Path(folder))


def origin() -> dict[str, str]:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "commit": git("rev-parse", "HEAD") + changed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def differences(known: dict[str, Hashes], found: dict[str, Hashes]) -> list[str]:
    lines = [f"{name}: not run here" for name in known if name not in found]
    lines += [f"{name}: not in the file" for name in found if name not in known]
    for name in (name for name in known if name in found):
        lines += [f"{name}: other {what}" for what, value in known[name].items() if found[name].get(what) != value]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--check", type=Path, help="compare with the hashes in this file")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--stage", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if given.stage:
        stage_process(given.stage)
        return 0

    def wanted(name: str) -> bool:
        return given.only in name

    if given.list:
        print("\n".join(name for name in (*pipeline_cases(), *COMMANDS) if wanted(name)))
        return 0
    if not given.out and not given.check:
        parser.error("give --out FILE, --check FILE or --list")
    try:
        known = json.loads(given.check.read_text()) if given.check else None
    except (OSError, ValueError) as error:
        parser.error(f"cannot read {given.check} ({error}): give a file that --out has written")
    made: dict[str, Any] = {"origin": origin(), "cases": {}}
    for name, hashes in everything(wanted):
        made["cases"][name] = hashes
        if sys.stderr.isatty():
            print(f"{len(made['cases'])} cases, {name}", end="\033[K\r", file=sys.stderr, flush=True)
    if given.out:
        given.out.write_text(json.dumps(made, indent=1) + "\n")
        print(f"{len(made['cases'])} cases in {given.out}")
    if known is None:
        return 0
    for what, value in known["origin"].items():
        if what != "commit" and made["origin"][what] != value:
            print(f"note: {what} {made['origin'][what]}, in the file {value}", file=sys.stderr)
    found = differences({name: hashes for name, hashes in known["cases"].items() if wanted(name)}, made["cases"])
    print("\n".join([*found, f"{len(made['cases'])} cases, {len(found)} differences from {known['origin']['commit']}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

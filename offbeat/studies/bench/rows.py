"""What can be timed, and under which name; pure data.

A row is a way to train the same network on the same batch. `bp` and `adl` are always timed; `against` names the
others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from offbeat.errors import UserError, unknown
from offbeat.method import Method
from offbeat.methods import named, parsed, settings_of, with_settings
from offbeat.settings import shown

Kind = Literal["loop", "pipelining", "ddp", "pipeline"]
BASELINE, OURS = "bp", "adl"  # what all others are compared with
ALWAYS = (BASELINE, OURS)
BEST = "the best of those tried"  # how the number of micro-batches was chosen, in notes


@dataclass(frozen=True)
class BenchRow:
    """One way to train.

    setting   of its kind: a schedule of torch.distributed.pipelining, or a method of this package
    all_cores whether a worker has all cores, not one
    swept     whether the number of micro-batches is to be found first
    micro     whether an update is one batch, which is split into M micro-batches
    recompute whether stages hold inputs instead of graphs
    bounds    whether its stages are also timed without messages, which bounds all rows with the same cuts
    """

    name: str
    title: str
    kind: Kind
    setting: str = ""
    all_cores: bool = False
    swept: bool = False
    micro: bool = False
    recompute: bool = False
    bounds: bool = False
    on_gpu: bool = False  # there alone

    @property
    def family(self) -> Literal["bp", "torch", "offbeat"]:
        if self.kind == "loop" or self.setting == "bp":
            return "bp"
        return "offbeat" if self.kind == "pipeline" else "torch"

    @property
    def alone(self) -> bool:
        """Whether one worker trains the whole network, where others have K."""
        return self.kind == "loop"

    def title_on(self, device: str) -> str:
        return self.title if device == "cpu" or self.on_gpu else ON_GPU.get(self.name, f"{self.title}, on streams")


def _torch(name: str, title: str, schedule: str) -> BenchRow:
    return BenchRow(name, f"torch pipelining, {title}", "pipelining", schedule, swept=True)


def _ours(name: str, title: str, method: str = "", **more: bool) -> BenchRow:
    return BenchRow(name, f"Offbeat {title}", "pipeline", method or name, **more)


LISTED = (
    BenchRow("bp", "BP, one worker", "loop"),
    BenchRow("bp-cores", "BP, all cores", "loop", all_cores=True),
    BenchRow("bp-windows", "BP, windows at once", "pipeline", "bp", on_gpu=True),
    _torch("torch-gpipe", "GPipe", "ScheduleGPipe"),
    _torch("torch-1f1b", "1F1B", "Schedule1F1B"),
    _torch("torch-interleaved", "interleaved 1F1B", "ScheduleInterleaved1F1B"),
    BenchRow("ddp", "torch DistributedDataParallel", "ddp"),
    _ours("adl", "ADL", bounds=True),
    _ours("adl-micro", "ADL, micro-batches", "adl", swept=True, micro=True, bounds=True),
    _ours("adl-recompute", "ADL, micro-batches, recompute", "adl", swept=True, micro=True, recompute=True),
    _ours("adl-1f1b-micro", "ADL on the 1F1B lag, micro-batches", "adl-1f1b", swept=True, micro=True),
    _ours("adl-1f1b", "ADL on the 1F1B lag"),
    _ours("ddg", "DDG"),
    _ours("fr", "FR"),
    _ours("dsp", "DSP"),
    _ours("gpipe", "GPipe", swept=True),
)
ROWS = {row.name: row for row in LISTED}
ON_GPU = {"bp": "BP, eager", "bp-cores": "BP, recorded"}  # the same rows, where they do not differ in their cores


@dataclass(frozen=True)
class BenchSetting:
    """What all rows have in common.

    batch_size         samples of a batch, over all workers; of an update where samples per update are given
    batch_per_update   None, or the samples of an update of every row: methods with M > 1 split them into M batches
    cuts_by_samples    `cuts` and `chunk_cuts` of rows whose stages compute on fewer samples than `batch_size`, by these
                       samples (as text, as in JSON)
    replicas           copies of all stages, in rows of this package; each trains on batches of `batch_size`
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    batch_size: int
    K: int
    M: int
    device: str = "cpu"
    precision: str = "fp32"
    cuts: tuple[int, ...] = ()
    units: str = "layers"
    chunk_cuts: tuple[int, ...] | None = None  # of 2K chunks between layers, two per worker
    methods: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)  # settings of our methods, by name
    batch_per_update: int | None = None
    replicas: int = 1
    cuts_by_samples: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        optional: dict[str, Any] = {
            "methods": {},
            "batch_per_update": None,
            "replicas": 1,
            "cuts_by_samples": {},
        }  # left out of the record where not given
        return {name: value for name, value in asdict(self).items() if name not in optional or value != optional[name]}

    @classmethod
    def of(cls, stored: dict[str, Any]) -> BenchSetting:
        """From the result of `as_dict` after a round trip through JSON, among other settings or alone."""
        known = _with_tuples({each.name: stored[each.name] for each in fields(cls) if each.name in stored})
        other = {samples: _with_tuples(cuts) for samples, cuts in stored.get("cuts_by_samples", {}).items()}
        return cls(**{**known, "cuts_by_samples": other})


def _with_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(had) if isinstance(had, list) else had for name, had in stored.items()}


def method_of(row: BenchRow, setting: BenchSetting, m: int | None = None) -> Method:
    """The method of one of our rows with the run's M. m is its number of micro-batches: of a batch where it takes
    them, else of an update, instead of M."""
    takes = settings_of(row.setting)
    shared = {name: value for name, value in (("M", setting.M), ("m", m)) if name in takes and value is not None}
    own = {"M": m} if m is not None and "M" in takes and "m" not in takes else {}
    recompute = {"recompute": True} if row.recompute else {}
    return with_settings(row.setting, {**shared, **setting.methods.get(row.setting, {}), **own, **recompute})


def batches_per_update(row: BenchRow, setting: BenchSetting, m: int | None = None) -> int:
    """The batches that the row splits `setting.batch_size` into, which are an update: M of them in rows of m = M
    micro-batches, and where samples per update are given; else 1."""
    splits = row.micro or setting.batch_per_update
    return method_of(row, setting, m).M if splits and row.kind == "pipeline" else 1


def samples_per_update(row: BenchRow, setting: BenchSetting, m: int | None = None) -> int:
    M = method_of(row, setting, m).M if row.kind == "pipeline" else 1
    return setting.batch_size // batches_per_update(row, setting, m) * M


def title_of(row: BenchRow, setting: BenchSetting, m: int | None = None) -> str:
    """The title of a row; with its samples per update where they are not one batch, as those of the other rows.

    >>> setting = BenchSetting("resnet110", (3, 32, 32), 10, batch_size=128, K=4, M=4)
    >>> title_of(ROWS["adl"], setting), title_of(ROWS["adl-micro"], setting, 8)
    ('Offbeat ADL, 512 samples per update', 'Offbeat ADL, micro-batches')
    """
    samples, title = samples_per_update(row, setting, m), row.title_on(setting.device)
    return title if samples == setting.batch_size else f"{title}, {samples} samples per update"


def samples_at_once(row: BenchRow, setting: BenchSetting, m: int | None = None) -> int:
    """The samples on which a stage of the row computes: those of a batch, or of a micro-batch."""
    return setting.batch_size // (m or batches_per_update(row, setting))


def of_row(row: BenchRow, setting: BenchSetting, m: int | None = None) -> BenchSetting:
    """The setting with the batch size of the row, and the cuts for the samples on which its stages compute."""
    own = setting.cuts_by_samples.get(str(samples_at_once(row, setting, m)), {})
    return replace(setting, batch_size=setting.batch_size // batches_per_update(row, setting, m), **own)


def cuts_of(row: BenchRow, setting: BenchSetting, m: int | None = None) -> list[int] | None:
    """The cuts of a row; None where each worker has the whole network."""
    if row.kind in ("loop", "ddp"):
        return None
    own = of_row(row, setting, m)
    return list((own.chunk_cuts if row.setting == "ScheduleInterleaved1F1B" else own.cuts) or ())


def row_of(name: str) -> BenchRow:
    """The row of that name: a listed one, or that of one of our methods."""
    if name in ROWS:
        return ROWS[name]
    method = named(name)
    return _ours(name, f"{name}: {method.title}", swept=method.m > 1)


def settings_by_method(texts: Sequence[str], M: int | None) -> dict[str, dict[str, Any]]:
    """Settings given as text, such as adl:corrector=sc, by the name of the method.

    >>> settings_by_method(["adl:corrector=sc", "ddg:barrier=no"], None)
    {'adl': {'corrector': 'sc'}, 'ddg': {'barrier': False}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, settings = parsed(text)
        if M is not None and "M" in settings:
            parsed(text, M=M)  # refuses another M
        if name in found:
            raise UserError(
                f"{name!r} is given twice in methods=: give all its settings once, as in adl:M=4,corrector=sc"
            )
        with_settings(name, settings)  # refuses what is wrong
        found[name] = settings
    return found


def chosen(against: str, device: str = "cpu", *, methods: Sequence[str] = ()) -> list[BenchRow]:
    """The rows of `against`, in the order in which they are listed; "all" are those of the device.

    methods   of ours that are timed too, whether they are listed or not

    >>> [row.name for row in chosen("ddp")]
    ['bp', 'ddp', 'adl']
    """
    wanted = [name.strip() for name in against.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"against={against!r} names no row: use all, or some of {', '.join(ROWS)}")
    for name in wanted:
        if name not in (*ROWS, "all"):
            raise unknown("row", name, ["all", *ROWS])
    whole = [row.name for row in LISTED if device != "cpu" or not row.on_gpu] if "all" in wanted else []
    others = [row_of(name) for name in methods if name not in ROWS]
    return [row for row in LISTED if row.name in (*whole, *wanted, *methods, *ALWAYS)] + others


def left_out(row: BenchRow, setting: BenchSetting, given: tuple[int, ...] | None = None) -> str | None:
    """The reason why a row cannot be timed in this setting; None where it can."""
    b, K = setting.batch_size, setting.K
    if row.recompute and (weights := setting.methods.get(row.setting, {}).get("weights", "stash")) != "stash":
        return f"recompute needs weights=stash, not {weights}"
    if not row.micro and b % (parts := batches_per_update(row, setting)):
        return f"an update of {b} samples cannot be split into {parts} equal batches"
    if not row.micro and (reason := too_many_stages(row, setting)):
        return reason
    if setting.replicas > 1 and row.kind == "pipeline" and (reason := method_of(row, setting).why_no_replicas()):
        return reason
    if setting.device != "cpu":
        if row.family == "torch":
            return "one GPU: its workers need one each"
        if row.micro:
            return "on one GPU there is no synchronous pipeline with micro-batches to compare it with"
        if row.kind == "pipeline" and (reason := method_of(row, setting, 2).why_not_capturable()):
            return f"it {reason}, so its stages cannot be recorded for streams of one GPU"
    elif row.on_gpu:
        return "batches of a window run at the same time only on a GPU"
    if row.kind == "ddp" and b % K:
        return f"a batch of {b} cannot be divided equally among {K} workers"
    if row.swept and not micro_batches(row, setting, given):
        numbers = f"{' or '.join(map(str, given))} " if given else ""
        return f"a batch of {b} cannot be split into {numbers}micro-batches for {K} workers"
    if row.setting == "ScheduleInterleaved1F1B" and setting.chunk_cuts is None:
        return f"the network has fewer than {2 * K} units for its chunks"
    return None


def too_many_stages(row: BenchRow, setting: BenchSetting, m: int | None = None) -> str | None:
    """The reason why the method of a row cannot have K stages, or None. That of 2BW depends on M."""
    limit = method_of(row, setting, m).limit if row.kind == "pipeline" else None
    return limit(setting.K) if limit else None


def to_try(K: int, given: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Numbers of micro-batches, whether they fit or not."""
    return given or (K, 2 * K, 4 * K)


def micro_batches(row: BenchRow, setting: BenchSetting, given: tuple[int, ...] | None = None) -> list[int]:
    """The numbers of micro-batches to try: K, 2K and 4K, or those given, as far as they divide the batch and the method
    can have K stages with them.

    Interleaved 1F1B needs whole rounds of K.
    """
    b, K = setting.batch_size, setting.K
    own = setting.methods.get(row.setting, {}).get("m")
    fit = [m for m in ((own,) if own is not None else to_try(K, given)) if m <= b and b % m == 0]
    fit = [m for m in fit if not too_many_stages(row, setting, m)]
    return [m for m in fit if m % K == 0] if row.setting == "ScheduleInterleaved1F1B" else fit


def sizes(rows: Sequence[BenchRow], setting: BenchSetting, given: tuple[int, ...] | None = None) -> list[int]:
    """All numbers of samples on which stages of these rows may compute, the largest first."""
    found = {setting.batch_size}
    for row in rows:
        if left_out(row, setting, given) is None and cuts_of(row, setting) is not None:
            tried: Sequence[int | None] = micro_batches(row, setting, given) if row.swept else [None]
            found |= {samples_at_once(row, setting, m) for m in tried}
    return sorted(found, reverse=True)


def note(row: BenchRow, setting: BenchSetting, m: int | None, tried: int = 1, best: str = BEST) -> str:
    """What the figures of a row mean beyond its name; m is the one that `best` describes of `tried` numbers of
    micro-batches."""
    parts = []
    if row.kind == "loop":
        on_gpu = "recorded as CUDA graphs" if row.all_cores else "eager"
        parts.append("a hand-written loop" if setting.device == "cpu" else on_gpu)
    if m:
        best = best if tried > 1 else "no other number tried"
        update = "an update is one batch, in " if row.micro else ""
        parts.append(f"{update}{m} micro-batches of {setting.batch_size // m}, {best}")
    if row.kind == "pipelining":
        parts.append("BatchNorm sees micro-batches, and its running statistics move with each of them")
    if row.setting == "ScheduleInterleaved1F1B":
        parts.append(f"{2 * setting.K} chunks, two per worker, on cuts of their own")
    if row.kind == "ddp":
        parts.append(
            f"{setting.batch_size // setting.K} samples per worker, by which BatchNorm normalises; bytes by the "
            "formula of a ring"
        )
    if row.kind == "pipeline":
        method = method_of(row, setting, m)
        if own := setting.methods.get(row.setting):
            parts.append(", ".join(f"{name}={shown(value)}" for name, value in own.items()))
        if method.m > 1:
            parts.append("BatchNorm normalises by micro-batch, its running statistics move once per batch")
        if method.M > 1 and not row.micro:
            split = f"split into {method.M} batches of {setting.batch_size // method.M}"
            parts.append(f"an update is {split}" if setting.batch_per_update else f"an update every {method.M} batches")
        if method.recompute:
            parts.append("stages hold inputs instead of graphs and repeat forwards, with the same results")
        if method.barrier:
            parts.append("all stages wait for each other after every forward, as published")
        if method.weights == "replay":
            parts.append("forwards are repeated")
    return "; ".join(parts)


def described(
    row: BenchRow, setting: BenchSetting, m: int | None, sweep: dict[int, float], best: str = BEST
) -> dict[str, Any]:
    """What a record has of a row before anything but its numbers of micro-batches is timed."""
    K, pipeline = setting.K, row.kind == "pipeline"
    levels = [method_of(row, setting, m).staleness(k, K) for k in range(1, K + 1)] if pipeline else []
    return {
        "name": row.name,
        "title": title_of(row, setting, m),
        "exact": not any(levels),
        "workers": 1 if row.alone else K,
        "staleness": levels,
        "samples_per_update": samples_per_update(row, setting, m),
        "micro_batches": m,
        "cuts": cuts_of(row, setting, m),
        "sweep": {str(tried): seconds for tried, seconds in sweep.items()},
        "note": note(row, setting, m, len(sweep), best),
    }


def cores_here() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))

"""Any model as a list of units between which it may be cut, also inside its blocks.

    relu(branch(x) + x):   x -> [conv1][norm1][relu1][conv2][norm2][add][relu]
                                             ^ a cut here carries (relu1, x)

A unit is one operation that computes (a layer, or a function or method called in some forward), together with the
sizes that it reads and the picks from a tuple that it returns. `trace` finds the units, `Traced.split` cuts.
"""

from __future__ import annotations

import bisect
import copy
import difflib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import nn

from offbeat.core import codec
from offbeat.errors import UserError, first_line
from offbeat.partitioning.aliases import AliasedMemory, buffers_written, carriers, opaque, returns_several
from offbeat.partitioning.chunk import Chunk, StageProgram, as_stage
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import Inputs, settings_advice
from offbeat.partitioning.program import Op, Program, Ref, State, bind, held, marks
from offbeat.partitioning.record import Untraceable, record
from offbeat.partitioning.sample_trace import record_on_sample
from offbeat.partitioning.ties import Tied, TiedParameter
from offbeat.partitioning.tree import hold, own_tensors, put, shell_at, with_copies

Way = Literal["fx", "sample"]


@dataclass(frozen=True)
class Unit:
    """What is never cut: operations `spans[training]` of the model's program in that mode."""

    index: int
    name: str  # dotted path of the layer, or of the submodule and what it does: layer1.0.add
    module: str  # path of the layer, or of the submodule whose forward does it
    parameters: tuple[str, ...]  # names in the model
    spans: dict[bool, tuple[int, int]]


def trace(model: nn.Module, sample: Any = None, *, way: Way = "fx", inside_blocks: bool = False) -> Traced:
    """The units of a model. What cannot be traced is one unit; `notes` holds what and why.

    way="fx" follows the forward with torch.fx, without running it; way="sample" runs it on the sample and records what
    happens between its blocks (`inside_blocks`: also between their submodules). inputs.py has how a sample fills the
    arguments of forward.

    >>> traced = trace(nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))))
    >>> [unit.name for unit in traced.units], traced.legal_cuts
    (['0', '1.0', '1.1'], [1, 2])
    >>> [list(part.state_dict()) for part in traced.split([2])]
    [['0.weight', '0.bias'], ['1.1.weight', '1.1.bias']]
    """
    inputs = Inputs.of(model, sample)
    try:
        if way == "sample":
            if sample is None:
                raise UserError('trace="sample" without a sample: give one')
            found = record_on_sample(model, inputs, sample, inside_blocks=inside_blocks)
            made = Traced(model, found.programs, found.atomic, inputs, way=way, written=found.written_buffers)
            made.notes += found.notes
            return made
        programs, atomic = record(model, inputs)
    except Untraceable as reason:
        inputs = inputs if inputs.names else Inputs(("x",))
        names = {name: Ref(name) for name in inputs.names}
        args, kwargs = ((), names) if inputs.keywords else (tuple(names.values()), {})
        op = Op(type(model).__name__, "call_module", "", args, dict(kwargs), "")
        program = Program(inputs.names, (op,), Ref(op.name))
        return Traced(model, {True: program, False: program}, {"": str(reason)}, inputs, way=way)
    return Traced(model, programs, atomic, inputs, way=way)


class Traced:
    """A model as units. Cut c is before unit c; `legal_cuts` are those that keep the model exact.

    units       in the order of their running, the same everywhere
    notes       one line for submodules that stay one unit for the same reason, and for each parameter of several stages
    ties        parameters that several stages use, of the last split
    legal_cuts  neither between two uses of a written buffer or untraceable submodule, nor where a value crosses
                together with a view of it and is changed in place, nor where a run showed one that cannot be sent
    """

    def __init__(
        self,
        model: nn.Module,
        programs: dict[bool, Program],
        atomic: dict[str, str],
        inputs: Inputs,
        *,
        way: Way,
        written: set[str] | None = None,
    ) -> None:
        self.model, self.programs, self.inputs, self.way = model, programs, inputs, way
        self._written = written
        self._barred: frozenset[int] = frozenset()  # where a value crosses that cannot be sent, as far as is known
        self.ties: dict[int, TiedParameter] = {}  # by the identity of the parameter
        self.notes = _whole_units(model, atomic)
        self.whole = "" in atomic
        self.memory = {mode: AliasedMemory(program, model) for mode, program in programs.items()}
        self.last_use = {mode: _last_use(program) for mode, program in programs.items()}
        self.units = self._units()
        self._boundaries = {mode: self._crossing(mode) for mode in programs}
        self.carriers = {mode: carriers(program, model, self.memory[mode]) for mode, program in programs.items()}

    def twin(self, *, device: str | None = None) -> Traced:
        """The same units over a copy of the model, which may be run without a change to the model."""
        other = copy.copy(self)  # programs and units name layers and tensors by their paths alone
        other.model, other.notes = copy_model(self.model), list(self.notes)
        if device is not None:
            other.model.to(device)
        for name in ("_shared", "written"):
            other.__dict__.pop(name, None)  # they know tensors by their identity
        return other

    # ---- units

    def _units(self) -> list[Unit]:
        """One for each working operation that both modes have; what one mode alone does belongs to the one before."""
        heavy = {mode: self._starts(mode) for mode in (True, False)}
        keys = {mode: [_key(self.programs[mode].ops[place]) for place, _ in heavy[mode]] for mode in heavy}
        pairs = _matches(keys[True], keys[False]) or [(0, 0)]
        ends = {mode: len(self.programs[mode].ops) for mode in heavy}
        starts = [(heavy[True][i][1], heavy[False][j][1]) if n else (0, 0) for n, (i, j) in enumerate(pairs)]
        units = []
        for index, (start, end) in enumerate(zip(starts, [*starts[1:], (ends[True], ends[False])], strict=True)):
            spans = {True: (start[0], end[0]), False: (start[1], end[1])}
            main = heavy[True][pairs[index][0]][0] if heavy[True] else 0
            op = self.programs[True].ops[main] if ends[True] else None
            name, owner = (op.name, op.owner) if op else ("forward", "")
            units.append(Unit(index, name, owner, self._parameters(spans), spans))
        return units

    def _starts(self, training: bool) -> list[tuple[int, int]]:
        """For each working operation its place and where its unit begins: with the sizes that it reads."""
        program, descriptions = self.programs[training], self.memory[training].descriptions
        several = {op.name for op in program.ops if returns_several(op, self.model)}
        starts: list[tuple[int, int]] = []
        lead: int | None = None  # the first light operation after the end of the unit before
        for place, op in enumerate(program.ops):
            picks = op.target in (operator.getitem, getattr) and bool(op.refs) and op.refs[0] in several
            if picks and self.way == "sample":
                several.add(op.name)
            if picks or op.name in descriptions or not self._works(op):
                if lead is None and not picks:
                    lead = place
                continue
            starts.append((place, place if lead is None else lead))
            lead = None
        return starts

    def _works(self, op: Op) -> bool:
        """Whether it begins a unit; recorded on a sample only what has parameters or is a layer: the rest is small."""
        if self.way == "fx" or op.kind == "call_module":
            return True
        return any(isinstance(_attribute(self.model, path), nn.Parameter) for path in op.states)

    def _parameters(self, spans: dict[bool, tuple[int, int]]) -> tuple[str, ...]:
        names = {name: tensor for name, tensor, _ in self._state(spans) if isinstance(tensor, nn.Parameter)}
        return tuple(names)

    def _state(self, spans: dict[bool, tuple[int, int]]) -> Iterator[tuple[str, Any, bool]]:
        """What the operations keep from batch to batch: (name, tensor or untraceable submodule, is it a tensor)."""
        for path in self._states(spans):
            yield path, _attribute(self.model, path), True
        for mode, (start, end) in spans.items():
            for op in self.programs[mode].ops[start:end]:
                if op.kind != "call_module":
                    continue
                layer = self.model.get_submodule(op.target)
                for named in (layer.named_parameters, layer.named_buffers):
                    for name, tensor in named(op.target, remove_duplicate=False):
                        yield name, tensor, True
                if opaque(op, self.model):
                    yield op.target, layer, False

    def _states(self, spans: dict[bool, tuple[int, int]]) -> Iterator[str]:
        """Paths of the tensors that the operations read by themselves, or that the model returns as they are."""
        for mode, (start, end) in spans.items():
            program = self.programs[mode]
            for op in program.ops[start:end]:
                yield from op.states
            if end == len(program.ops):
                yield from (mark for mark in marks(program.output) if type(mark) is State)

    # ---- cuts

    def boundary(self, cut: int, *, training: bool = True) -> list[str]:
        """The names of the values that cross a cut, in the order of their making."""
        return list(self._boundaries[training][cut])

    def _crossing(self, training: bool) -> list[tuple[str, ...]]:
        program, last_use = self.programs[training], self.last_use[training]
        made: list[tuple[str, ...]] = [program.inputs, *((op.name,) for op in program.ops)]
        alive: dict[str, None] = {}
        boundaries = []
        place = 0
        for unit in self.units:
            for names in made[place : unit.spans[training][0] + 1]:
                alive.update(dict.fromkeys(names))
            place = unit.spans[training][0] + 1
            alive = {name: None for name in alive if last_use.get(name, -1) >= unit.spans[training][0]}
            boundaries.append(tuple(alive))
        return boundaries

    @cached_property
    def unsafe_cuts(self) -> set[int]:
        """Cuts that a value crosses together with a view of it (or what may be one) and that is changed in place."""
        bad = {mode: self.memory[mode].unsafe(program, self.last_use[mode]) for mode, program in self.programs.items()}
        return {unit.index for unit in self.units[1:] if any(unit.spans[mode][0] in bad[mode] for mode in bad)}

    @cached_property
    def written(self) -> set[int]:
        """Identities of the buffers and tensor attributes that some operation may write into."""
        names = self._written
        if names is None:
            ops = [op for program in self.programs.values() for op in program.ops]
            names = {name for op in ops for name in buffers_written(op, self.model)}
        return {id(_attribute(self.model, name)) for name in names}

    def shared(self, tied: Tied) -> dict[str, tuple[int, int]]:
        """First and last unit of what cannot be used by two stages: written buffers, untraceable submodules; with
        copies nothing."""
        return {} if tied == "copies" else self._shared

    @cached_property
    def _shared(self) -> dict[str, tuple[int, int]]:
        uses: dict[int, tuple[dict[str, None], list[int]]] = {}
        for unit in self.units:
            for name, thing, is_tensor in self._state(unit.spans):
                if is_tensor and id(thing) not in self.written:  # it is read, or received from its stage
                    continue
                names, places = uses.setdefault(id(thing), ({}, []))
                names[name] = None
                places.append(unit.index)
        return {" = ".join(names): (places[0], places[-1]) for names, places in uses.values() if places[0] < places[-1]}

    @cached_property
    def legal_cuts(self) -> list[int]:
        """Where it can be cut; one stage more than these is the most."""
        return self.legal()

    def bar(self, cuts: set[int]) -> None:
        """Make these cuts illegal: a value crosses that cannot be sent."""
        self._barred |= cuts
        self.__dict__.pop("legal_cuts", None)

    def legal(self, tied: Tied = "shared") -> list[int]:
        """Where it can be cut; with copies also between two uses of a buffer that is written, or of a submodule that
        cannot be traced."""
        barred = {*self.unsafe_cuts, *self._barred}
        for first, last in self.shared(tied).values():
            barred.update(range(first + 1, last + 1))
        return [cut for cut in range(1, len(self.units)) if cut not in barred]

    def split(self, cuts: Sequence[int], *, tied: Tied = "shared") -> list[nn.Module]:
        """The stages between the cuts. They train the model's own parameters, under the model's names.

        A parameter that several stages use is one parameter, or with copies one for each stage (ties.py).
        """
        self._check(cuts, tied)
        self.ties = {}
        if not cuts:
            return [as_stage(self.model, self.inputs)]
        edges = list(zip([0, *cuts], [*cuts, len(self.units)], strict=True))
        uses = self._uses(edges)
        self.ties = {
            key: TiedParameter(dict(sorted(dict(reversed(stages)).items())), tied == "shared", parameter.nbytes)
            for key, (parameter, stages) in uses.items()
            if stages[0][0] != stages[-1][0]
        }
        if tied == "copies":
            for parameter, stages in [uses[key] for key in self.ties]:
                _untie(self.model, parameter, stages)
        self.notes += [tie.note() for tie in self.ties.values() if tie.shared]
        taken: dict[int, int] = {}
        return [self._chunk(start, end, k, taken, self.ties) for k, (start, end) in enumerate(edges, start=1)]

    def _uses(self, edges: Sequence[tuple[int, int]]) -> dict[int, tuple[nn.Parameter, list[tuple[int, str]]]]:
        """Each parameter by its identity, with the stages that use it and the names by which they do."""
        uses: dict[int, tuple[nn.Parameter, list[tuple[int, str]]]] = {}
        for k, (start, end) in enumerate(edges, start=1):
            for unit in self.units[start:end]:
                for name, thing, _ in self._state(unit.spans):
                    if isinstance(thing, nn.Parameter):
                        uses.setdefault(id(thing), (thing, []))[1].append((k, name))
        return uses

    def _check(self, cuts: Sequence[int], tied: Tied) -> None:
        count = len(self.units)
        whole = all(isinstance(cut, int) and not isinstance(cut, bool) for cut in cuts)
        if not whole or any(a >= b for a, b in zip([0, *cuts], [*cuts, count], strict=True)):
            allowed = f"they must increase, from 1 to {count - 1}" if count > 1 else "there is nothing to cut"
            raise UserError(f"cuts {list(cuts)} of {count} units: {allowed}{self._why_whole()}")
        legal = self.legal(tied)
        for cut in cuts:
            if cut in self.unsafe_cuts:
                problem, remedy = "separates a value and a view of it, changed in place, from both of their uses", ""
            elif cut in self._barred:
                problem, remedy = f"sends a value that no message can contain (only {codec.ALLOWED})", ""
            elif names := self._separated(cut, tied):
                problem, remedy = f"separates the uses of {names}", '; or tied="copies", a copy for each stage'
            else:
                continue
            raise UserError(f"cut {cut} (before {self.units[cut].name}) {problem}: {_nearest(cut, legal)}{remedy}")

    def _separated(self, cut: int, tied: Tied) -> str:
        names = [name for name, (first, last) in self.shared(tied).items() if first < cut <= last]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _why_whole(self) -> str:
        return f" ({self.notes[0]})" if self.whole else ""

    # ---- stages

    def as_one(self) -> Chunk:
        """All units as one module, which runs as stages do."""
        return self._chunk(0, len(self.units), 1, {}, {})

    def _chunk(self, start: int, end: int, k: int, taken: dict[int, int], tied: dict[int, TiedParameter]) -> Chunk:
        """Units start..end as a module; `taken` remembers the stage that has which tensor."""
        first, last = start == 0, end == len(self.units)
        spans = {mode: (self.units[start].spans[mode][0], self.units[end - 1].spans[mode][1]) for mode in self.programs}
        chunk = Chunk(self.model)
        ties = {key: tie for key, tie in tied.items() if tie.shared}
        paths = {path: id(thing) for path, thing, _ in self._state(spans)}
        received = {path: ties[key].value for path, key in paths.items() if key in ties and ties[key].owner < k}
        arriving = {key: tie.value for key, tie in ties.items() if tie.sent(k - 1)}
        frozen = {arriving[id(p)] for p in self.model.parameters() if id(p) in arriving and not p.requires_grad}
        self._furnish(chunk, spans, k, taken, set(arriving))
        for mode, (a, b) in spans.items():
            program, memory = self.programs[mode], self.memory[mode]
            inputs = program.inputs if first else self._boundaries[mode][start]
            outputs = () if last else self._boundaries[mode][end]
            output = held(program.output, chunk, received) if last else None
            keep = {str(mark) for mark in marks(program.output)} if last else set(outputs)
            changed = frozenset[str]().union(*memory.writes[a:b])
            passed = {tie.value for tie in ties.values() if tie.sent(k)}
            chunk._offbeat_programs[mode] = StageProgram(
                self.inputs if first else None,
                inputs,
                bind(program.ops[a:b], chunk, keep | passed, received),
                outputs,
                output,
                copied=tuple(name for name in inputs if not first and memory.roots[name] & changed),
                constant=(*(name for name in inputs if name not in self.carriers[mode]), *frozen),
                last=last,
                tied_inputs=tuple(arriving.values()),
                tied_outputs=tuple(
                    Ref(tie.value) if tie.owner < k else held(State(tie.names[k]), chunk)
                    for tie in ties.values()
                    if tie.sent(k)
                ),
            )
        return chunk

    def _furnish(
        self, chunk: Chunk, spans: dict[bool, tuple[int, int]], k: int, taken: dict[int, int], arriving: set[int]
    ) -> None:
        """Give the chunk its layers and its part of the model's tree, in the model's order, without the parameters that
        arrive with every batch."""
        ops = [op for mode, (a, b) in spans.items() for op in self.programs[mode].ops[a:b]]
        layers = {op.target for op in ops if op.kind == "call_module"}
        owners = {op.owner for op in ops}  # whose mode follows the stage's
        states = set(self._states(spans))
        copies = self._copies(spans, k, taken, arriving)
        elsewhere = {id(thing) for _, thing, _ in self._state(spans) if taken[id(thing)] != k}  # read there, too
        for path, module in self.model.named_modules():
            if path in layers:
                put(chunk, self.model, path, with_copies(module, copies))
            elif path in owners:
                shell_at(chunk, self.model, path)
            for name, tensor in own_tensors(module):
                if f"{path}.{name}".lstrip(".") in states:
                    own = copies.get(id(tensor), tensor)
                    if own is None:
                        continue
                    persistent = own is not tensor or id(tensor) not in elsewhere
                    hold(shell_at(chunk, self.model, path), module, name, own, persistent=persistent)

    def _copies(
        self, spans: dict[bool, tuple[int, int]], k: int, taken: dict[int, int], arriving: set[int]
    ) -> dict[int, Any]:
        """Copies of what an earlier stage has, by the identity of the original; None for what arrives."""
        copies: dict[int, Any] = {}
        for name, thing, is_tensor in self._state(spans):
            read_only = is_tensor and not isinstance(thing, nn.Parameter) and id(thing) not in self.written
            if taken.setdefault(id(thing), k) == k or id(thing) in copies or read_only:
                continue
            if id(thing) in arriving:
                copies[id(thing)] = None
            else:
                copies[id(thing)] = copy.deepcopy(thing) if is_tensor else None
                self.notes.append(f"{name} of stage {k} is a copy of its own: stage {taken[id(thing)]} uses it too")
        return copies


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _untie(model: nn.Module, parameter: nn.Parameter, uses: Sequence[tuple[int, str]]) -> None:
    """Give the model a copy under each name of the parameter that an earlier stage does not use."""
    first: dict[str, int] = {}
    for k, name in uses:
        first.setdefault(name, k)
    copies = {uses[0][0]: parameter}
    for name, k in first.items():
        owner, _, leaf = name.rpartition(".")
        if k not in copies:
            copies[k] = copy.deepcopy(parameter)
        model.get_submodule(owner)._parameters[leaf] = copies[k]


def _last_use(program: Program) -> dict[str, int]:
    """The last operation that needs each value; their count for what the model returns."""
    last = {ref: place for place, op in enumerate(program.ops) for ref in op.refs}
    return last | {str(mark): len(program.ops) for mark in marks(program.output) if type(mark) is Ref}


def _key(op: Op) -> tuple[str, Any, str]:
    return op.kind, op.target, op.owner


def _matches(train: list[Any], evaluate: list[Any]) -> list[tuple[int, int]]:
    """Pairs of places at which both lists hold the same, in order."""
    if train == evaluate:
        return [(place, place) for place in range(len(train))]
    blocks = difflib.SequenceMatcher(None, train, evaluate, autojunk=False).get_matching_blocks()
    return [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]


def _whole_units(model: nn.Module, atomic: Mapping[str, str]) -> list[str]:
    """One line for all submodules of a class that stay one unit for the same reason."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path, reason in atomic.items():
        alike.setdefault((type(model.get_submodule(path)).__name__, first_line(ValueError(reason))), []).append(path)
    return [
        f"{paths[0] or 'the model'} ({kind}) "
        + (f"and {len(paths) - 1} more stay one unit each" if len(paths) > 1 else "stays one unit")
        + f": {reason}{settings_advice(model)}"
        for (kind, reason), paths in alike.items()
    ]


def _nearest(cut: int, legal: list[int]) -> str:
    place = bisect.bisect_left(legal, cut)
    near = legal[max(0, place - 1) : place + 1]
    if not near:
        return "there is no legal cut"
    return (
        "the nearest legal cut is " + " or ".join(map(str, near))
        if len(near) == 1
        else (f"the nearest legal cuts are {near[0]} and {near[1]}")
    )

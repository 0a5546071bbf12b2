"""Parts: the state of one stage, as a file of tensors and a file with the tree that they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint import container
from offbeat.checkpoint.files import CheckpointDamaged, FileFacts, load, parse, sync_folder, write_file, writing
from offbeat.checkpoint.tree import NATIVE, flatten, references, unflatten

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = 1
TENSORS, TREE = ".safetensors", ".json"


def write_part(folder: Path, name: str, tree: Any) -> list[FileFacts]:
    """Write a tree as `name.safetensors` and `name.json`; the facts belong into the manifest."""
    return write_flat(folder, name, *flatten(tree))


def write_flat(folder: Path, name: str, tensors: Mapping[str, Tensor], plain: Any) -> list[FileFacts]:
    """The same for a tree that is flat already: `flatten(tree, copy=True)` first, then this in a thread."""
    return [write_file(folder / file, chunks) for file, chunks in part_files(name, tensors, plain).items()]


def part_files(name: str, tensors: Mapping[str, Tensor], plain: Any) -> dict[str, Iterable[bytes | memoryview]]:
    """The files of a part by their names, as bytes to be written."""
    text = json.dumps({"format": FORMAT, "part": name, "tree": plain}, allow_nan=False, separators=(",", ":"))
    return {f"{name}{TENSORS}": _bytes(tensors), f"{name}{TREE}": [text.encode()]}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """A safetensors file of row-major tensors on the CPU."""
    return write_file(path, _bytes(tensors))


def _bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    import torch

    described = {name: (NATIVE[str(x.dtype).removeprefix("torch.")], list(x.shape)) for name, x in tensors.items()}
    yield container.header(described, {"format": "pt"})
    for x in tensors.values():
        if x.numel():
            yield x.detach().reshape(-1).view(torch.uint8).numpy().data


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """The same, under its name only once all of it is on the disk; what was there before stays until then."""
    temporary = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            facts = write_tensors(temporary, tensors)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    return facts


def read_part(folder: Path, name: str, facts: Mapping[str, FileFacts], *, device: torch.device | str | None) -> Any:
    """The tree of a part, of whose files every byte was checked first."""
    raw = load(folder, facts[f"{name}{TENSORS}"])
    plain, entries = check_part(folder, name, raw, load(folder, facts[f"{name}{TREE}"]))
    return unflatten(read_tensors(raw, entries), plain, device=device)


def check_part(
    folder: Path, name: str, raw: bytes | bytearray, text: bytes | bytearray, size: int | None = None
) -> tuple[Any, dict[str, container.Entry]]:
    """The tree and the places of its tensors, from the (beginning of the) two files, if they fit each other."""
    try:
        entries = container.entries(raw, len(raw) if size is None else size)
    except ValueError as error:
        raise CheckpointDamaged(f"{folder / name}{TENSORS}: {error}") from error
    said = parse(text, folder / f"{name}{TREE}")
    if not isinstance(said, dict) or said.get("format") != FORMAT or said.get("part") != name or "tree" not in said:
        raise CheckpointDamaged(f"{folder / name}{TREE} is not the tree of {name} in format {FORMAT}")
    if set(references(said["tree"])) != set(entries):
        raise CheckpointDamaged(f"{folder / name}{TREE} and {TENSORS} do not name the same tensors")
    return said["tree"], entries


def read_tensors(raw: bytearray, entries: Mapping[str, container.Entry]) -> dict[str, Tensor]:
    """The tensors of a checked file, in memory of their own."""
    import torch

    types = {code: getattr(torch, name) for name, code in NATIVE.items()}
    found = {}
    for name, entry in entries.items():
        found[name] = torch.empty(entry.shape, dtype=types[entry.dtype])
        if entry.end > entry.start:
            content = torch.frombuffer(raw, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start)
            found[name].view(-1).view(torch.uint8).copy_(content)
    return found

"""Parts: the state of one stage, as a file of tensors and a JSON file with the tree that contains them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint import safetensors_format
from offbeat.checkpoint.files import CheckpointDamaged, FileFacts, load, parse, sync_folder, write_file, writing
from offbeat.checkpoint.safetensors_format import StoredTensor
from offbeat.checkpoint.tree import NATIVE, flatten, references, unflatten

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
TENSORS, TREE = ".safetensors", ".json"


def write_part(folder: Path, name: str, tree: Any) -> list[FileFacts]:
    """Write a tree as `name.safetensors` and `name.json`; returns what the manifest lists."""
    return [write_file(folder / file, chunks) for file, chunks in part_files(name, *flatten(tree)).items()]


def part_files(name: str, tensors: Mapping[str, Tensor], plain: Any) -> dict[str, Iterable[bytes | memoryview]]:
    """The contents of the files of a part, by file name."""
    text = json.dumps({"format": FORMAT, "part": name, "tree": plain}, allow_nan=False, separators=(",", ":"))
    return {f"{name}{TENSORS}": _bytes(tensors), f"{name}{TREE}": [text.encode()]}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """A safetensors file of row-major tensors on the CPU."""
    return write_file(path, _bytes(tensors))


def _bytes(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    import torch

    described = {name: (NATIVE[str(x.dtype).removeprefix("torch.")], list(x.shape)) for name, x in tensors.items()}
    yield safetensors_format.header(described, {"format": "pt"})
    for x in tensors.values():
        if x.numel():
            yield x.detach().reshape(-1).view(torch.uint8).numpy().data


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileFacts:
    """The same; a file of that name is replaced only once the new one is complete on the disk."""
    temporary = path.with_name(f".{path.name}.part")
    with writing(path):
        try:
            facts = write_tensors(temporary, tensors)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    return facts


def read_part(folder: Path, name: str, facts: Mapping[str, FileFacts]) -> Any:
    """The tree of a part; every byte of its files is checked first."""
    raw = load(folder, facts[f"{name}{TENSORS}"])
    plain, stored = check_part(folder, name, raw, load(folder, facts[f"{name}{TREE}"]))
    return unflatten(read_tensors(raw, stored), plain)


def check_part(
    folder: Path, name: str, raw: bytes | bytearray, text: bytes | bytearray, size: int | None = None
) -> tuple[Any, dict[str, StoredTensor]]:
    """The tree as JSON and the positions of its tensors; CheckpointDamaged where the two files do not fit each other.

    raw: the tensor file or, where its `size` is given, its header alone.
    """
    try:
        stored = safetensors_format.read_header(raw, len(raw) if size is None else size)
    except ValueError as error:
        raise CheckpointDamaged(f"{folder / name}{TENSORS}: {error}") from error
    found = parse(text, folder / f"{name}{TREE}")
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("part") != name or "tree" not in found:
        raise CheckpointDamaged(f"{folder / name}{TREE} is not the tree of {name} in format {FORMAT}")
    if set(references(found["tree"])) != set(stored):
        raise CheckpointDamaged(f"{folder / name}{TREE} and {TENSORS} do not name the same tensors")
    return found["tree"], stored


def read_tensors(raw: bytearray, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors of a checked file, in new memory."""
    import torch

    types = {code: getattr(torch, name) for name, code in NATIVE.items()}
    found = {}
    for name, each in stored.items():
        found[name] = torch.empty(each.shape, dtype=types[each.dtype])
        if each.end > each.start:
            content = torch.frombuffer(raw, dtype=torch.uint8, count=each.end - each.start, offset=each.start)
            found[name].view(-1).view(torch.uint8).copy_(content)
    return found

"""Checkpoint files of processes that do not see the run folder: the first process writes and reads them.

    stage 3, save     piece | piece | ... | facts        on its link to the first process, which writes the files
    stage 3, resume   piece | piece | ...                to all processes, of which stage 3 writes a temporary copy

Files are sent in pieces, so that neither process holds more than a few pieces.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from offbeat.checkpoint import CheckpointFailed, FileFacts, flatten, is_full, make_room, part_name
from offbeat.checkpoint.files import CHUNK, write_file
from offbeat.checkpoint.parts import part_files
from offbeat.core.links import Link, Message
from offbeat.engines import Engine

PIECE = "piece"  # the kind of a message with bytes of a file


def send_part(link: Link, t: int, part: str, tree: Any) -> list[FileFacts]:
    """Send the files of a part of checkpoint t; returns their entries in the manifest."""
    facts = []
    for name, chunks in part_files(part, *flatten(tree)).items():
        digest, size = hashlib.sha256(), 0
        for piece in pieces(chunks):
            digest.update(piece)
            size += len(piece)
            link.send(Message(t, [name, torch.frombuffer(piece, dtype=torch.uint8)], PIECE))
        facts.append(FileFacts(name, size, digest.hexdigest()))
    return facts


def receive_part(link: Link, folder: Path | None, part: str) -> dict[str, Any]:
    """Write the files of a part to a folder, if there is one, as they arrive; returns the report that follows them.

    A file that cannot be written is reported as if the stage had failed to write it.
    """
    reported: dict[str, Any] = {}

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        while (message := link.receive()).kind == PIECE:
            yield message.content
        reported.update(message.content)

    failed = None
    for name, group in groupby(arriving(), key=lambda content: content[0]):
        if folder is None or failed or Path(name).stem != part:
            continue
        try:
            write_file(folder / name, (piece.numpy().data for _, piece in group))
        except CheckpointFailed as error:
            failed = str(error)
            if is_full(error):  # this part is lost; the next one will have room
                make_room(folder.parent.parent)
    return {**reported, "failed": reported["failed"] or failed}


@contextmanager
def at_hand(engine: Engine, path: Path, apart: Collection[int], *, whole: bool) -> Iterator[Path]:
    """The folder of a checkpoint, or a copy of it in the processes in `apart`; a collective operation.

    whole: the copy holds the parts of all stages, not only those of this process.
    """
    if not apart:
        yield path
        return
    replica = engine.replicas_here[0]
    first, away = engine.leads, replica * engine.K + engine.here[0] in apart
    own = tuple(f"{part_name(k, of)}." for of in {0, replica} for k in engine.here)
    with tempfile.TemporaryDirectory(prefix="offbeat-checkpoint-") if away else nullcontext(path.parent) as place:
        folder = Path(place) / path.name
        folder.mkdir(exist_ok=not away)
        for name in engine.share(sorted(file.name for file in path.iterdir()) if first else None, 1):
            content = _shared(engine, path / name if first else None)
            if away and (whole or name.startswith(own) or not name.startswith("stage-")):
                write_file(folder / name, content)
            for _ in content:
                pass
        yield folder


def _shared(engine: Engine, path: Path | None) -> Iterator[bytes | memoryview]:
    """The bytes of a file of the first process, in every process."""
    if path is None:
        while (piece := engine.share(None, 1)) is not None:
            yield piece.numpy().data
        return
    with path.open("rb") as file:
        while read := file.read(CHUNK):
            engine.share(torch.frombuffer(bytearray(read), dtype=torch.uint8), 1)
            yield read
    engine.share(None, 1)


def pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[bytearray]:
    """The same bytes in pieces of equal length, except the last.

    >>> [len(piece) for piece in pieces([bytes(CHUNK - 1), b"abc"])] == [CHUNK, 2]
    True
    """
    piece = bytearray()
    for chunk in chunks:
        left = memoryview(chunk).cast("B")
        while len(left):
            taken = left[: CHUNK - len(piece)]
            piece += taken
            left = left[len(taken) :]
            if len(piece) == CHUNK:
                yield piece
                piece = bytearray()
    if piece:
        yield piece

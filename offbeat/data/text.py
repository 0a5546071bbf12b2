"""Text for language models: tokens of any file or folder, cut into windows of `context` tokens.

Tokens are bytes, or those of a tokenizer file of Hugging Face's `tokenizers`. Without a file the text is the Python
source of the installed torch, so that there is real text on every machine; records of a run have its hash.

The first nine tenths of the tokens are for training, the rest for testing. A sample is a window of `context` tokens and
the same window one token later. Each pass over the training tokens starts at an offset of its own, so that windows are
cut elsewhere every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.data.order import Batches, Passes, epoch_order, generator
from offbeat.data.prefetch import prefetch
from offbeat.errors import UserError, first_line, require

TRAINING = 0.9  # share of the tokens
PROBE = 8192  # bytes in which a NUL marks a file as binary
TESTED = 1024  # most windows of a test


@dataclass(frozen=True, eq=False, repr=False)
class Text(Passes):
    """Windows of one long sequence of tokens; inputs and targets are int64 (b, context)."""

    shape: tuple[int]  # the context
    classes: int  # the vocabulary
    train_samples: int  # of an epoch
    test_samples: int
    training: NDArray[Any]  # tokens
    testing: NDArray[Any]
    bytes_per_token: float  # of the test tokens; 1 where tokens are bytes
    sha256: str  # of the text's bytes
    name: str = "text"

    def as_record(self) -> dict[str, Any]:
        """What identifies the text, and how it was cut."""
        return {
            "sha256": self.sha256,
            "tokens": len(self.training) + len(self.testing),
            "vocabulary": self.classes,
            "context": self.shape[0],
            "bytes_per_token": self.bytes_per_token,
        }

    def train_batches(self, parts: list[slice], *, seed: int, epoch: int) -> Batches:
        """Epochs follow each other through passes over all windows, each in an order of its own."""
        starts = self._starts(seed, epoch)
        return prefetch(self._batch(self.training, starts[part]) for part in parts)

    def test_batches(self, parts: list[slice]) -> Batches:
        """Windows spread evenly over the test tokens, in order."""
        (context,) = self.shape
        windows = (len(self.testing) - 1) // context
        starts = np.linspace(0, windows - 1, self.test_samples).astype(np.int64) * context
        return prefetch(self._batch(self.testing, starts[part]) for part in parts)

    def _starts(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Where the windows of an epoch begin."""
        (context,) = self.shape
        windows = _windows(self.training, context)
        found, begin = [], epoch * self.train_samples
        while begin < (epoch + 1) * self.train_samples:
            number, within = divmod(begin, windows)
            taken = min(windows - within, (epoch + 1) * self.train_samples - begin)
            room = len(self.training) - 1 - windows * context
            offset = int(torch.randint(room + 1, (), generator=generator("offset", seed, number)))
            order = epoch_order(windows, seed=seed, epoch=number)[within : within + taken].numpy()
            found.append(order * context + offset)
            begin += taken
        return np.concatenate(found)

    def _batch(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        (context,) = self.shape
        windows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def open_text(
    *,
    folder: Path | None = None,
    shape: tuple[int, ...] = (128,),
    samples: int | None = None,
    tokenizer: Path | None = None,
) -> Text:
    """Windows of `shape[0]` tokens.

    `folder` is a file or a folder of text files, by default the Python source of torch; `samples` is the number of
    windows per epoch, by default all; `tokenizer` is a tokenizer.json, without which tokens are bytes.
    """
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
        raise UserError(f"shape={tuple(shape)} of text: give the number of tokens of a sample, such as (128,)")
    (context,) = shape
    raw = _read(folder)
    tokens, vocabulary, bytes_before = _tokens(raw, tokenizer)
    cut = int(len(tokens) * TRAINING)
    training, testing = tokens[:cut], tokens[cut:]
    if _windows(testing, context) < 1 or _windows(training, context) < 1:
        longest = len(testing) - 2
        shorter = f", or windows of at most {longest} tokens" if longest > 0 else ""
        raise UserError(
            f"{folder or 'the text'} has {len(tokens)} tokens, too few for windows of {context} in its last tenth: "
            f"give a longer text{shorter}"
        )
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise UserError(f"samples={samples!r} of text: give the windows of an epoch, a whole number from 1 up")
    return Text(
        shape=(context,),
        classes=vocabulary,
        train_samples=samples or _windows(training, context),
        test_samples=min(TESTED, _windows(testing, context)),
        training=training,
        testing=testing,
        bytes_per_token=(len(raw) - bytes_before(cut)) / len(testing),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _read(folder: Path | None) -> bytes:
    try:
        return b"".join(path.read_bytes() for path in text_files(folder))
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror}): give a text file") from error


def text_files(folder: Path | None) -> list[Path]:
    """The files of a text, in the order of their paths: a file itself, or all files in a folder but hidden and binary
    ones; None is the Python source of the installed torch."""
    if folder is None:
        source = Path(torch.__file__).parent
        return sorted(source.rglob("*.py"), key=lambda path: path.relative_to(source).as_posix())
    if folder.is_file():
        return [folder]
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    texts = [path for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix()) if _is_text(path)]
    if not texts:
        raise UserError(f"folder {folder} holds no text files: give a text file, or a folder of them")
    return texts


def _windows(tokens: NDArray[Any], context: int) -> int:
    """Whole windows, each with the token after it; one is kept back, so that there is room for offsets."""
    return max(0, (len(tokens) - 1) // context - (1 if len(tokens) > 2 * context else 0))


def _tokens(raw: bytes, tokenizer: Path | None) -> tuple[NDArray[Any], int, Callable[[int], float]]:
    """Tokens, the size of the vocabulary, and a function: the bytes of the text before a token."""
    if tokenizer is None:
        return np.frombuffer(raw, dtype=np.uint8), 256, float
    require(["tokenizers"], f"tokenizer {tokenizer} needs")
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises no other
        raise UserError(
            f"tokenizer {tokenizer} cannot be read ({first_line(error)}): give a tokenizer.json of tokenizers"
        ) from None
    lines = [line.decode(errors="replace") for line in raw.splitlines(keepends=True)]
    encoded = made.encode_batch(lines, add_special_tokens=False)
    ids = np.fromiter((token for line in encoded for token in line.ids), dtype=np.int32)
    if not len(ids):
        raise UserError(f"tokenizer {tokenizer} makes no tokens of this text: give another one")
    tokens = np.cumsum([0, *(len(line.ids) for line in encoded)])
    sizes = np.cumsum([0, *map(len, raw.splitlines(keepends=True))])
    return ids, int(made.get_vocab_size()), lambda token: float(np.interp(token, tokens, sizes))


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(PROBE)
    except OSError:
        return False

"""Image files to pixels: decoding, the random-resized crop of training, the centre crop of testing (Pillow)."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]  # left, top, right, bottom
Size = tuple[int, int]  # height, width

SCALE = (0.08, 1.0)  # of the image's area
RATIO = (3 / 4, 4 / 3)  # width to height
TRIES = 10
MARGIN = (256, 224)  # for testing, a 224 crop is cut from an image resized to 256


def training_pixels(path: str, size: Size, draws: random.Random) -> NDArray[np.uint8]:
    """The image after random-resized crop and a flip with probability 1/2, uint8 (H, W, 3)."""
    from PIL import Image

    image = decode(path)
    box = random_box((image.height, image.width), draws)
    image = image.crop(box).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    if draws.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def testing_pixels(path: str, size: Size) -> NDArray[np.uint8]:
    """The image resized so that it just covers 256/224 of `size`, then cut to it at the centre, uint8 (H, W, 3)."""
    from PIL import Image

    image = decode(path)
    high, wide = covering((image.height, image.width), size)
    image = image.resize((wide, high), Image.Resampling.BILINEAR)
    top, left = round((high - size[0]) / 2), round((wide - size[1]) / 2)
    return np.asarray(image.crop((left, top, left + size[1], top + size[0])))


def decode(path: str) -> Image:
    """The image in RGB; a file that cannot be decoded is a UserError that names it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more for broken files
        reason = " ".join(str(error).split())
        raise UserError(f"cannot decode the image {path}: replace or remove it ({reason})") from error


def random_box(size: Size, draws: random.Random) -> Box:
    """A crop of random area and aspect ratio; after TRIES that do not fit, the centre at the nearest ratio allowed."""
    height, width = size
    for _ in range(TRIES):
        area = height * width * draws.uniform(*SCALE)
        ratio = math.exp(draws.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = draws.randint(0, width - wide), draws.randint(0, height - high)
            return left, top, left + wide, top + high
    # max(1, ...): an image of one pixel's width or height still gives a crop.
    wide = max(1, min(width, round(height * RATIO[1])))
    high = max(1, min(height, round(width / RATIO[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def covering(image: Size, size: Size) -> Size:
    """The image's size after the resize that keeps its aspect ratio and just covers 256/224 of `size`.

    >>> covering((375, 500), (224, 224))
    (256, 341)
    """
    height, width = image
    high, wide = (round(side * MARGIN[0] / MARGIN[1]) for side in size)
    if wide * height >= high * width:  # the width is what binds
        return wide * height // width, wide
    return high, high * width // height

"""What several tests of `offbeat bench` share."""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.studies.bench.rows import BenchSetting

SETTING = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=2)


def texts_in(picture: Path) -> list[str]:
    """The texts of an SVG file."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())

"""One thread a stage in every test, so that bits can be compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # reference.py and cases.py


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)

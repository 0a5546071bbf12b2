"""One thread a stage in every test, so that bits can be compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # reference.py, cases.py, command.py
from command import offbeat  # noqa: F401  a fixture for all

settings.register_profile("offbeat", deadline=None)  # a busy machine is no failure
settings.load_profile("offbeat")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)

"""One thread per stage in every test, so that bits can be compared.

The process that only hands tests out to others (`pytest -n`) loads this file too, hence imports in functions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # reference.py, cases.py, command.py
sys.path.extend(
    str(Path(__file__).parent / folder) for folder in ("cli", "core", "methods", "pipeline")
)  # of other tests
import preloaded
from command import offbeat  # noqa: F401  a fixture for all

preloaded.install()

# Files that take longest, first: a worker takes whole files, and one that is left at the end leaves the others idle.
LONG = (
    "test_launches",
    "test_streams",
    "test_serial",
    "test_engines",
    "test_plan",
    "test_partition_api",
    "test_page",
    "test_replicas",
    "test_reproduce",
    "test_trace",
    "test_compare",
    "test_callbacks",
    "test_page_in_browser",
    "test_runs",
    "test_interpreter",
    "test_resume",
    "test_state",
    "test_recompute",
    "test_contract",
    "test_reproduction_record",
    "test_transformers",
    "test_tied",
    "test_resume_changed",
    "test_batches",
    "test_models",
    "test_failures",
    "test_optimizers",
    "test_torchrun",
    "test_gpt_table",
    "test_examples",
    "test_comparison",
    "test_clipping",
    "test_checkpoints",
    "test_staleness_warmup",
    "test_train",
    "test_cifar",
    "test_pictures",
    "test_bench",
    "test_bench_contenders",
    "test_bench_scaling",
    "test_bench_workers",
    "test_until",
    "test_staleness_page",
    "test_adl_exact",
    "test_links",
    "test_site",
    "test_lock",
    "test_separate_disks",
    "test_hosts",
    "test_tutorial",
    "test_identities",
    "test_tracing",
    "test_timing",
    "test_results",
    "test_queued",
    "test_pipelines",
    "test_tied_transformers",
    "test_text",
    "test_random_programs",
    "test_torture",
    "test_diagnosis",
    "test_layout",
    "test_adding_a_method",
    "test_precision",
    "test_silence",
    "test_network",
    "test_full_disk",
)


def pytest_configure(config: pytest.Config) -> None:
    """A busy machine is no failure, and neither is luck: the same examples every time."""
    if config.getoption("dist", "no") != "no":  # this process runs no tests
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile("offbeat", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("offbeat")


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_this_module_alone() -> None:
    """A collection takes 0.2 seconds with all that torch and others have imported, and next to none without."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)  # one in a hundred collections looks at all objects, not one in ten


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Fork the processes that the package starts from this one (preloaded.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", preloaded.PYTHON)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_unconfigure() -> None:
    preloaded.close()

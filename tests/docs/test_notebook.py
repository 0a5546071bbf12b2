"""The notebook examples/quickstart.ipynb: it runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"


def code() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    assert code()
    assert [cell for cell in code() if cell["outputs"] or cell["execution_count"] is not None] == []


def test_no_line_of_the_notebook_needs_scrolling():
    assert max(len(line.rstrip()) for cell in code() for line in cell["source"]) <= 120


@pytest.mark.slow
def test_the_notebook_runs_and_shows_staleness_timelines_and_the_report(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert not [each for cell in outputs for each in cell if each.output_type in ("stream", "error")]
    shown = [cell[-1].data for cell in outputs]
    assert "'samples': 360" in shown[0]["text/plain"]
    assert shown[1]["text/plain"] == "[2.0, 1.0, 0.0]"
    assert all("<svg" in picture["image/svg+xml"] for picture in shown[2:4])
    assert "report.html" in shown[4]["text/html"]
    assert (tmp_path / "report.html").stat().st_size > 10_000

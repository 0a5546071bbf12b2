"""The shape of the code: imports point one way, and what describes methods needs no torch."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
from pathlib import Path

import pytest
from preloaded import PYTHON

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "offbeat"

# Each may import what stands above it, never what stands below.
ORDER = [
    "call_stack",
    "errors",
    "seeds",
    "ops",
    "interpreter",
    "critical_cycle",
    "correctors",
    "method",
    "kernels",
    "tf32",
    "optim",
    "core",
    "heads",
    "settings",
    "methods",
    "recommended",
    "theory",
    "clock",
    "timeline",
    "graphs",
    "engines",
    "partitioning",
    "models",
    "data",
    "checkpoint",
    "observe",
    "pipeline",
    "callbacks",
    "runs",
    "report",
    "describe",
    "studies",
    "cli",
    "__main__",
]
TORCH_FREE = [
    "call_stack",
    "errors",
    "seeds",
    "ops",
    "interpreter",
    "critical_cycle",
    "recommended",
    "theory",
    "correctors",
    "method",
    "settings",
    "methods",
    "clock",
    "timeline",
    "runs/epochs",
    "runs/recipe",
    "runs/tables",
    "runs/launch",
    "report",
    "describe",
    "checkpoint",
    "studies/runner",
    "studies/training",
    "studies/compare",
    "studies/reproduce",
    "cli",
]


def files(top: str) -> list[Path]:
    folder = PACKAGE / top
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{top}.py"]


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_part_of_the_package_has_its_place():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert (modules | packages) - {"__init__"} == set(ORDER)


def test_imports_point_one_way():
    for position, top in enumerate(ORDER):
        for path in files(top):
            for name in imports(ast.parse(path.read_text())):
                parts = name.split(".")
                if parts[0] == "offbeat" and len(parts) > 1 and parts[1] in ORDER:
                    assert ORDER.index(parts[1]) <= position, f"{path.name} imports {name}"


def test_every_folder_states_what_it_may_import():
    for path in PACKAGE.glob("*/__init__.py"):
        assert "May import" in (ast.get_docstring(ast.parse(path.read_text())) or ""), path


def test_no_two_public_classes_of_the_package_share_a_name():
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert len(found) > 200
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_names_of_tests_are_at_most_80_characters():
    files = (ROOT / "tests").rglob("test_*.py")
    names = [name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert [name for name in names if len(name) > 80] == []


def test_the_folders_of_tests_are_those_of_the_package():
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= {".", "docs", "gpu", *ORDER}


def test_what_describes_methods_imports_no_torch_at_its_top():
    for top in TORCH_FREE:
        for path in files(top):
            module = ast.parse(path.read_text())
            module.body = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
            assert not any(name.split(".")[0] == "torch" for name in imports(module)), path


def test_no_branch_on_a_methods_name_outside_methods():
    for path in PACKAGE.rglob("*.py"):
        if "methods" not in path.parts:
            for quoted in ('method == "', "method == '", '.name == "adl', '.name == "bp'):
                assert quoted not in path.read_text(), path


def test_every_benchmark_imports_names_that_exist_and_its_examples_are_true():
    """The examples were not run; one of them was true on machines of six cores alone."""
    stems = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    examples = f"print(sum(doctest.testmod(module).attempted for module in ({', '.join(stems)})))"
    command = [PYTHON, "-W", "error", "-c", f"import doctest, {', '.join(stems)}\n{examples}"]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit(), done.stdout  # what fails is printed
    assert int(done.stdout) > 0


def test_the_readme_of_the_benchmarks_names_every_script():
    named = re.findall(r"`(\w+\.py)`", (ROOT / "benchmarks/README.md").read_text())
    assert sorted(set(named)) == sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def test_published_tables_are_those_of_their_records():
    command = [PYTHON, ROOT / "benchmarks/results.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


SLOW_EXAMPLES = ("comparison", "huggingface", "several_machines", "small_gpt", "torchrun")
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW_EXAMPLES else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem
    not in ("timm_models", "huggingface_trainer", "lightning_module")  # need packages: docs/test_examples.py
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example):
    done = subprocess.run([PYTHON, "-W", "error", example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("document", ["architecture.md", "choosing.md"])
def test_the_documents_examples_are_true(document):
    failures, tests = doctest.testfile(str(ROOT / "docs" / document), module_relative=False)
    assert tests > 0
    assert failures == 0


def test_the_trace_in_the_architecture_is_drawn_by_the_clock():
    from offbeat.clock import draw
    from offbeat.methods import ADL

    assert "\n".join(draw(ADL(M=2), 3, range(7)).splitlines()[:8]) in (ROOT / "docs/architecture.md").read_text()


def test_the_table_of_parts_has_every_part_in_the_order_of_imports():
    parts = (ROOT / "docs/architecture.md").read_text().split("## The parts of the package")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in parts.splitlines() if line.startswith("| `")]
    assert [name for cell in cells for name in re.findall(r"`(\w+)/?`", cell)] == ORDER[:-1]


def test_every_path_in_the_architecture_exists():
    """Also names of modules with one of their classes or functions, such as `worker.Worker`."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    paths = {found for found in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w/]+(\.(py|html|md)|/)", found)}
    assert len(paths) > 60
    known = [path.relative_to(ROOT).as_posix() for top in ("offbeat", "tests") for path in (ROOT / top).rglob("*")]
    missing = [name for name in paths if not any(f"/{each}".endswith(f"/{name.rstrip('/')}") for each in known)]
    assert [name for name in missing if not (ROOT / name).exists()] == []
    for module, name in re.findall(r"`([a-z_]+)\.([A-Za-z]\w*)`", text):
        sources = [path.read_text() for path in PACKAGE.rglob(f"{module}.py")]
        if name not in ("py", "html", "md") and sources:
            assert any(re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) for source in sources), name

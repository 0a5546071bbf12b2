# make demo    train a small ResNet two ways and compare (sets everything up first)
# make test    everything that must hold before a change lands
# make bench   what the engine costs, as ratios in one run
# make torture kills, bad input, slow links, checkpoints, long runs: an hour or more
# make site    the documentation as a site in build/site
# make slow    tests that take minutes;  make gpu: tests for a machine with a CUDA device

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint pytest bench torture site slow gpu clean
.DEFAULT_GOAL := demo

# constraints.txt pins every version; torch first, so that nothing asks for a newer one
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Offbeat needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[all,dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/offbeat demo

lint: $(READY)
	$(BIN)/ruff format --check --quiet offbeat tests benchmarks examples
	$(BIN)/ruff check offbeat tests benchmarks examples
	$(BIN)/mypy

# compiled modules are kept, whatever the environment says: the tests start many processes that import them
pytest: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# both at once, since mypy uses one core for half a minute
test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint pytest

# processes are started as users start them, not forked (tests/preloaded.py)
slow: $(READY)
	OFFBEAT_TESTS_EXEC=1 $(BIN)/python -m pytest -q -m slow

gpu: $(READY)
	$(BIN)/python -m pytest -q -m gpu

bench: $(READY)
	$(BIN)/python benchmarks/core.py

TORTURES := configs latency overhead soak kills
torture: $(READY)
	@failed=; for each in $(TORTURES); do \
	    $(BIN)/python benchmarks/torture.py $$each --out docs/results/torture-$$each.json || failed="$$failed $$each"; \
	done; if [ -n "$$failed" ]; then echo "not as wanted:$$failed"; exit 1; fi

# apart from what the tests need; the generated pages must be those of the code
site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[docs]'
	$(BIN)/python benchmarks/method_pages.py --check
	$(BIN)/python benchmarks/command_pages.py --check
	$(BIN)/python benchmarks/results.py --check
	$(BIN)/python benchmarks/staleness.py --check
	$(BIN)/mkdocs build --strict --quiet
	@echo "the site is build/site/index.html"

clean:
	rm -rf $(VENV) build/site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make run: the loop on this machine. make test: all tests but those that hold a quiet machine to times: make live. make parity: every layout against one process, as a
# table. Each makes its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# one more than cores, which ranks that wait for each other leave idle for a quarter of the suite's time
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")

# make cases: field reports with known causes, and what the doctor says of them. make prove: ledger against dry run,
# every layout of the parity matrix and large ones of real models.
.PHONY: run test live parity cases prove check bench bench-peer venv clean

run: $(STAMP)
	$(BIN)/shardwright loop

# bytecode is kept, or every process that tests start would compile the package anew
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

live: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m live

parity: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/parity.py

cases: $(STAMP)
	$(BIN)/python scripts/cases.py

check: $(STAMP)
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/ruff check src tests scripts
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

prove: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/prove.py

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/bench.py

bench-peer: $(STAMP)
	$(BIN)/python scripts/bench_peer.py

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[train,hf,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-peer build dist src/*.egg-info

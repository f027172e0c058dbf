# The door: `make run` and `make test` need git, python3 (3.11 or newer, with venv), make and g++.
PYTHON ?= python3
BIN := .venv/bin
# Three processes for two cores, because many tests wait. Each takes whole files, so that the models of a file are made once.
TOGETHER := --numprocesses 3 --dist loadfile

# Tests start many interpreters, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-gpu test-lowest quick lint bench wheels clean

run: .venv/.installed
	$(BIN)/deltic run "What is the capital of France?"

# Lint takes one core for a while. It prints a few lines amid those of the tests; if it fails, make names it at the end.
test: .venv/.installed-dev
	$(MAKE) --jobs 2 --keep-going quick lint

quick: .venv/.installed-dev
	$(BIN)/python -m pytest $(TOGETHER)

test-all: .venv/.installed-all lint
	$(BIN)/python -m pytest $(TOGETHER) -m "slow or not slow"

# With whatever Python and torch are there: those that find a CUDA device, and engines on it. As many at once as the
# cards have memory for.
PROCESSES ?= auto
ON_GPU := --numprocesses $(PROCESSES) -p no:benchmark

# They measure times and a card's memory, or take all cards.
ALONE := tests/test_cuda_density.py tests/test_cuda_memory.py tests/test_cuda_tensor_parallel.py tests/test_cuda_warm_up.py

test-gpu: deltic/ops/cpu/libdeltic.so
	$(PYTHON) -m pytest $(ON_GPU) --dist loadfile $(filter-out $(ALONE),$(wildcard tests/test_cuda_*.py))
	$(PYTHON) -m pytest -p no:benchmark $(ALONE)
	$(PYTHON) -m pytest $(ON_GPU) --device cuda tests/test_same_answer.py tests/test_lora.py
	$(PYTHON) -m pytest $(ON_GPU) --card-memory 5 --maxschedchunk 1 tests/test_sanitizer.py

# what an install compiles, for a checkout that is not installed
deltic/ops/cpu/libdeltic.so: hatch_build.py $(wildcard csrc/*)
	$(PYTHON) hatch_build.py

# A core of the tests with the lowest versions that pyproject.toml allows, in an environment of their own.
test-lowest: .venv/.installed-dev
	$(BIN)/python tests/lowest_versions.py

lint: .venv/.installed-dev
	$(BIN)/ruff check deltic tests examples bench
	$(BIN)/mypy

# The sdist and the wheels of all platforms, in dist/. zig compiles them, for this machine, too.
wheels: .venv/bin/python
	$(INSTALL) build
	$(BIN)/python hatch_build.py --wheels

bench: .venv/.installed-dev
	$(BIN)/python bench/run.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*)

.venv/.installed: $(SOURCES) | .venv/bin/python
	$(INSTALL) --editable .
	touch $@

# not after .installed: each installation compiles csrc/
.venv/.installed-dev: $(SOURCES) | .venv/bin/python
	$(INSTALL) --editable ".[dev,tvm]"
	touch .venv/.installed $@

# instructor's own dependencies are there, if newer than it allows
.venv/.installed-all: pyproject.toml constraints.txt .venv/.installed-dev
	$(INSTALL) --editable ".[dev,tvm,clients,fuzz,cluster]"
	$(INSTALL) --no-deps instructor
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

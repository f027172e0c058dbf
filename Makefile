# The door: `make run` and `make test` need git, python3 (3.11 or newer, with venv), make and g++.
PYTHON ?= python3
BIN := .venv/bin
# Two processes, which take turns at whole files: the models that a file's tests share are made once.
TOGETHER := --numprocesses 2 --dist loadfile

.PHONY: run test test-all test-gpu lint bench clean

run: .venv/.installed
	$(BIN)/deltic run "What is the capital of France?"

test: .venv/.installed-dev lint
	$(BIN)/python -m pytest $(TOGETHER) -m "not slow and not alone"
	$(BIN)/python -m pytest -m "alone and not slow"

test-all: .venv/.installed-all lint
	$(BIN)/python -m pytest $(TOGETHER) -m "not alone"
	$(BIN)/python -m pytest -m "alone"

# With whatever Python and torch are there: those that find a CUDA device, and engines on it. As many at once as a card has
# memory for.
PROCESSES ?= auto
ON_GPU := --numprocesses $(PROCESSES) -p no:benchmark

test-gpu: deltic/ops/cpu/libdeltic.so
	$(PYTHON) -m pytest $(ON_GPU) --dist loadfile $(wildcard tests/test_cuda_*.py)
	$(PYTHON) -m pytest $(ON_GPU) --device cuda tests/test_same_answer.py
	$(PYTHON) -m pytest $(ON_GPU) --card-memory 5 --maxschedchunk 1 tests/test_sanitizer.py

# what an install compiles, for a checkout that is not installed
deltic/ops/cpu/libdeltic.so: hatch_build.py $(wildcard csrc/*)
	$(PYTHON) hatch_build.py

lint: .venv/.installed-dev
	$(BIN)/ruff check deltic tests examples bench
	$(BIN)/mypy

bench: .venv/.installed-dev
	$(BIN)/python bench/run.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,tvm]"
	touch $@

# instructor's own dependencies are there, if newer than it allows
.venv/.installed-all: pyproject.toml constraints.txt .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,tvm,clients,fuzz]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps instructor
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

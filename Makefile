# make demo | test | lint | bench | format | clean
# Each target makes its own environment in .venv first. PYTHON=python3.12 chooses the interpreter,
# PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes the small CPU build of torch.

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-installed

.PHONY: install demo test lint format bench clean
.DEFAULT_GOAL := test

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); name one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: stepwell needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "make: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[demo,test,dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/stepwell demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.many_tensors
	$(BIN)/python -m benchmarks.bounded
	$(BIN)/python -m benchmarks.kill
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.derived
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.remote

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

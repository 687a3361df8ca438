# One virtual environment serves every target. The stamp is written when an installation is complete; a .venv without it
# (interrupted, copied from elsewhere, its Python gone) is made anew, one that is only older than its inputs is updated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Waiting OpenMP threads that spin make two processes on two cores several times slower.
export OMP_WAIT_POLICY ?= PASSIVE

usable := $(shell test "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -m pip --version 2>/dev/null)
ifeq ($(usable),)
.PHONY: $(STAMP)
endif

.PHONY: quickstart results overopt compare lora memory-table same-run same-numbers torture test check

quickstart results overopt compare lora: $(STAMP)
	$(BIN)/python -m examples.mini_farm.$@

memory-table: $(STAMP)
	$(BIN)/python -m examples.memory_table

# Kills runs at every kind of moment and compares what they leave with a run left alone; half an hour on two cores.
torture: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture

same-run: $(STAMP)
	$(BIN)/python -m examples.same_run

# What a change that claims to move no number is held to; BASE is the commit to compare the working tree with.
BASE ?= a7dd063
same-numbers: $(STAMP)
	$(BIN)/python -m tests.same_numbers $(BASE)

test: check
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# setuptools goes in first, under the same constraints, and builds the package without a second, unconstrained environment.
$(STAMP): setup.cfg constraints.txt
	$(if $(usable),,$(PYTHON) -m venv --clear $(VENV))
	rm -f $@
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[test]'
	echo "$(CURDIR)" > $@

# make demo, make test: each sets up what it needs first. Needs Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=

.PHONY: setup demo test check-style fast bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxslm needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

# Torch checkpoints of all three models: inspected, converted, proven equal, converted back. Then a
# small Ripple is trained, taken to torch with its optimizer, measured, and made to write.
demo: setup
	$(BIN)/python -m convert.demo demo-out

# Style, types and every test.
test: check-style
	$(BIN)/python -m pytest -q -n 2

check-style: setup
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(BIN)/basedpyright --level error

# Against torch, side by side; see docs/performance.md.
bench: setup
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) demo-out bench-out build *.egg-info

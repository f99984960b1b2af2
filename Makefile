# make run: set up, then the main job. make test: set up, then the tests.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
SOURCES := CMakeLists.txt pyproject.toml $(wildcard kernels/cpu/* kernels/include/glimmer/* runtime/*)

.PHONY: run test test-full lint format setup clean

run: setup
	$(BIN)/glimmer demo

test: setup
	$(BIN)/python -m pytest -q -m "not slow"

test-full: setup
	$(BIN)/python -m pytest -q

lint: $(VENV)/.lint
	$(BIN)/ruff check python lowering tests
	$(BIN)/ruff format --check python lowering tests
	$(BIN)/clang-format --dry-run --Werror $(wildcard kernels/include/glimmer/*.h kernels/cpu/*.h kernels/cpu/*.cpp kernels/cpu/*.cc runtime/*.h runtime/*.cpp)
	$(BIN)/mypy python/glimmer_ops lowering

format: $(VENV)/.lint
	$(BIN)/ruff check --fix-only -q python lowering tests
	$(BIN)/ruff format -q python lowering tests
	$(BIN)/clang-format -i $(wildcard kernels/include/glimmer/*.h kernels/cpu/*.h kernels/cpu/*.cpp kernels/cpu/*.cc runtime/*.h runtime/*.cpp)

setup: $(VENV)/.built

# torch is named alone and first: a looser requirement would pull the CUDA build.
$(VENV)/.deps: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q scikit-build-core==1.1.2 pybind11==3.1.0 "cmake>=3.28" ninja executorch==1.5.1
	touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install -q --no-build-isolation -e ".[test,transformers]"
	touch $@

$(VENV)/.lint: $(VENV)/.built
	$(BIN)/python -m pip install -q ".[lint]" --no-build-isolation --no-deps
	touch $@

clean:
	rm -rf build out

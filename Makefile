# Needs python3 (with venv and its C headers) and a C++ compiler; CMake, Ninja and, where there is none, nvcc come
# from PyPI. CMAKE_ARGS or PRESET choose the kernels: make demo PRESET=default
PYTHON ?= python3
VENV ?= .venv
PRESET ?= smoke
CMAKE_ARGS ?= -DATOMR_CUTLASS_PRESET=$(PRESET)
export CMAKE_ARGS

BIN := $(VENV)/bin
CPP_SOURCES := $(shell find cpp tests/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' 2>/dev/null)

.PHONY: demo test lint format docs wheel wheels test-wheels clean

demo: $(BIN)/pip
	$(BIN)/pip install .
	$(BIN)/atomr-cutlass demo

test: $(BIN)/pip
	$(BIN)/pip install '.[test]'
	$(BIN)/python -m generator.toolchain --requires | xargs -r $(BIN)/pip install --quiet
	$(BIN)/cmake -S . -B build/tests -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
	    -DPython_EXECUTABLE="$(abspath $(BIN))/python" -DATOMR_CUTLASS_TESTS=ON $(CMAKE_ARGS)
	$(BIN)/cmake --build build/tests
	$(BIN)/ctest --test-dir build/tests --output-on-failure --no-tests=error
	$(BIN)/python -m pytest

lint: $(BIN)/pip
	$(BIN)/pip install --quiet --group dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(BIN)/pip
	$(BIN)/pip install --quiet --group dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

docs: $(BIN)/pip
	$(BIN)/pip install --quiet --group docs
	$(BIN)/mkdocs build --strict

wheel: $(BIN)/pip
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

# The package without kernels, and a wheel of kernels for each arch: make wheels ARCHS="80;90a" PRESET=default
ARCHS ?= 80;90a
wheels: $(BIN)/pip
	$(BIN)/python tools/build_wheels.py --archs "$(ARCHS)" --preset "$(PRESET)" --out dist

test-wheels: $(BIN)/pip
	$(BIN)/pip install --quiet '.[test]'
	$(BIN)/python -m pytest tests/build/test_wheels.py

clean:
	rm -rf build dist site

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# Everything runs in .venv, made from the project's own files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Processes that run tests, a file at a time: in the order of their names, since many short files stand at the end of it.
# Each also starts pools of two to four ranks. What a busy machine may break runs alone afterwards.
WORKERS ?= 3
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
TESTS := $(PYTEST) -m "not timing" --ignore tests/docs
TIMING := $(BIN)/pytest -m timing `grep -rl --include='test_*.py' mark.timing tests`
unexport PYTHONDONTWRITEBYTECODE  # else each of the processes compiles all that it imports

.PHONY: demo test test-pairs test-all check docs bench gpu clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

# The library: every value of each feature, and of rows that take long some.
test: $(READY)
	$(TESTS)

# Every pair of values, and what busy machines may break or other tests check in parts: tests of time, thorough ones.
test-pairs: $(READY)
	FPIPE_TESTS=pairs $(TESTS)
	FPIPE_TESTS=pairs $(TIMING)

# Every product of them.
test-all: $(READY)
	FPIPE_TESTS=all $(TESTS)
	FPIPE_TESTS=all $(TIMING)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# All that users read: the site, in build/docs, which needs no network and where a warning is an error; then every code
# block of the pages, the examples and the benchmarks run.
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"
	$(PYTEST) -m "not timing" tests/docs

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.simulate
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.autodiff
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.optim
	$(BIN)/python -m benchmarks.peers
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mesh
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.timed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.frozen
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.strategies
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.partitions
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.scale
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.lengths
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.periods
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.generate
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.slices
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.offload
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.vocabulary
	$(BIN)/python -m benchmarks.orders
	$(BIN)/python -m benchmarks.tab
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.in_memory
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.restarts

# Needs no .venv: where there is none, or PYTHON is given, it takes that Python's own torch. PARTS has more options.
ANY_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu: ; CUDA_DEVICE_MAX_CONNECTIONS=32 $(ANY_PYTHON) -m benchmarks.gpu --out gpu.json $(PARTS)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

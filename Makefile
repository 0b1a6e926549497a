# Every target does its own set-up, says what it does, and is quick the second time.
PYTHON ?= python3.11
BIN := .venv/bin
TEST_PROCESSES ?= 2

.PHONY: help setup up test fast check format bench gpu soak lock image-locks clean

help:
	@echo 'make setup    the environment (.venv/) and the chat model'
	@echo 'make up       a mesh on this machine; options in ARGS="--workers 2"'
	@echo 'make test     all tests, in TEST_PROCESSES=2; pytest options in ARGS="-k name"'
	@echo 'make fast     those that start neither an SGLang nor a mesh of processes: in a minute'
	@echo 'make check    format, lint, types, layers'
	@echo 'make format   mend what the formatter and the linter can mend'
	@echo 'make bench    the benchmarks; a name and options in ARGS'
	@echo 'make gpu      the tests and speeds that need a GPU, on this machine'"'"'s; options in ARGS="--json FILE"'
	@echo 'make soak     whole matrices, and many more seeds and examples; moves in a real mesh for SOAK_MINUTES=10'
	@echo 'make lock     resolve the dependencies anew into requirements.lock'
	@echo 'make image-locks  compose/requirements/ out of requirements.lock'
	@echo 'make clean    remove what was made here (the package cache stays)'

setup:
	@$(PYTHON) scripts/environment.py

up: setup
	@exec $(BIN)/meshift up $(ARGS)

test: setup
	@$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --no-loadscope-reorder $(ARGS)

fast: setup
	@$(BIN)/pytest -m 'not sglang and not slow' --numprocesses $(TEST_PROCESSES) --no-loadscope-reorder $(ARGS)

check: setup
	@failed=; \
	for tool in 'ruff format --check .' 'ruff check .' mypy lint-imports 'python scripts/lint_services.py'; do \
	  echo "== $$tool"; $(BIN)/$$tool || failed="$$failed, $$tool"; \
	done; \
	if [ -n "$$failed" ]; then echo "make check failed: $${failed#, }"; exit 1; fi

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup
	@$(BIN)/meshift bench $(ARGS)

gpu: setup
	@$(BIN)/python scripts/gpu.py $(ARGS)

soak: setup
	@$(BIN)/pytest -m 'soak or hypothesis' --hypothesis-profile default $(ARGS)

lock: setup
	@$(BIN)/python scripts/lock.py

image-locks: setup
	@$(BIN)/python scripts/image_locks.py

clean:
	rm -rf .venv .models .meshift build dist results src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

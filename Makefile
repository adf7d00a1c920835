# Every target but help and clean sets up a local virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Real data sets are read from a folder beside the checkout if it exists, otherwise from the user's cache.
FEDSTRATA_DATA ?= $(wildcard $(abspath ../shared/data))
export FEDSTRATA_DATA
PYTEST_WORKERS ?= 2

.PHONY: help demo test test-slow test-deploy lint stubs bench clean
help:
	@echo "make demo          train on built-in data: table, picture and models in out/demo (under a minute)"
	@echo "make test          run the tests, without the slow ones (about nine minutes on two cores)"
	@echo "make test-slow     run the slow tests; lint, test and test-slow are the whole CI"
	@echo "make test-deploy   test every algorithm and fault over real Flower, and all attacks (about 45 minutes); writes docs/deploy_log.md"
	@echo "make lint          check format, lint and types"
	@echo "make stubs         write the .pyi stubs with the public names; run it after adding an algorithm"
	@echo "make bench         run the benchmarks and write docs/benchmarks"
	@echo "make clean         remove the virtual environment, out/ and caches"

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/fedstrata run clinics --out out/demo --force

test: $(READY)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile -m slow tests

test-deploy: $(READY)
	FEDSTRATA_TEST_DEPLOY=full $(BIN)/python -m pytest -n 2 --dist loadfile tests/attacks tests/deploy/flower --junitxml=out/deploy.xml
	$(BIN)/python tests/support/deploy_log.py docs/deploy_log.md out/deploy.xml

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

stubs: $(READY)
	$(BIN)/python tools/stubs.py

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .hypothesis

# make demo | test | test-deploy | lint | bench: each sets up a local virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Real data sets lie beside the checkout where that folder exists; otherwise the user's cache is used.
FEDSTRATA_DATA ?= $(wildcard $(abspath ../shared/data))
export FEDSTRATA_DATA
PYTEST_WORKERS ?= 2

.PHONY: help demo test test-slow test-deploy lint stubs bench clean
help:
	@echo "make demo    train on embedded data: table and picture in out/demo (under a minute)"
	@echo "make test    run the tests (about twenty minutes on two cores)"
	@echo "make test-slow   run the tests that take long; make test and make test-slow are all of CI"
	@echo "make test-deploy   every algorithm and every fault over real Flower (most of an hour); writes docs/deploy_log.md"
	@echo "make lint    format check, lint and types"
	@echo "make stubs   list the public names for editors and type checkers, after adding an algorithm"
	@echo "make bench   run the benchmarks and write docs/benchmarks"

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
	FEDSTRATA_TEST_DEPLOY=full $(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy/flower --junitxml=out/deploy.xml
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

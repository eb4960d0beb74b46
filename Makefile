# make demo | setup | test | test-fast | test-long | lint | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIMIT := timeout --kill-after=30

.PHONY: demo setup test test-fast test-long lint clean

demo: $(VENV)/installed ## install, then train a small model on Shakespeare and 红楼梦 before your eyes
	@$(BIN)/danlu train shakespeare

setup: $(VENV)/installed ## only install

test: $(VENV)/installed-dev ## lint, types, storeys and every test that is not long (limit: 20 minutes)
	$(LIMIT) 1200 $(BIN)/python -m pytest -m "not long"

test-fast: $(VENV)/installed-dev ## what can be known in two minutes
	$(LIMIT) 240 $(BIN)/python -m pytest -m "not long and not slow"

test-long: $(VENV)/installed-dev ## soaks, real models, long benches
	$(LIMIT) 7200 $(BIN)/python -m pytest -m long

lint: $(VENV)/installed-dev
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tokenizers]'
	@touch $@

$(VENV)/installed-dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tokenizers,dev]'
	@touch $@ $(VENV)/installed

# `make demo` and `make test` set up everything they need in .venv; the second time they start at once.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: demo test check setup clean

demo: $(STAMP)
	$(VENV)/bin/specdec demo

test: $(STAMP)
	scripts/test -n logical --maxprocesses 4

check: $(STAMP)
	scripts/check

setup: $(STAMP)

$(STAMP): requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("specdec needs Python 3.11 or newer, got " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/lock.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

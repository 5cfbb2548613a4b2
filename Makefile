# One word to do each thing. `make` alone lists them.
# PYTHON names the interpreter that .venv is built with; after that only .venv is used.
# ARGS goes to pytest:  make test ARGS="-x tests/kernel"

PYTHON ?= python3
UV ?= uv
RUN := .venv/bin/python
PYTEST := $(RUN) -m pytest
# Hashes for every platform, and no address of any registry: no header, no index lines, no annotations.
COMPILE := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test check soak model bench lock clean runtime dev
.NOTPARALLEL:

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: runtime  ## watch a paused worker wake up and be refused (under a minute after set-up)
	@.venv/bin/fencepost demo

test: dev  ## every test but the long forms, in two processes (within 10 minutes)
	@sh tools/servers.sh $(PYTEST) -m "not soak" -n 2 $(ARGS)

check: dev  ## lint, format, types, the arrows between layers, generated docs
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) .venv/bin/lint-imports --no-logo
	@if [ -f tools/generate_docs.py ]; then set -x; $(RUN) tools/generate_docs.py --check; fi

soak: dev  ## the long forms of the cases
	@sh tools/servers.sh $(PYTEST) -m soak $(ARGS)

model: dev  ## search the kernel's states within larger bounds (long)
	$(RUN) -m tests.model --large

bench: dev  ## cycles per second on SQLite, beside a bare loop that writes the same rows
	$(RUN) benchmarks/cycle.py --store sqlite

lock:  ## renew requirements/*.lock from pyproject.toml (needs uv)
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: pip install uv, or UV=/path/to/uv"; exit 1; }
	$(UV) pip compile pyproject.toml --group build $(COMPILE) --output-file requirements/runtime.lock
	$(UV) pip compile pyproject.toml --group build --group dev --constraint requirements/runtime.lock $(COMPILE) \
		--output-file requirements/dev.lock

clean:  ## remove .venv, caches and built files
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis mutants
	find src tests tools benchmarks docs examples -name __pycache__ -type d -exec rm -rf {} + 2>/dev/null || true

runtime dev:
	@PYTHON="$(PYTHON)" sh tools/setup.sh $@

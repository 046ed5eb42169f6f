.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast lint bench clean

VENV := .venv/bin
C_FILES := $(wildcard bpf/*.c bpf/*.h)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing: packages, .venv, the lab kernel
	scripts/setup

demo: setup ## show Stellar at work on soft-RoCE
	scripts/lab run -- scripts/demo

test: setup ## everything: lint, the tests here, the tests that need rxe
	$(MAKE) --no-print-directory lint
	scripts/test

test-fast: ## the tests that need no lab kernel
	scripts/setup --no-lab
	scripts/test --fast

lint: ## formatting, style and types
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy
ifneq ($(C_FILES),)
	$(VENV)/clang-format --dry-run -Werror $(C_FILES)
endif

bench: setup ## nanoseconds per packet of each hook
	$(VENV)/controller bench dataplane

clean: ## remove .venv and what tools leave behind; the lab kernel's cache stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

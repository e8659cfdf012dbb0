.DEFAULT_GOAL := help
.PHONY: help install test lint format types demo ci

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: ## Install the package with everything for development, and the pre-commit hooks
	pip install -e '.[dev]' && pre-commit install

test: ## Run the tests
	pytest

lint: ## Check style
	ruff format --check . && ruff check .

format: ## Mend style
	ruff format . && ruff check --fix .

types: ## Check types
	mypy

demo: ## Train and probe a small model on the embedded scenes
	stop-mim demo

ci: ## Run what CI runs, in a fresh environment
	.ci/run

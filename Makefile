.DEFAULT_GOAL := help
.PHONY: help install test lint format types docs demo ci

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: ## Install the package for development, with the pre-commit hooks
	pip install -e '.[dev]' && pre-commit install

test: ## Run the tests
	pytest

lint: ## Check style
	ruff format --check . && ruff check .

format: ## Fix style
	ruff format . && ruff check --fix .

types: ## Check types
	mypy

docs: ## Build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

demo: ## Train and probe a small model on synthetic scenes
	stop-mim demo

ci: ## Run what CI runs, in a fresh environment
	.ci/run

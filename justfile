# The tasks of this repository: `just` lists them.
# They use the active environment, or .venv.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

[private]
default:
    @just --list --unsorted

# Format, lint and words
lint:
    ruff check .
    ruff format --check .
    python -m docs.language

# Fix and format what ruff can
format:
    ruff check --fix .
    ruff format .

# Check types strictly
types:
    mypy

# Check which layer imports which
layers:
    lint-imports --no-logo

# Run the default tests, or some: just test tests/unit -k placement
test *ARGS:
    python -m pytest {{ ARGS }}

# Write the generated parts of the pages, and the pictures
generate:
    python -m docs.generator --demo

# Not --quiet, which keeps MkDocs from counting warnings.

# Build the site into site/; fails on wrong links, navigation or generated parts
docs:
    python -m docs.generator --check
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# Serve the site while you write
docs-serve:
    mkdocs serve

# A cluster of real programs to play on, as root: just realnode up, shell [COMMAND], down
realnode *ARGS:
    python -m tests.realnode {{ ARGS }}

# Count the API requests of an agent
bench:
    python bench/api_requests.py

# Everything to pass before a commit
check: lint types layers docs test

# Everything, on a clean clone and a bare machine
ci:
    .ci/run

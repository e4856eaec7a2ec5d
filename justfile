# Everything that is done to this repository by hand or by CI: `just` lists it.
# Takes the programs of the environment that is active, or of .venv.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

[private]
default:
    @just --list --unsorted

# Format and lint
lint:
    ruff check .
    ruff format --check .

# Put what a program can put into the right form
format:
    ruff check --fix .
    ruff format .

# Types, strictly
types:
    mypy

# Who may import whom
layers:
    lint-imports --no-logo

# The tests; or some: just test tests/unit -k placement
test *ARGS:
    python -m pytest {{ ARGS }}

# Write anew what pages have from the code, and the pictures
generate:
    python docs/generate.py
    python -m docs.generator --demo

# Not --quiet, which keeps MkDocs from counting warnings.

# The site, into site/; fails where links, navigation or generated parts are wrong
docs:
    python -m docs.generator --check
    NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# The site while writing
docs-serve:
    mkdocs serve

# What an agent asks of the API
bench:
    python bench/api_requests.py

# What a change must pass before it is committed
check: lint types layers docs test

# Everything, on a clean clone and a bare machine: an hour
ci:
    .ci/run

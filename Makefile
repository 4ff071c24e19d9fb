# `make demo` and `make test` are all a new machine needs; `make install` alone makes .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo docs test test-nfs test-s3 lint format type check clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/raysvc demo

# The site in site/, or while writing: .venv/bin/mkdocs serve
docs: install
	$(BIN)/mkdocs build --strict

test: install
	$(BIN)/python -m pytest

# Two guests with a real kernel NFS client; needs Debian's user-mode-linux and nfs-ganesha, and says so when they are missing.
test-nfs: install
	RAYSVC_TEST_NFS=1 $(BIN)/python -m pytest tests/nfs

# The cache on an S3 server of yours instead of moto: its endpoint in RAYSVC_TEST_S3, and the AWS keys of a user who may make a bucket.
test-s3: install
	@test -n "$$RAYSVC_TEST_S3" || { echo "error: set RAYSVC_TEST_S3 to an endpoint, like http://127.0.0.1:9000"; exit 2; }
	$(BIN)/python -m pytest tests/cache

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: install
	$(BIN)/mypy

check: lint type test

clean:
	rm -rf .venv .raysvc runs build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

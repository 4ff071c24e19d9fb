# `make demo` installs what running needs, `make test` what testing needs, both in .venv.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.installed
DEV := .venv/.installed-dev
COVER ?= 95
PURE := chat cache plan collate media
# Number of processes for either tier; each has its own Ray and runs whole files. With two, a third of two cores is idle.
JOBS ?= 3
# Whole files in the order of tests/conftest.py; by itself xdist begins with the files of many tests.
XDIST = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Python that may not write byte code compiles the package again in every test process and every Ray worker.
# An empty value means unset to Python, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install dev demo docs gpu test test-long test-versions coverage test-nfs test-s3 lint format type check clean

install: $(RUN)

dev: $(DEV)

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $(RUN)

$(DEV): $(RUN)
	$(PIP) --editable '.[dev]'
	touch $(DEV)

demo: install
	$(BIN)/raysvc demo

# The site in site/, or while writing: .venv/bin/mkdocs serve
docs: dev
	$(BIN)/mkdocs build --strict

# Slow tests are in test-long: kills at full speed, autoscaling, submitted jobs, trained models. Property tests are in both:
# the first tier tries an eighth of their examples (tests/conftest.py).
test: dev
	$(BIN)/python -m pytest -m "not slow" $(XDIST) --durations=10

# With three, Rays that tests start beside their session's are now and then not up in the 30 s that Ray gives them.
test-long: JOBS := 2
test-long: dev
	$(BIN)/python -m pytest -m "slow or hypothesis" $(XDIST) --timeout=600 --durations=10

# Coverage of lines and branches of each package that decides, from the tests that need no Ray.
coverage: dev
	$(BIN)/python -m pytest -m "not slow and not ray" $(PURE:%=tests/%) tests/test_ragged.py \
	  $(PURE:%=--cov=raysvc/%) --cov-branch --cov-report=term:skip-covered --cov-fail-under=$(COVER)
	for room in $(PURE); do echo $$room; $(BIN)/coverage report --include="raysvc/$$room/*" --format=total --fail-under=$(COVER) || exit 2; done

# Two guests with a real kernel NFS client; needs Debian's user-mode-linux and nfs-ganesha, and says so if they are missing.
test-nfs: dev
	RAYSVC_TEST_NFS=1 $(BIN)/python -m pytest tests/nfs

# The cache on your own S3 server instead of moto: its endpoint in RAYSVC_TEST_S3, and the AWS keys of a user who may create a bucket.
test-s3: dev
	@test -n "$$RAYSVC_TEST_S3" || { echo "error: set RAYSVC_TEST_S3 to an endpoint, like http://127.0.0.1:9000"; exit 2; }
	$(BIN)/python -m pytest tests/cache tests/actors/test_owned_state.py tests/actors/test_no_room.py tests/client/test_asleep.py tests/client/test_journal_urls.py

# On a machine with a CUDA device, in at most eight minutes: what staging does there, as one JSON object and a table.
gpu: dev
	$(BIN)/python benchmarks/gpu.py

# The lowest and the newest versions that pyproject.toml allows, on every Python 3.11 or newer that can be had: some 2 GB each, in .versions.
test-versions: dev
	$(BIN)/pip install --quiet uv
	$(BIN)/python tests/versions.py

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: dev
	$(BIN)/mypy

check: lint type test test-long

clean:
	rm -rf .venv .raysvc runs build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

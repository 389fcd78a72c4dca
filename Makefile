# A newcomer needs only `make demo` and `make test`; each installs its requirements.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP_VERSION := 26.3
# The first interpreter that is new enough; `make PYTHON=/path/to/python3.13 ...` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)

export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help
help: ## List the targets
	@echo "Understudy: make TARGET [NAME=VALUE ...]"
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 21
	@echo
	@echo "  make demo KEEP=1     leave the service running afterwards"
	@echo "  make demo OPEN=1     open its page in the browser"
	@echo "  make demo SCRIPT=1   serve and score what a plain Keras script writes"
	@echo "  make test T='tests/checkpoints -k pinned'   run some of the tests"
	@echo "  make bench BENCH=quick                      does it all run? one round of half a second each"
	@echo "  make bench-peers ONLY=envoy,triton          measure some of the servers"

# Every file that is installed has a hash in requirements/, and is a wheel, so that nothing else runs while it is installed.
HASHED = --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: $(FROM_WHEELHOUSE)

.PHONY: setup
setup: $(VENV)/.installed ## Install everything into .venv (other targets do this on demand)

$(VENV)/.installed: pyproject.toml clients/pyproject.toml $(addprefix requirements/,pip.txt build.txt development.txt) hatch_build.py $(wildcard proto/understudy/*/*.proto)
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 was found on PATH. Install one, or say: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@echo "Setting up $(VENV) with $$($(PYTHON) --version); this takes a minute or two the first time."
	@$(PYTHON) -m venv $(VENV) || { \
		echo "venv failed. On Debian and Ubuntu it is a package of its own: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install $(HASHED) --requirement requirements/pip.txt
	$(BIN)/python -m pip install $(HASHED) --requirement requirements/development.txt
	$(BIN)/python -m pip download $(HASHED) --dest $(VENV)/build --requirement requirements/build.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --find-links $(VENV)/build --editable .
	@touch $@

.PHONY: demo
demo: $(VENV)/.installed ## Train on two workers beside the evaluator, watch it score, swap and serve
	$(BIN)/understudy demo $(if $(KEEP),--keep) $(if $(SCRIPT),--script) $(if $(OPEN),--open)

COMPILED = proto clients checkpoints experiments trainer evaluator service cli tests/soak tests/startup tests/testkit

WORKERS ?= 4

.PHONY: test
test: PYTEST_SELECTION = $(or $(T),-m "not long")
test: test-tools ## Run the tests but the long ones, in WORKERS=4 processes (about 10 minutes on two cores)
	$(PYTEST)

.PHONY: test-long
test-long: PYTEST_SELECTION = -m long $(T)
test-long: test-tools ## Run the long tests: whole jobs, fleets, load, programs of others (about 12 minutes)
	$(PYTEST)

PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 $(PYTEST_SELECTION)

.PHONY: test-tools
test-tools: $(VENV)/.installed
	tools/fetch_prometheus.sh
	tools/fetch_h2load.sh || echo "so the tests with h2load will be skipped" >&2
	tools/fetch_browser.sh || echo "so the tests of the page in a browser will be skipped" >&2
	for client in triton tfserving node manifests; do \
		tools/fetch_clients.sh $$client || echo "so the tests with $$client will be skipped" >&2; done
	$(BIN)/python -m compileall -q $(COMPILED) # once; the processes of pytest would all do it at the same time

WHEELHOUSE ?= wheelhouse
# If there is a wheelhouse, install from it without network access.
FROM_WHEELHOUSE = $(if $(wildcard $(WHEELHOUSE)/tensorflow-*.whl),--no-index --find-links $(WHEELHOUSE))

.PHONY: wheelhouse
wheelhouse: ## Download what `make test-gpu` installs, with CUDA's libraries (about 4 GB), into ./wheelhouse
	$(PYTHON) -m venv $(WHEELHOUSE)/.pip
	$(WHEELHOUSE)/.pip/bin/pip install $(HASHED) --requirement requirements/pip.txt
	for list in pip build development image-cuda; do \
		$(WHEELHOUSE)/.pip/bin/pip download $(HASHED) --dest $(WHEELHOUSE) --requirement requirements/$$list.txt; done
	rm -rf $(WHEELHOUSE)/.pip

$(VENV)/.cuda: $(VENV)/.installed
	$(BIN)/python -m pip install $(HASHED) --requirement requirements/image-cuda.txt
	@touch $@

.PHONY: test-gpu
test-gpu: $(VENV)/.cuda ## Run the tests that need GPUs, on all GPUs of this machine (docs/how-to/gpus.md)
	UNDERSTUDY_TEST_GPUS=1 $(BIN)/pytest -v -rs -s tests/gpu $(T)

.PHONY: test-dependencies
test-dependencies: $(VENV)/.installed ## Test with the newest (and the newest Python) and the lowest dependencies that pyproject.toml admits; WHICH=newest|lowest for one
	for which in $(or $(WHICH),newest lowest); do tools/test_dependencies.sh $$which $(T); done

.PHONY: soak
soak: export PYTHONPATH := tests
soak: $(VENV)/.installed ## Run the long trials (hours); TOPIC=kills COUNT=20 runs a part
	for topic in $(or $(TOPIC),$$($(BIN)/python -m soak --list)); do \
		$(BIN)/python -m soak $$topic $(if $(COUNT),--count $(COUNT)); done

BENCH_OPTIONS = $(TOPIC) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SECONDS),--seconds $(SECONDS)) \
	$(if $(ONLY),--only $(ONLY)) $(if $(filter quick,$(BENCH)),--quick)

.PHONY: bench
bench: $(VENV)/.installed ## Measure the service, its transport alone, and in process; ROUNDS=, SECONDS=, ONLY=, TOPIC= narrow it
	tools/fetch_h2load.sh
	$(BIN)/python -m benchmarks.speed $(BENCH_OPTIONS)

.PHONY: bench-peers
bench-peers: $(VENV)/.installed ## Measure it beside Triton, pytriton, KServe and MLServer, after installing them
	tools/fetch_h2load.sh
	tools/fetch_peers.sh
	$(BIN)/python -m benchmarks.speed --peers $(BENCH_OPTIONS)

.PHONY: check
check: $(VENV)/.installed ## Check format, lint, types, the protocol and the Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.binpb
	$(BIN)/hadolint Dockerfile
	$(BIN)/python tools/reference.py --check
	$(BIN)/python tools/monitoring.py --check

AUDIT := .tools/audit

$(AUDIT)/.installed: requirements/pip.txt requirements/audit.txt
	@$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install $(HASHED) --requirement requirements/pip.txt
	$(AUDIT)/bin/python -m pip install $(HASHED) --requirement requirements/audit.txt
	@touch $@

.PHONY: audit
audit: $(AUDIT)/.installed ## Look for known vulnerabilities in all packages; ADVISORIES=all.zip, an export of OSV, needs no network
	$(AUDIT)/bin/python tools/audit.py $(if $(ADVISORIES),--advisories $(ADVISORIES)) $(if $(STRICT),--strict)

.PHONY: sbom
sbom: $(VENV)/.installed $(AUDIT)/.installed ## Write a list of all installed packages, build/sbom.json (CycloneDX)
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file build/sbom.json
	@echo "Open build/sbom.json"

.PHONY: lock
lock: $(VENV)/.installed ## Write requirements/ anew, after a change of pyproject.toml or constraints.txt
	tools/lock.sh

.PHONY: pin-base
pin-base: ## Pin the image's base to the digest that its tag has today (needs Docker)
	tools/pin_base.sh

.PHONY: protocol-baseline
protocol-baseline: $(VENV)/.installed ## Make today's protocol the one that `make check` compares with (CONTRIBUTING.md)
	$(BIN)/buf build --exclude-source-info --output proto/baseline.binpb

.PHONY: dist
dist: $(VENV)/.installed ## Build the sdists and wheels of a release into dist/
	tools/build_dist.sh

.PHONY: format
format: $(VENV)/.installed ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: reference
reference: $(VENV)/.installed ## Generate the reference tables of metrics and settings from the code
	$(BIN)/python tools/reference.py

.PHONY: screenshots
screenshots: $(VENV)/.installed ## Run the demo, and take the pictures of its page for the docs
	tools/fetch_browser.sh
	$(BIN)/python -m tools.screenshots

.PHONY: dashboards
dashboards: $(VENV)/.installed ## Write the dashboards for Grafana and the rules of the objectives into deploy/
	$(BIN)/python tools/monitoring.py

$(VENV)/.docs: $(VENV)/.installed requirements/docs.txt
	$(BIN)/python -m pip install $(HASHED) --requirement requirements/docs.txt
	@touch $@

.PHONY: docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs ## Build the documentation site into build/site; a broken link is an error
	$(BIN)/mkdocs build --quiet --strict
	@echo "Open build/site/index.html"

.PHONY: hooks
hooks: $(VENV)/.installed ## Run the checks before every commit
	$(BIN)/pre-commit install

.PHONY: clean
clean: ## Remove installed, generated and cached files
	rm -rf $(VENV) .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find proto -name '*_pb2*.py*' -delete

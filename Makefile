# make up     start a mesh with the built-in demo model on 127.0.0.1:8000, in the background (ARGS="--prefill 2 --decode 2" for more)
# make down   stop it
# make test   ruff and tests on all cores, and what took how long (ARGS="-k groups" for some, ARGS=tests/unit/test_ranges.py for a
#             file alone, ARGS="-n 0" for one process)
# make test-all  that, then both type checkers, what is slow, all examples and seeds; without a time limit
# make ci     as test-all, with the slow tests that the newest commits touch and the day's share of the others (testing/pdmesh_testing/rotation.py)
# make lint   ruff, both type checkers, which module may import which, and the docs as a site without warnings
# make dst    simulate the services under faults drawn from SEEDS seeds (docs/testing/simulation.md)
# make fuzz   damage 5,000 event logs, checkpoints and configuration files, and say as much to the data plane
#             (FUZZ_NUMBER, FUZZ_SEED; ARGS="-k logs" or "-k hostile" for some)
# make resolve  look whether constraints.txt still resolves against the package index, without installing
# make docs   write the tables of docs/configuration.md from the settings' types
# make wheels  build wheels with compiled kernels into dist/: for this machine, and with a cross compiler for aarch64 (docs/install.md)
# make fmt    format and fix what can be fixed
# make clean  remove the venv and what tools left behind
#
# The first of these makes .venv and installs into it what constraints.txt pins (deploy/install.py), once for each state of that
# file, of pyproject.toml, of the CPU kernels and of the compiler. PYTHON says with which Python .venv is made. TORCH is what pip is
# given for torch, for instance TORCH="--index-url URL torch==2.13.0"; without it deploy/install_torch.py chooses the build.

PYTHON ?= python3
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "pdmesh needs Python 3.11 to 3.13; say which with make PYTHON=...")'
TORCH ?=
ARGS ?=
SEEDS ?= 1000
FUZZ_NUMBER ?= 5000
FUZZ_SEED ?= 0

VENV := .venv
BIN := $(VENV)/bin
# A compiler that was installed since is a reason to compile the kernels.
STATE := $(shell { cat pyproject.toml */pyproject.toml constraints.txt; find libs/pdmesh/engine/csrc -type f ! -name '*.pyc' | LC_ALL=C sort | xargs cat; \
  command -v c++ g++; echo $$CXX; } | sha256sum | cut -c1-16)
RUN_STAMP := $(VENV)/.run-$(STATE)
TEST_STAMP := $(VENV)/.test-$(STATE)

# Two cores and many processes: one thread for each, and what one has compiled the others read, also where the environment
# says to write no bytecode. Tests never ask a hub.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

LINTS := ruff mypy pyright imports site

.PHONY: up down test test-all ci lint $(LINTS) dst fuzz resolve docs wheels fmt clean

up: $(RUN_STAMP)
	@$(BIN)/pdmesh up --detach $(ARGS)

down: $(RUN_STAMP)
	@$(BIN)/pdmesh down $(ARGS)

test: $(TEST_STAMP)
	@$(TEST_ENV) $(BIN)/python tests/run.py $(ARGS)

test-all: $(TEST_STAMP)
	@$(TEST_ENV) $(BIN)/python tests/run.py --all $(ARGS)

ci: $(TEST_STAMP)
	@$(TEST_ENV) $(BIN)/python tests/run.py --ci $(ARGS)

# Two at once with --jobs=2: mypy and pyright each take one core for as long.
lint: $(LINTS)

ruff: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(TEST_STAMP)
	$(BIN)/mypy

pyright: $(TEST_STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(TEST_STAMP)
	$(BIN)/lint-imports

# Into dist/site.
site: $(TEST_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file deploy/site/mkdocs.yml

dst: $(TEST_STAMP)
	$(TEST_ENV) $(BIN)/python -m benchmarks.simulation.dst --seeds $(SEEDS) $(ARGS)

fuzz: $(TEST_STAMP)
	$(TEST_ENV) FUZZ_NUMBER=$(FUZZ_NUMBER) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest -q -s tests/property/test_damaged_files.py tests/contract/test_hostile_peers.py $(ARGS)

# Nothing of this machine's own: no wheels beside the index, none that is installed. A tree that once did not resolve went
# unseen, since all had it installed.
resolve: $(RUN_STAMP)
	$(BIN)/python -m pip --isolated --disable-pip-version-check --no-input install -q --dry-run --ignore-installed \
	  --no-build-isolation --only-binary :all: -c constraints.txt $(or $(TORCH),torch) \
	  $$($(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; \
	  print(*(d.replace(' ', '') for d in [*p['dependencies'], *e['test'], *e['lint'], *e['cuda'], *e['ucx']]))")
	@echo "constraints.txt resolves"

docs: $(TEST_STAMP)
	$(BIN)/python -m pdmesh.cli.reference docs/configuration.md

wheels: $(TEST_STAMP)
	$(BIN)/python deploy/wheels.py $(ARGS)

fmt: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Says what it installs. A run that was interrupted is repaired by the next.
$(RUN_STAMP):
	@$(CHECK_PYTHON)
	@$(PYTHON) deploy/install.py --torch "$(TORCH)"
	@rm -f $(VENV)/.run-* $(VENV)/.test-*
	@touch $@

$(TEST_STAMP):
	@$(CHECK_PYTHON)
	@$(PYTHON) deploy/install.py --torch "$(TORCH)" --for test
	@rm -f $(VENV)/.run-* $(VENV)/.test-*
	@touch $@ $(RUN_STAMP)

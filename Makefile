# `make` says what there is. Everything is installed into .venv; stamp files in it make a second run instant.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Added to every `pip install`. On Linux the default index has torch with CUDA, which is gigabytes; torch's own index of
# CPU builds spares a machine without a GPU that: PIP_ARGS="--extra-index-url URL".
PIP_ARGS ?=
# Added to the command that a target runs: make serve ARGS="--port 1234", make test ARGS="tests/scheduler -x".
ARGS ?=

# Always by relative path and through the interpreter: works in a folder of any name, with spaces in its path too.
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
PIP := $(RUN) $(INSTALL)
# The kernels' tests run in the interpreter of this version where there is no GPU. CUDA builds of torch bring one of their
# own, which stays.
TRITON := triton==3.6.0
ROUTERS := smg==1.13.0 sglang-router==0.3.2 vllm-router==0.1.17
RAY := ray==2.60.0
TRL := trl==1.16.0
VERL := verl==0.9.1
AGENTS := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4 \
  ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
AIDER := aider-chat==0.86.2
TRANSFER := nixl:nixl-cu12==1.5.1 mooncake:mooncake-transfer-engine-non-cuda==0.3.13.post1
VALIDATOR := kubernetes-validate==1.37.0
# One worker per core, tests that belong together on one, in the order of tests/conftest.py. To see them one by one:
# make test ARGS="-n 0 -v".
PYTEST := $(RUN) -m pytest -n auto --maxprocesses 8 --dist loadgroup --no-loadscope-reorder

.PHONY: help venv test-env dev-env serve test test-slow routers transfer-libraries agents ray trl verl validator chaos soak check lint \
  typecheck package-check house docs screenshots format clean gpu-bundle gpu-triage gpu-check \
  gpu-bench

help: ## this list
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12  ARGS="--port 1234"  PIP_ARGS="--extra-index-url URL"'

serve: $(VENV)/.engine ## serve the default model on http://127.0.0.1:30000 (fetched once); ARGS are options of `engine serve`
	@exec $(VENV)/bin/engine serve $(ARGS)

test: test-env ## run the tests that need neither a model file nor a GPU
	@$(PYTEST) -m "not slow and not model" $(ARGS)

# The default model is fetched once.
test-slow: test-env routers ray trl verl validator transfer-libraries agents ## run the slow tests, those of the default model, and all examples of Hypothesis
	@$(RUN) -c 'from engine.models.hub.built_in.fetch import ensure_model; ensure_model()'
	@$(PYTEST) -m "slow or model or hypothesis" $(ARGS)

# Each in an environment of its own, since smg and sglang-router install a command of the same name. Without them (no
# package index) their tests are skipped.
routers: $(VENV)/.created ## install the routers that the slow tests put in front of engines, into build/routers
	@for pin in $(ROUTERS); do \
	  folder="build/routers/$${pin%%==*}"; stamp="$$folder/.$${pin##*==}"; \
	  test -e "$$stamp" && continue; \
	  echo "Installing $$pin into $$folder ..."; \
	  { $(RUN) -m venv --clear "$$folder" && "$$folder/bin/python" $(INSTALL) "$$pin" && touch "$$stamp"; } || \
	    { rm -rf "$$folder"; echo "make: $$pin could not be installed; its tests are skipped" >&2; }; \
	done

# Coding agents and the AI SDK, from the npm registry (1 GB), and aider in an environment of its own (700 MB). Without
# Node.js or a registry their tests are skipped.
agents: $(VENV)/.created ## install the coding agents that the slow tests run against a server, into build/agents
	@stamp="build/agents/.npm-$(shell echo '$(AGENTS)' | cksum | cut -d' ' -f1)"; \
	  test -e "$$stamp" || { echo 'Installing $(AGENTS) into build/agents ...'; \
	  rm -rf build/agents; mkdir -p build/agents; \
	  npm install --prefix build/agents --no-audit --no-fund --loglevel=error $(AGENTS) && touch "$$stamp"; } || \
	    { rm -rf build/agents; echo 'make: the agents could not be installed; their tests are skipped' >&2; }
	@stamp="build/aider/.$(AIDER)"; test -e "$$stamp" && exit; \
	  echo 'Installing $(AIDER) into build/aider ...'; \
	  { $(RUN) -m venv --clear build/aider && build/aider/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(PIP_ARGS) $(AIDER) && touch "$$stamp"; } || \
	    { rm -rf build/aider; echo 'make: $(AIDER) could not be installed; its test is skipped' >&2; }

# In a folder of its own, which only the tests of Ray have on their path: the engine must work without it. Half a minute and
# 260 MB. Without it (no package index) those tests are skipped.
ray: $(VENV)/.created ## install the Ray that the slow tests start, into build/ray
	@stamp="build/ray/.$(RAY)"; test -e "$$stamp" && exit; \
	  echo 'Installing $(RAY) into build/ray ...'; rm -rf build/ray; \
	  { $(PIP) --target build/ray $(RAY) && touch "$$stamp"; } || \
	    { rm -rf build/ray; echo 'make: $(RAY) could not be installed; its tests are skipped' >&2; }

# Without its dependencies: the client that the tests run needs only those of the test extra.
trl: $(VENV)/.created ## install TRL, whose client the slow tests run against a server, into build/trl
	@stamp="build/trl/.$(TRL)"; test -e "$$stamp" && exit; \
	  echo 'Installing $(TRL) into build/trl ...'; rm -rf build/trl; \
	  { $(PIP) --no-deps --target build/trl $(TRL) && touch "$$stamp"; } || \
	    { rm -rf build/trl; echo 'make: $(TRL) could not be installed; its tests are skipped' >&2; }

# One file of it is run, with its imports of SGLang stubbed.
verl: $(VENV)/.created ## install verl, whose client the slow tests run against a server, into build/verl
	@stamp="build/verl/.$(VERL)"; test -e "$$stamp" && exit; \
	  echo 'Installing $(VERL) into build/verl ...'; rm -rf build/verl; \
	  { $(PIP) --no-deps --target build/verl $(VERL) && touch "$$stamp"; } || \
	    { rm -rf build/verl; echo 'make: $(VERL) could not be installed; its tests are skipped' >&2; }

# Without their dependencies, which are for GPUs (NIXL) or for tools (Mooncake). Mooncake also needs Debian's libibverbs1.
transfer-libraries: $(VENV)/.created ## install NIXL and Mooncake for the slow tests of KV transfers, into build/transfer
	@for entry in $(TRANSFER); do \
	  folder="build/transfer/$${entry%%:*}"; pin="$${entry#*:}"; stamp="$$folder/.$${pin##*==}"; \
	  test -e "$$stamp" && continue; \
	  echo "Installing $$pin into $$folder ..."; rm -rf "$$folder"; \
	  { $(PIP) --no-deps --target "$$folder" "$$pin" && touch "$$stamp"; } || \
	    { rm -rf "$$folder"; echo "make: $$pin could not be installed; its tests are skipped" >&2; }; \
	done

# The schemas of all versions are 108 MB, which no other test needs. Without it one test is skipped.
validator: $(VENV)/.created ## install what checks the Kubernetes manifests, into build/kubernetes-validate
	@folder=build/kubernetes-validate; stamp="$$folder/.$(VALIDATOR)"; test -e "$$stamp" && exit; \
	  echo "Installing $(VALIDATOR) into $$folder ..."; \
	  { $(RUN) -m venv --clear "$$folder" && "$$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
	    $(PIP_ARGS) $(VALIDATOR) && touch "$$stamp"; } || \
	    { rm -rf "$$folder"; echo 'make: $(VALIDATOR) could not be installed; its test is skipped' >&2; }

chaos: test-env ## kill, crash, freeze random processes for ten minutes under 200 streams; ARGS="--minutes 1 --clients 8"
	@$(RUN) -c 'from engine.models.hub.built_in.fetch import ensure_model; ensure_model()'
	@$(RUN) -m tests.faults.chaos $(ARGS)

soak: test-env ## ten minutes of load storms on a small server, then a check for leaks; ARGS="--overload refuse --minutes 60"
	@$(RUN) -m tests.faults.soak $(ARGS)

check: lint typecheck package-check house ## lint, format, strict types, packaging, size: every commit must pass it

lint: dev-env
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

# The repository is the package `engine` whatever its folder is called. Links give it that name, so that mypy reads
# relative imports and the tests' `import engine` as one package. Only folders with code are linked: a link to the root
# would contain itself.
typecheck: dev-env
	@rm -rf build/typecheck && mkdir -p build/typecheck/engine
	@for path in __init__.py __main__.py py.typed $(filter-out tests/%,$(wildcard */__init__.py)); do \
	  ln -s "../../../$${path%%/*}" "build/typecheck/engine/$${path%%/*}"; \
	done
	@ln -s ../../tests ../../benchmarks ../../docs build/typecheck/
	@cd build/typecheck && ../../$(RUN) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
	  engine tests benchmarks docs | sed 's#^engine/##'

package-check: test-env
	@$(RUN) -m pytest -q tests/test_packaging.py

house: ## compare the size of the product with benchmarks/house.json, which a commit may raise with a reason
	@"$(PYTHON)" benchmarks/house.py --check

docs: $(VENV)/.engine ## write docs/cli.md, configuration.md and migration.md from the code
	@$(RUN) -m docs.reference.generate

screenshots: $(VENV)/.engine ## take the pictures in docs/images/ of the server's pages; needs Chromium
	@$(RUN) -m docs.reference.screenshots

format: dev-env ## format the code and apply ruff's automatic fixes
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

# On a GPU machine, which may be without network: its own python3, with torch for its GPU, and nothing is installed. What
# it lacks comes in build/gpu-bundle, made where there is a network and copied along.
gpu-bundle: ## make build/gpu-bundle: packages for a GPU machine without network (sgl_kernel and some wheels)
	@"$(PYTHON)" benchmarks/gpu/bundle.py $(ARGS)

gpu-triage: ## find the flags with which this machine's GPU computes what it should, with PYTHON's own torch
	@"$(PYTHON)" benchmarks/gpu/path.py benchmarks.gpu.triage --out build/gpu-triage $(ARGS)

gpu-check: ## check the engine on this machine's GPU, with PYTHON's own torch; ARGS="--only models"
	@"$(PYTHON)" benchmarks/gpu/path.py benchmarks.gpu.check --json build/gpu-check.json $(ARGS)

gpu-bench: ## measure the engine on this machine's GPU, with PYTHON's own torch; ARGS="--only Qwen3-0.6B"
	@"$(PYTHON)" benchmarks/gpu/path.py benchmarks.gpu.bench --json build/gpu-bench.json $(ARGS)

venv: $(VENV)/.engine ## make .venv with the engine and its pinned dependencies
	@echo '$(VENV) is ready; to use it in this shell: source $(VENV)/bin/activate'

test-env: $(VENV)/.test
dev-env: $(VENV)/.dev

clean: ## remove what make made: .venv, build and caches
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each failure is one line that says what to do.
$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo 'make: there is no $(PYTHON); install Python 3.11 or newer, or name it: make PYTHON=/path/to/python' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is $$("$(PYTHON)" -V 2>&1); the engine needs 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'make: $(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@command -v c++ g++ clang++ >/dev/null || \
	  echo 'make: no C++ compiler found; the engine will run on its slower portable kernels (apt install g++)' >&2
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# setuptools first, pinned like the rest: the editable build then needs no environment of its own.
$(VENV)/.engine: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing the engine into $(VENV) (once; torch makes it a few minutes) ...'
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e .
	@echo 'Compiling the CPU kernels ...'
	@$(RUN) -c 'from engine.model_runner.kernels.cpu.library import reasons_against_library; reasons_against_library()'
	@touch $@

$(VENV)/.test: $(VENV)/.engine
	@echo 'Installing what the tests need ...'
	@$(PIP) --no-build-isolation -e '.[test]'
	@$(RUN) -c 'import triton' 2>/dev/null || test "$$(uname -sm)" != 'Linux x86_64' || $(PIP) $(TRITON)
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo 'Installing ruff and mypy ...'
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

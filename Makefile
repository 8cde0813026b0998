# On a fresh machine, start with `make run` or `make test`. Both first create .venv with the pinned packages
# (constraints.txt), which takes minutes the first time and no time afterwards. tools/setup.py does this and explains how.

# The environment and its contents. TORCH and DEPS stay in effect until .venv is created again.
VENV ?= .venv
PYTHON ?=
TORCH ?=
DEPS ?=
# Options for the command of a target: make run ARGS="--help", make test ARGS="-k attention"
ARGS ?=

bin := $(VENV)/bin
oldest := build/triton-3.6.0

.DEFAULT_GOAL := help
.PHONY: help setup run test gpu fuzz aot check docs format clean

help: ## list all targets
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="..."                options for the command, e.g. make run ARGS="--help", make test ARGS="-k flash"'
	@echo '  PYTHON=/path/to/python    the Python to use (default: the first suitable one of python3, python3.13, ...)'
	@echo '  TORCH=installed           use the torch, numpy and triton from this Python; TORCH=pinned reverts this'
	@echo '  DEPS="msgspec typer"      install only these additional packages (or DEPS=none, DEPS=all)'
	@echo '  VENV=/path                use an environment other than .venv'
	@echo '  PROCESSES=8               number of processes for `make test` (default: twice the cores)'

setup: ## create .venv with the pinned packages, if it is not up to date
	@python=$$(sh tools/python.sh "$(VENV)" "$(PYTHON)") && \
		"$$python" tools/setup.py --venv "$(VENV)" --torch "$(TORCH)" --deps "$(DEPS)"

run: setup ## run `stepscope report` on the default workload, on the GPU if there is one
	"$(bin)/stepscope" report $(ARGS)

# One thread per process, because threads that synchronize at every small operation are slower than one. Twice as many
# processes as cores, because they often wait for ranks, a cluster or browsers. The longest tests come first. Tests start
# hundreds of commands, which would each compile the package again if bytecode were disabled.
PROCESSES ?= $(shell echo $$((2 * $$(nproc))))
test: setup ## run all tests that need no GPU; page tests need Chromium, which is installed automatically as root
	@sh tools/chromium.sh
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 "$(bin)/python" -m pytest -n $(PROCESSES) --dist loadgroup --no-loadscope-reorder \
		tests/cli tests/browser tests/cpu tests/fuzz tests/unit $(ARGS)

gpu: setup ## run the tests that need a CUDA GPU
	@"$(bin)/python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { \
		echo 'error: no CUDA GPU found; the tests in tests/gpu need one' >&2; \
		echo 'hint: make test    # runs the tests that need no GPU' >&2; exit 2; }
	"$(bin)/python" -m pytest tests/gpu $(ARGS)

fuzz: setup ## feed 100,000 damaged inputs to every reader: ARGS="--count 1000 --seed 7 --jobs 2 --only kineto"
	"$(bin)/python" -m tests.fuzz $(ARGS)

# Also with the oldest supported Triton, in its own environment: its ptxas compiles kernels differently.
aot: setup ## compile every kernel for other GPUs, and check spills, shared memory and instructions
	"$(bin)/python" tools/aot.py $(ARGS)
	@test -x "$(oldest)/bin/python" || { "$(bin)/python" -m venv "$(oldest)" && \
		"$(oldest)/bin/python" -m pip install --quiet triton==3.6.0; } || { rm -rf "$(oldest)"; exit 1; }
	"$(oldest)/bin/python" tools/aot.py $(ARGS)

check: setup ## check formatting, lint, types, import directions and wording
	"$(bin)/python" -m ruff format --check .
	"$(bin)/python" -m ruff check .
	"$(bin)/python" -m mypy
	"$(bin)/python" -c "from importlinter.cli import lint_imports_command as check; check()"
	"$(bin)/python" tools/voice.py --check

# A dead link or a missing anchor is a warning, and -W makes it an error.
docs: setup ## build the documentation as a website: build/docs/index.html
	"$(bin)/python" -m sphinx -W --keep-going --quiet docs build/docs $(ARGS)

format: setup ## format the code and apply the linter's fixes
	"$(bin)/python" -m ruff check --fix --exit-zero --quiet .
	"$(bin)/python" -m ruff format .

clean: ## remove .venv and all caches, but not runs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +

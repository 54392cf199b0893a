# Everything from a bare Python 3.11+: each target makes what it needs first, and does nothing twice.
#
#   make serve   the embedded model behind an OpenAI-compatible API and a chat page, on 127.0.0.1:8000
#   make demo    the embedded model writes a few lines, on this machine, GPU or not
#   make test    lint, types and tests: under ten minutes on two quiet cores
#   make test-long  what takes longer, under an hour on two cores: GPU kernels in Triton's interpreter and compiled for
#                sm_90 and sm_121 in every shape, drafted text against plain text over 60 prompts, endurance, fuzzing
#   make bench   decode and prefill speed of the embedded model against the memory bandwidth
#   make docs    the pages of docs/ as a site in build/site
#   make check-speed [DEVICE=cuda]   ratios of speeds against sparkdraft/operate/bench/check_speed/expected_ratios.json
#
# TORCH=torch==2.13.0       the torch to install (the pin: its CPU build pulls no CUDA packages on most machines)
# TRITON=triton==3.6.0      the Triton with which tests compile and interpret GPU kernels, where torch brings none
# PIP_ARGS="--index-url .." anything else pip should know, such as another index
#   a GPU machine:  make demo TORCH=torch PIP_ARGS="--extra-index-url <an index with CUDA builds>"

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'
PIP_ARGS ?=
DEVICE ?= cpu
VENV := .venv
BIN := $(VENV)/bin
# Two files at a time, each process on its own cores (tests/conftest.py): most tests are busy with one.
# What took longest is said, why tests were skipped (no GPU, no browser), and last what failed.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile -rfE --durations 20 --durations-min 5

.PHONY: setup dev serve demo test test-long lint bench check-speed docs clean

setup: $(VENV)/ready
dev: $(VENV)/ready-dev

serve: setup
	$(BIN)/sparkdraft serve

demo: setup
	$(BIN)/sparkdraft demo

test: lint
	$(PYTEST)

# Triton's interpreter replaces its compiler for a whole process, so the tests that need it are a run of their own.
test-long: dev
	TRITON_INTERPRET=1 $(PYTEST) --dist load -m gpu tests/kernels
	FUZZ_CASES=800 $(PYTEST) -m "slow or fuzz"

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/sparkdraft bench offline

# About 13 minutes on two quiet cores. Fails with 1 where a line fell, with 2 where the machine is too noisy to tell.
check-speed: setup
	$(BIN)/sparkdraft bench check-speed --device $(DEVICE)

docs: dev
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "mkdocs>=1.6,<2"
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV)

# torch goes first and alone: a later package's "torch" is then satisfied, and no other build is fetched.
$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing: about a minute and 200 MB the first time"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e .
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
# A CUDA build of torch pins the Triton that it brings; only a CPU build, which brings none, gets ours.
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install --quiet $(PIP_ARGS) "$(TRITON)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
# z-lab's own code, the oracle of tests/drafters; without what it pins to the digit (datasets, tqdm, requests), unused here.
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps dflash==0.1.0
	touch $@

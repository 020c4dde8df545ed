# Each target sets up what it needs in $(VENV) and does nothing twice.
#
#   make train   train a small language model on four CPU devices   (STEPS=..., TRAIN_ARGS="...")
#   make test    build, then run the whole test suite               (PYTEST_ARGS="...")
#   make lint    ruff and pyright
#   make docs    the documentation as a site, in site/
#   make bench   the collectives and the step beside XLA's own      (WORLD=...)
#   make cuda    build with the kernels for sm_90; needs CUDA's nvcc, no GPU
#
# PYTHON=python3.12 picks the interpreter, VENV=folder the environment.

PYTHON ?= python3
VENV ?= .venv
STEPS ?= 300
TRAIN_ARGS ?=
PYTEST_ARGS ?=
WORLD ?= 4

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE_SOURCES := $(shell find ffi -type f)

.PHONY: help train test lint docs bench cuda
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile

train: $(VENV)/.installed
	@number=1; while [ -e runs/bytes-s-$$number ]; do number=$$((number + 1)); done; set -x; \
	$(BIN)/jaxdp train --model bytes-s --data kjv --devices 4 --platform cpu --steps $(STEPS) --batch 4 \
		--context 128 --learning-rate 0.004 --warmup-steps 15 --decay-steps $(STEPS) \
		--sample --output runs/bytes-s-$$number $(TRAIN_ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.documentation-tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/python bench/collectives.py --world $(WORLD) --platform cpu
	$(BIN)/python bench/step.py --world $(WORLD) --platform cpu

# The next change of a native source builds for the GPU that this machine has, as make test does.
cuda: $(VENV)/.installed-cuda
	$(BIN)/python -c 'import jaxdp._cuda as library; print(library.__file__)'

$(VENV)/.installed-cuda: $(VENV)/.created pyproject.toml $(NATIVE_SOURCES)
	@command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || \
		{ echo "no nvcc: install the CUDA toolkit (13 or newer) and put nvcc on the PATH"; exit 1; }
	JAXDP_GPU=cuda $(PIP) install --editable '.[dev,corpus,plot]'
	@touch $@ $(VENV)/.installed

# An editable install: Python sources are live, the native library is rebuilt when its sources change.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(NATIVE_SOURCES)
	@command -v $${CXX:-g++} > /dev/null || \
		{ echo "no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX"; exit 1; }
	@echo "building and installing into $(VENV) (a minute or two the first time)"
	$(PIP) install --editable '.[dev,corpus,plot]'
	@touch $@

$(VENV)/.documentation-tools: $(VENV)/.created pyproject.toml
	$(PIP) install $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --quiet install --upgrade pip
	@touch $@

# `make demo` and `make test` are all that a bare machine needs: x86-64 Linux, Python 3.10 or newer with its headers,
# and a C++ compiler. Everything runs from .venv, which the stamp files below make once; no venv has to be activated.

PYTHON ?= python3
SHELL := bash
.SHELLFLAGS := -o pipefail -ec

# What to build: names or short names of variants, comma-separated. Empty: all that this machine can build.
VARIANTS ?=
JOBS ?= $(shell nproc)
DEMO_ARGS ?=
BENCH_ARGS ?=
PROFILE_ARGS ?=
PUBLISH_ARGS ?=
# Two workers: more would only take turns on two cores, or crowd a GPU's memory.
PYTEST_ARGS ?= -n 2 --dist loadfile
# What does not depend on the loaded build.
NOARCH_ARGS := $(addprefix --ignore=tests/,build sweep hub test_matrix.py test_noarch.py test_sources.py test_reference.py)

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip --disable-pip-version-check --no-input install --progress-bar off
STAMP := $(VENV)/.stamp

# The nvcc of CUDA_HOME, or an installed one of the release that the published variants are built with. Without either the
# wheels of requirements-cuda.txt stand in where CUDA is asked for: a newer toolkit's build does not load into torch.
NVCC := $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc),$(shell \
	for nvcc in nvcc /usr/local/cuda/bin/nvcc; do $$nvcc --version 2>/dev/null && break; done | grep -o 'release 13\.0'))
CUDA_WHEELS := $(if $(NVCC),,$(if $(findstring cu,$(VARIANTS)),yes))

# Without an NVIDIA driver the CPU build of torch does all that can be done here, in a tenth of the download. Where its
# index does not answer, pip takes torch from its usual place. `make TORCH_INDEX=` skips the index.
NVIDIA_DRIVER := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl)
TORCH_INDEX ?= $(if $(NVIDIA_DRIVER),,https://download.pytorch.org/whl/cpu)

# The project's own C++ and CUDA files, in a checkout or in an unpacked archive.
CXX_FILES = $(shell find kernel_src torch-ext tests tools \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
	! -path torch-ext/registration.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installers at a time would get in each other's way; the builder itself runs JOBS compilers.
.NOTPARALLEL:
.PHONY: help demo test build bench profile style format check clean publish toolchain build-demo

help:
	@echo "make demo     build for this machine, kernelize a Gemma 3, compare with eager and torch.compile (DEMO_ARGS)"
	@echo "make test     build, then run the test suite (PYTEST_ARGS)"
	@echo "make build    build the variants that this machine can build, or VARIANTS=cpu,cuda (JOBS)"
	@echo "make bench    measure against eager, torch.compile, liger-kernel and quack (BENCH_ARGS)"
	@echo "make profile  run the CUDA kernel under Nsight Compute (PROFILE_ARGS)"
	@echo "make style    check formatting and lint; make format repairs what can be repaired"
	@echo "make check    style, then the checks of every build in build/"
	@echo "make publish  show what publishing build/ would change on the Hub (PUBLISH_ARGS=--yes publishes)"
	@echo "make clean    delete builds and caches; .venv stays"

demo: build-demo
	@$(RUN) -m tools.demo $(DEMO_ARGS)

# Twice: first the builds without a compiled library, which have the same promises to keep.
test: build $(STAMP)-test
	@GEGLU_VARIANT=torch-cpu $(RUN) -m pytest tests $(PYTEST_ARGS) $(NOARCH_ARGS)
	@$(RUN) -m pytest tests $(PYTEST_ARGS)

build: toolchain $(STAMP)-demo $(if $(CUDA_WHEELS),$(STAMP)-cuda)
	@$(if $(CUDA_WHEELS),CUDA_HOME=$$(echo $(CURDIR)/$(VENV)/lib/python3.*/site-packages/nvidia/cu13)) \
	$(RUN) -m tools.build $(if $(VARIANTS),--variants $(VARIANTS)) --jobs $(JOBS)

# The kernels library chooses by what torch was built for, GPU or not: build exactly that variant.
build-demo: toolchain $(STAMP)-demo
	@variant=$$($(RUN) -c 'import torch; print("cuda" if torch.version.cuda else "cpu")') && \
	$(MAKE) --no-print-directory build VARIANTS=$$variant

bench: build $(STAMP)-peers $(if $(NVIDIA_DRIVER),$(STAMP)-quack)
	@$(RUN) -m tools.sweep $(BENCH_ARGS)

profile: $(STAMP)-demo
	@$(RUN) -m tools.profile $(PROFILE_ARGS)

style: $(STAMP)-dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(STAMP)-dev
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_FILES)

check: style $(STAMP)-demo
	@$(RUN) -m tools.build.check

publish: $(STAMP)-demo
	@$(RUN) -m tools.publish $(PUBLISH_ARGS)

clean:
	rm -rf build .build-cache .pytest_cache .hypothesis .ruff_cache result
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# Said before anything large is downloaded; which compilers will do is the builder's to judge.
toolchain: $(STAMP)-python
	@for cxx in $(if $(filter default,$(origin CXX)),g++ g++-12 g++-11,$(firstword $(CXX))); do \
	  command -v $$cxx >/dev/null && exit; done; \
	echo "error: no C++ compiler was found: install g++ (Debian, Ubuntu: apt install g++-12), or name one with make CXX=..." >&2; exit 1
	@$(RUN) -c 'import pathlib, sys, sysconfig; \
	sys.exit((pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists() - 1)' || { \
	  echo "error: Python.h was not found: the headers of $(PYTHON) are missing (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }

# ---- the environment: one stamp for each set of packages ------------------------------------------------------------

$(STAMP)-python:
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { \
	  echo "error: these builds run on x86-64 Linux; this machine is $$(uname -sm)" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' was not found: install Python 3.10 or newer, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "environment: $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Of pip's many lines: the larger downloads, when they begin, and all that follows an error.
LARGE := -e 's/^  Downloading \([^ ]*\) (\([0-9.]* [MG]B\)).*/  downloading \1, \2/p'
STEPS := | sed -nu $(LARGE) -e 's/^Installing collected packages.*/  unpacking/p'
STEPS_AND_ERRORS := 2>&1 $(STEPS) -e '/^ERROR/,$$p'

$(STAMP)-torch: requirements.txt $(STAMP)-python
	@echo "environment: torch"
	@torch=$$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements.txt); \
	[ -z "$(TORCH_INDEX)" ] || \
	$(INSTALL) --no-deps --retries 1 --timeout 20 --index-url $(TORCH_INDEX) $$torch 2>/dev/null $(STEPS) || \
	echo "environment: no $$torch at $(TORCH_INDEX); taking it from pip's usual index"
	@touch $@

$(STAMP)-demo: requirements.txt $(STAMP)-torch
	@echo "environment: $<"
	@$(INSTALL) -r $< $(STEPS_AND_ERRORS)
	@touch $@

$(STAMP)-test $(STAMP)-dev: $(STAMP)-%: requirements-%.txt $(STAMP)-demo
	@echo "environment: $<"
	@$(INSTALL) -r $< $(STEPS_AND_ERRORS)
	@touch $@

$(STAMP)-cuda: requirements-cuda.txt $(STAMP)-demo
	@echo "environment: $< (in place of nvcc 13.0, which was not found)"
	@$(INSTALL) -r $< $(STEPS_AND_ERRORS)
	@touch $@

$(STAMP)-peers $(STAMP)-quack: $(STAMP)-%: requirements-%.txt $(STAMP)-dev
	@echo "environment: $<"
	@$(INSTALL) --no-deps -r $< $(STEPS_AND_ERRORS)
	@touch $@

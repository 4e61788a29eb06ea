# make demo     train a small GPT on 8 local ranks, grid 2x2x2x1, and compare it with serial training
# make test     everything but the long proofs
# make check    lint, types, house rules, the quick tests and those of what changed: under two minutes
# make lint     the first of these: ruff, clang-format, mypy
# make soak     the long proofs        make gpu    what needs a GPU        make bench    the benchmarks
# make build    rebuild the extension when csrc changed        make clean    remove what was built
# make docs     this documentation as a site, in build/site
# make wheels   a wheel for each torch, audited and tried      make aarch64    the core's C++ tests on an emulated Arm
#
# The first run makes .venv, installs the newest torch into it, then the rest, then builds. Another torch of those that
# docs/install.md lists:
#   make demo TORCH="torch==2.13.*"
TORCH ?= torch
TRITON ?= triton
OUT ?= runs/demo
ARGS ?=
BASE ?=

V := .venv
# What pip installs is compiled to bytecode when it is first imported, at the end of the set-up: most of it never is.
PIP := $(V)/bin/python -m pip install -q --disable-pip-version-check --no-compile
# Bytecode is kept, whatever the shell says: hundreds of processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE
CORE := $(foreach folder,base memory progress host hosts device torch,$(wildcard csrc/$(folder)/*.cpp csrc/$(folder)/*.h csrc/$(folder)/*.inc))
QUICK_TESTS := tests/house/test_house.py tests/house/test_tools.py tests/test_placement.py tests/test_launcher.py tests/comm/test_collectives.py tests/perf
CORES := $(shell nproc 2>/dev/null || echo 2)
PYTEST := $(V)/bin/python -m pytest
# Requirements of lists in pyproject.toml, one a line.
wanted = $(V)/bin/python -c 'import functools, sys, tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  [print(*functools.reduce(dict.get, name.split("."), project), sep="\n") for name in sys.argv[1:]]' $(1)
# The first Python of at least 3.11, plain python3 before others.
PYTHON := $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))

.PHONY: demo test check lint soak soak-runtime soak-python $(addprefix soak-,core kills memory threads device fuzz tables suite) compile-defaults compile-matrix gpu docs bench build wheels aarch64 clean distclean prerequisites
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(V)/.built
	$(V)/bin/axo train --grid 2x2x2x1 --steps 120 --precision 32-true --compare-serial --expect-drop 1.5 --out $(OUT) $(ARGS)

test: export EXTENSION := $(CURDIR)/build/objects
test: $(V)/.built
	@echo "C++ tests of the core: compiled first, run beside the Python tests, two of which run at a time"
	@$(MAKE) --no-print-directory -s -j$(CORES) -C csrc/tests build
	@$(MAKE) --no-print-directory -s -C csrc/tests test > build/csrc-tests.txt 2>&1 & core=$$!; \
	$(PYTEST) -ra -n 2 --dist worksteal $(ARGS); python=$$?; \
	wait $$core; core=$$?; \
	if [ $$core -ne 0 ]; then cat build/csrc-tests.txt; else tail -n 1 build/csrc-tests.txt; fi; \
	exit $$((python || core))

# What changed since this branch left main, or by BASE=COMMIT.
check: lint
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not soak and not gpu" $(wildcard $(QUICK_TESTS)) \
	  $$($(V)/bin/python -m tests.house.changed --base "$(BASE)") $(ARGS)

lint: $(V)/.built
	$(V)/bin/ruff check .
	$(V)/bin/ruff format --check .
	$(V)/bin/clang-format --dry-run -Werror $(CORE) $(wildcard csrc/tests/*.cpp csrc/tests/*.h csrc/tests/*/*.cpp csrc/tests/*/*.h csrc/tests/*/*.inc)
	$(V)/bin/mypy

# The proofs of the runtime (docs/notes/proofs.md), of which ARGS="core kills" names some, and a pytest selection with
# soak-python. One that fails keeps none from running.
soak: soak-runtime soak-python

SOAK := core kills memory threads device fuzz tables suite
PROOF = AXO_TEST_SECONDS=3600 AXO_RESULTS=$(CURDIR)/bench/results/soak.jsonl $(MAKE) -s -j2 -C csrc/tests test
soak-runtime: $(V)/.built
	$(MAKE) -k $(addprefix soak-,$(or $(ARGS),$(SOAK)))

soak-core:
	AXO_SOAK=10 $(PROOF) FILTER=soak_random
soak-kills:
	AXO_SOAK=1 $(PROOF) FILTER=soak_kills
soak-memory:
	$(PROOF) SAN=address,undefined
soak-threads:
	$(PROOF) SAN=thread
soak-device: soak-device-address soak-device-undefined soak-device-thread
soak-device-%:
	$(MAKE) -s -j2 -C csrc/tests/device SAN=$*
soak-fuzz:
	AXO_FUZZ_SECONDS=60 $(PROOF) SAN=address,undefined FILTER=fuzz
soak-tables:
	$(PYTEST) -m soak -ra tests/comm/test_device_transport.py
soak-suite:
	$(PYTEST) -m soak -s tests/comm/test_c10d_suite.py

soak-python: $(V)/.built
	$(PYTEST) -m soak --deselect tests/comm/test_c10d_suite.py --deselect tests/comm/test_device_transport.py -ra -s $(ARGS)

# Every Triton kernel, layout and dtype at its default configuration for six GPUs (402 cases).
# 47 to 95 s on two quiet cores when they were 298; the others are 5% of the compiler's time.
compile-defaults: $(V)/.built
	$(V)/bin/python -m bench.tools.compile_matrix $(ARGS)

# What the tuner may choose for the papers' layers and for small products, as well (3,851 cases; how they are found:
# bench/tools/compile_matrix.py). 38 minutes on one busy core; ARGS="--seconds 300" stops early, and the same command
# again goes on from there.
compile-matrix: $(V)/.built
	$(V)/bin/python -m bench.tools.compile_matrix --all --out bench/results/compile_matrix.jsonl $(ARGS)

gpu: $(V)/.built
	$(PYTEST) -m gpu -ra $(ARGS) || test $$? -eq 5  # 5: no test wants a GPU yet
	$(V)/bin/axo bench gpu

# What the site is made with lies in an environment of its own: it pulls much that nothing else wants.
docs: $(V)/docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 $(V)/docs/bin/mkdocs build --strict
	@echo "build/site/index.html"

$(V)/docs/bin/mkdocs: pyproject.toml | $(V)/bin/python
	@$(V)/bin/python -m venv $(V)/docs
	@$(call wanted,optional-dependencies.docs) > $(V)/docs/wanted.txt
	@$(V)/docs/bin/python -m pip install -q --disable-pip-version-check -r $(V)/docs/wanted.txt
	@touch $@

bench: $(V)/.built
	$(V)/bin/axo bench collectives $(ARGS)
	$(V)/bin/axo bench gemm $(ARGS)

build: $(V)/.built

# ARGS="--python python3.11,python3.13 --torch 2.14,2.15": one for each pair, in dist/.
wheels: $(V)/bin/python
	$(V)/bin/python -m bench.tools.wheels $(ARGS)

# The core, compiled for another processor. What the emulator does not do is left out: robust locks, which tell that a
# rank has died; mappings of half a machine's memory; a limit of open files.
ARM := aarch64-linux-gnu
aarch64:
	@command -v $(ARM)-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || \
	  { echo "This needs first:  sudo apt-get install -y g++-$(ARM) qemu-user-static"; exit 1; }
	$(MAKE) --no-print-directory -s -j$(CORES) -C csrc/tests CXX=$(ARM)-g++ OUT=../../build/csrc-tests-aarch64 build
	$(MAKE) --no-print-directory -s -C csrc/tests CXX=$(ARM)-g++ OUT=../../build/csrc-tests-aarch64 test \
	  RUN="qemu-aarch64-static -L /usr/$(ARM)" \
	  FILTER="-kill -hide_a_death -shared_buffers -fuzz_shared_segment -may_open_no_files $(ARGS)"

prerequisites:
	@missing=""; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	if ! command -v python3 >/dev/null && [ -z "$(PYTHON)" ]; then missing="$$missing python3 python3-venv python3-dev"; \
	elif [ -z "$(PYTHON)" ]; then missing="$$missing python3.11 python3.11-venv python3.11-dev"; else \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing $(PYTHON)-venv"; \
	  $(PYTHON) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null \
	    || missing="$$missing $(PYTHON)-dev"; \
	fi; \
	if [ -n "$$missing" ]; then echo "Axo needs these first:  sudo apt-get install -y$$missing"; exit 1; fi

$(V)/bin/python: | prerequisites
	$(PYTHON) -m venv $(V)

# torch comes first and alone, and is pinned for what follows, so that nothing brings a second one. The extension needs
# no more: it is built while the rest is installed.
$(V)/.deps: pyproject.toml tests/integrations/litdata.txt tests/integrations/serve.txt tests/integrations/peft.txt tests/examples/megatron.txt | $(V)/bin/python
	@echo "Installing $(TORCH) and the rest into $(V), and building the extension (once)"
	@$(PIP) "setuptools>=77" wheel
	@$(V)/bin/python -c 'import torch' 2>/dev/null || $(PIP) "$(TORCH)"
	@$(V)/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(V)/torch.txt
	@$(call wanted,dependencies optional-dependencies.litgpt optional-dependencies.dev) > $(V)/wanted.txt
	@$(V)/bin/python setup.py -q build_ext --inplace & build=$$!; \
	$(V)/bin/python -c 'import triton' 2>/dev/null || $(PIP) -c $(V)/torch.txt "$(TRITON)" && \
	$(PIP) -c $(V)/torch.txt -r $(V)/wanted.txt && \
	$(PIP) --no-deps --target $(V)/litdata --upgrade -r tests/integrations/litdata.txt && \
	$(PIP) --no-deps --target $(V)/serve --upgrade -r tests/integrations/serve.txt && \
	$(PIP) --no-deps --target $(V)/peft --upgrade -r tests/integrations/peft.txt && \
	$(PIP) --no-deps --target $(V)/megatron --upgrade -r tests/examples/megatron.txt; pip=$$?; \
	wait $$build && exit $$pip
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(V)/bin/python -c 'import pytest, axo.train.runner, axo.integrations.fabric.strategy'
	@touch $@

$(V)/.built: $(V)/.deps setup.py $(CORE) | prerequisites
	@echo "Building the extension"
	@$(V)/bin/python setup.py -q build_ext --inplace
	@touch $@

clean:
	rm -rf build dist *.egg-info python/*.egg-info python/axo/_C*.so $(V)/.built

distclean: clean
	rm -rf $(V)

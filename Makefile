# Every target sets up what it needs in a virtual environment, .venv, with the versions of constraints.txt.
# To use an interpreter that already has everything instead: make quick RUN=python3 READY=
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --constraint constraints.txt
READY := $(VENV)/.ready
DEMO_READY = $(READY:.ready=.ready-demo)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install the package with all that its tests need

$(DEMO_READY): pyproject.toml constraints.txt
	@echo "Creating $(VENV) with the package, PyTorch, what training needs, and matplotlib"
	$(PYTHON) -m venv $(VENV)
	@# torch first, so that no other package pulls in a different build of it
	$(INSTALL) torch
	$(INSTALL) --editable '.[demo]'
	touch $@

$(READY): $(DEMO_READY)
	@echo "Adding to $(VENV) what tests, exports and the documentation need"
	$(INSTALL) --editable '.[dev]'
	touch $@

demo: $(DEMO_READY) ## pretrain a tiny model with and without the enhanced mask decoder
	$(RUN) -m hf_deberta demo

notebooks: $(READY) ## execute the notebooks in place and keep their outputs (offline)
	$(RUN) tests/execute_notebooks.py

check: $(READY) ## lint, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

quick: check ## check, and all tests that are not marked slow
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow"

test: check ## check, and all tests
	$(RUN) -m pytest -n 2 --dist worksteal

test-fake-cuda: $(READY) ## run all heads on a simulated GPU: devices, syncs, work (needs a C++ compiler)
	$(RUN) -m pytest -rs tests/test_fake_cuda.py

gpu-counts: $(READY) ## count launches, bytes and FLOPs of a layer on a simulated GPU (needs a C++ compiler)
	$(RUN) -W ignore tests/fake_cuda/gpu_counts.py --csv benchmarks/results/gpu_counts.csv

gpu-host: export OMP_NUM_THREADS := 1
gpu-host: $(READY) ## compare the host's time with BERT's on a simulated GPU, count calls of a layer (needs a C++ compiler)
	$(RUN) -W ignore tests/fake_cuda/host_time.py --csv benchmarks/results/gpu_host.csv

faults: export FAULTS := full
faults: export FAULTS_SEED ?= $(shell date +%s)
faults: $(READY) ## attack with random faults, bad files and kills, for about an hour (repeat a run: FAULTS_SEED=N)
	$(RUN) -m pytest -n 2 --hypothesis-seed=$(FAULTS_SEED) tests/faults

soak: $(READY) ## infer in threads and train for an hour; memory, open files and results must not change
	$(RUN) tests/soak.py --csv benchmarks/results/soak.csv

format: $(READY) ## apply lint fixes and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

package: $(READY) ## build source distribution and wheel into dist/, the wheel from the former (no network needed)
	rm -rf build dist
	$(RUN) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > /dev/null
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist

release-check: package ## build, check the contents, and test the wheel in an empty environment (needs a network)
	$(RUN) tests/release_check.py

test-common: $(READY) ## run Transformers' common model tests on its classes and on ours (network needed once)
	$(RUN) tests/common_model_tests.py --workers 2

test-versions: ## run the core tests on the oldest and the newest Transformers (an hour; needs a network)
	$(PYTHON) tests/versions.py --csv benchmarks/results/versions.csv

test-newest: ## run the tests that are not slow with the newest release of every package but PyTorch (needs a network)
	$(PYTHON) tests/versions.py --releases newest

bench: $(READY) ## measure time and memory on the CPU against Transformers, BERT and installed peers (an hour)
	for dtype in float32 bfloat16 int8; do $(RUN) -W ignore benchmarks/encoder.py --dtype $$dtype || exit 1; done
	$(RUN) -W ignore benchmarks/encoder.py --mode training --cases 8x128 mnli
	$(RUN) -W ignore benchmarks/memory.py

reproduce: $(READY) ## repeat cheap rows of most tables; fail if they differ (more with DATA=folder MODEL=folder)
	$(RUN) -W ignore benchmarks/reproduce.py $(if $(DATA),--data $(DATA)) $(if $(MODEL),--model $(MODEL))

bench-gpu: $(READY) ## on a GPU: correctness, attention, encoders, pretraining, graphs, in an hour (results: RESULTS=folder)
	benchmarks/gpu_hour.sh $(or $(RESULTS),gpu_results) $(RUN)

map: ## list the files of the package, each with the first line of its docstring
	@$(PYTHON) -c 'import ast, pathlib; [print(f"{path!s:54} {ast.get_docstring(ast.parse(path.read_text())).split(chr(10))[0]}") \
		for path in sorted(pathlib.Path("hf_deberta").rglob("*.py"))]'

docs: $(READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean: ## remove .venv, .venv-versions and the output of demo, docs, package and tests
	rm -rf $(VENV) .venv-versions demo_output build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache

.PHONY: help setup demo notebooks check quick test test-fake-cuda gpu-counts gpu-host faults soak format package map docs test-common bench reproduce
.PHONY: bench-gpu clean release-check test-versions test-newest

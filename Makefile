# Everything here sets itself up: a virtual environment in .venv, with the versions of constraints.txt. With an
# interpreter that has all it needs, nothing is set up: make gpu-tests RUN=python3 READY=
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TEXT ?=
LENGTHS ?=
GPU_CASES ?= 32x128 32x512 4x2048 mnli
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install the package with its tested versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# torch on its own first: with it in place, nothing else pulls another build
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY) ## pretrain a tiny model with and without the enhanced mask decoder (TEXT=my.txt for your own text)
	$(RUN) demo.py $(if $(TEXT),--text "$(TEXT)")

check: $(READY) ## lint and format check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(READY) ## apply lint fixes and format
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

test: check ## lint, then all tests
	$(RUN) -m pytest -n 2

test-common: $(READY) ## Transformers' own common model tests, on our classes and on the in-tree ones
	$(RUN) tests/common_model_tests.py --workers 2 --csv benchmarks/results/common_model_tests.csv

bench: $(READY) ## time and memory against in-tree, BERT and installed peers on the CPU (half an hour), and the figure
	$(RUN) -W ignore benchmarks/encoder.py
	$(RUN) -W ignore benchmarks/encoder.py --mode training --cases 8x128 mnli
	$(RUN) -W ignore benchmarks/attention.py
	$(RUN) -W ignore benchmarks/memory.py
	$(RUN) benchmarks/figure.py

bench-gpu: ## on a GPU: the next four, each also if one before it fails
	$(MAKE) --keep-going --jobs=1 gpu-tests gpu-attention gpu-encoder gpu-training

gpu-tests gpu-attention gpu-encoder gpu-training: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu-tests: $(READY) ## the Triton kernels at real sizes, in eight processes where pytest-xdist is there
	$(RUN) -m pytest -m gpu tests/model/test_attention_triton.py $$($(RUN) -c 'import xdist' 2>/dev/null && echo --numprocesses=8)

gpu-attention: $(READY) ## attention alone against its peers (LENGTHS="512 2048 8192" for fewer lengths, each compiles anew)
	$(RUN) -W ignore benchmarks/attention_gpu.py $(if $(LENGTHS),--lengths $(LENGTHS))

gpu-encoder: $(READY) ## a whole encoder against its peers, forward
	$(RUN) -W ignore benchmarks/encoder.py --device cuda --dtype bfloat16 --cases $(GPU_CASES) --repeats 31

gpu-training: $(READY) ## the same, a training step
	$(RUN) -W ignore benchmarks/encoder.py --device cuda --dtype bfloat16 --cases $(GPU_CASES) --repeats 31 --mode training

clean: ## remove .venv and what runs have written
	rm -rf $(VENV) demo_output build dist *.egg-info .pytest_cache .ruff_cache

.PHONY: help setup demo check format test test-common bench bench-gpu gpu-tests gpu-attention gpu-encoder gpu-training clean

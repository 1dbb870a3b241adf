# `make train` and `make test` set up what they need; only Python 3.11+ and make must be there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUICK := cpu program runtime models optim cuda/test_elementwise.py test_house.py

.PHONY: train test extended emulate quick lint oracle families site anatomy techniques gpu-check clean

# Into a dated folder under runs/, or into OUT; then how the result compares with the README's.
train: $(VENV)/.installed
	$(BIN)/barellm train $(if $(OUT),--out $(OUT))
	@$(BIN)/python docs/img/run.py --compare $(or $(OUT),runs)

# One process per core; then, one after the other, the tests that measure time. Of a test's cases those run in which each two values of
# its parameters meet: PYTEST="--cases all" runs all.
test: $(VENV)/.tested
	$(BIN)/python -m pytest -m "not oracle and not alone and not extended" -n auto --dist worksteal $(PYTEST)
	$(BIN)/python -m pytest -m "not oracle and alone" $(PYTEST) || [ $$? = 5 ]  # 5: PYTEST chose none of them

# What takes minutes of processor time, a third of it in CI: golden kernels of CUDA, compiled kernels on the PTX machine, every stage of
# gpu-check on the mock, runs that are killed at every call, whole models drawn at random.
extended: $(VENV)/.tested
	$(BIN)/python -m pytest -m "extended and not oracle" -n auto --dist worksteal $(PYTEST)

# Training steps, commands and planted faults on an emulated GPU, through NVIDIA's bindings: a part of `make extended`. docs/cuda.md
emulate: $(VENV)/.tested
	$(BIN)/python -m pytest -n auto --dist worksteal tests/cuda/test_libcuda.py tests/cuda/test_emulated.py $(PYTEST)

# What an edit needs first, in less than a minute: this machine's instruction set, one case of each kernel's tests.
quick: $(VENV)/.tested
	$(BIN)/python -m pytest --quick -n auto --dist worksteal $(addprefix tests/,$(QUICK)) $(PYTEST)

# The comparisons with PyTorch and transformers: this exact pin installs the CPU build.
oracle: $(VENV)/.oracle
	$(BIN)/python -c "import torch, transformers, peft, openai, langchain_openai, lm_eval, playwright, pyarrow, zstandard, tensorboard, wandb, trackio, sphinx, myst_parser, furo"  # without them the tests below would only be skipped
	$(BIN)/python -m pytest -m oracle $(PYTEST)

# Families of Hugging Face's models against transformers' own classes: the table of the README. FAMILIES="qwen3 olmo2" for some.
families: $(VENV)/.oracle
	$(BIN)/python -m tests.oracle.families $(FAMILIES)

lint: $(VENV)/.linted
	$(BIN)/ruff check anatomy barellm tests benchmarks docs examples
	$(BIN)/ruff format --check anatomy barellm tests benchmarks docs examples
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation as pages for a browser, in build/site. A broken link is an error.
site: $(VENV)/.documented
	$(BIN)/python -m sphinx -c docs -q -W --keep-going -d build/doctrees . build/site
	@echo "build/site/index.html"

# The ladder of a matrix product: its rungs measured in turns, a table and pictures in runs/anatomy. ANATOMY="--size 2000", or --gpu.
anatomy: $(VENV)/.installed
	$(BIN)/python -m anatomy $(ANATOMY)

# Every command of docs/techniques.md, and what it must print. TECHNIQUES='"Polar Express"' for some, by name; --part 3/5 for a fifth.
techniques: $(VENV)/.tested
	$(BIN)/python -m docs.techniques --check $(TECHNIQUES)

# On a machine with a GPU, with that machine's own python3: PyTorch with CUDA, Triton 3.6, cuda-bindings. docs/cuda.md
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check --stages $(or $(STAGES),all) $(if $(OUT),--out $(OUT)) $(GPU_CHECK)

clean:
	rm -rf $(VENV) runs build .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

$(VENV)/.oracle: $(VENV)/.tested
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 accelerate peft==0.21.2 openai langchain-openai "lm_eval[api]>=0.4.13" "playwright>=1.49" -e ".[data,serve,tensorboard,wandb,trackio,docs]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0  # only its files of chat templates are read
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

$(VENV)/.linted: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[lint]"
	touch $@

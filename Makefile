# Everything works from a fresh clone with Python alone: the first target that needs it makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed once, and again when what is installed changes.
STAMP := $(VENV)/.installed
# GPU tests share one device and take turns; without one, every core runs tests.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
PYTEST_ARGS ?= $(if $(GPU),,-n auto --dist loadgroup)

.PHONY: demo test sanitize lint format typecheck generate check-generated links clean

demo: $(STAMP)  ## train a small MoE model next to plain torch; ARGS="--steps 20" goes to the example
	@echo "training two small models, then compiling kernels: a minute or more"
	$(BIN)/cute-grouped-mlp demo $(ARGS)

test: $(STAMP)  ## unit tests, and GPU tests where there is a GPU
	@echo "running the tests: minutes; the first run compiles the catalog's kernels, a few seconds each"
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## generated files are left alone: linters' rewrites change device code
	$(BIN)/ruff check --fix --extend-exclude generated .
	$(BIN)/ruff format --extend-exclude generated .

typecheck: $(STAMP) links
	$(BIN)/mypy

sanitize: $(STAMP)  ## memcheck and racecheck of the kernels of training steps and quantisers; needs a Hopper GPU and compute-sanitizer
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool memcheck $(BIN)/python tests/gpu/sanitize.py
	compute-sanitizer --error-exitcode 1 --tool racecheck $(BIN)/python tests/gpu/sanitize.py --hidden 256 --ffn 128

generate: $(STAMP)  ## render the default kernels into generated/
	$(BIN)/cute-grouped-mlp generate

check-generated: $(STAMP)
	$(BIN)/cute-grouped-mlp generate --check

links:  ## show type checkers what an editable install hides from them
	rm -rf build/typing
	mkdir -p build/typing/cute_grouped_mlp
	ln -s $(CURDIR)/runtime/* $(addprefix $(CURDIR)/,codegen templates generated examples) build/typing/cute_grouped_mlp/

# Where Python already has a torch that reaches a GPU it is used; elsewhere constraints.txt picks a small one.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): about 3 minutes and 3 GB, without output, the first time"
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    $(PYTHON) -m venv --clear --system-site-packages $(VENV) && $(BIN)/python -m pip install -qq -e '.[dev,cu13]'; \
	else \
	    $(PYTHON) -m venv --clear $(VENV) && $(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev,cu13]'; \
	fi
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info

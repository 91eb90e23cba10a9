# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The newest transformers, laid over the same environment for a second and smaller run of the tests of real layers.
NEWEST := .venv-newest

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Processes of tests read the bytecode of refold that the first of them writes, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all test-versions lint site wheel release clean
.NOTPARALLEL:

setup: $(VENV)/.done

# torch first and exactly, so that no later package pulls in another build of it.
$(VENV)/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet transformers==5.17.0
	$(BIN)/python -m pip install --quiet --editable '.[torch,triton,numba,jax,hf,propose,test,lint,plot,docs]'
	touch $@

$(NEWEST)/.done: $(VENV)/.done
	rm -rf $(NEWEST) && mkdir $(NEWEST)
	$(BIN)/python -m pip list --format=freeze | grep '^numpy==' > $(NEWEST)/constraints.txt
	$(BIN)/python -m pip install --quiet --target $(NEWEST) --constraint $(NEWEST)/constraints.txt transformers
	touch $@

demo: setup
	$(BIN)/refold optimize examples/naive_mamba2.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

site: setup
	$(SITE)

# The wheel, in an environment that has nothing but what it asks for.
wheel: setup
	rm -rf build/wheel && $(PYTHON) -m venv build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	build/wheel/bin/python -m pip install --quiet build/wheel/refold-*.whl
	build/wheel/bin/refold --version
	build/wheel/bin/refold doctor

# Sdist and wheel, each in empty environments of the oldest and the newest Python.
release: setup
	rm -rf dist build/release && $(BIN)/python -m pip install --quiet build && $(BIN)/python -m build --outdir dist .
	for python in 3.11 3.13; do for file in dist/*; do \
	  python$$python -m venv --clear build/release && build/release/bin/pip install --quiet $$file && \
	  build/release/bin/pip check && build/release/bin/refold --version && build/release/bin/refold doctor || exit 1; \
	done; done

# Two processes of one thread each; types are checked and the site is built beside them. The first run has Inductor write plain
# loops, and only where a result depends on code; the second vector instructions, as users have it (tests/conftest.py): what a
# newer transformers could change. Slow tests (tests/slow.json) run if any program has changed since they passed. `make test-all`
# also runs the rest of large products, graphs with code, and what shows that each part of a guard is needed (tools/exhaustive.py).
test: setup $(NEWEST)/.done
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	mkdir -p build; ($(BIN)/mypy && $(SITE)) > build/types.txt 2>&1 & checks=$$!; \
	$(BIN)/python -m pytest tests --ignore=tests/gpu -m "not exhaustive and not passed" -n 2 --dist worksteal && \
	TORCHINDUCTOR_VEC_ISA_OK= PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest tests/hf/test_layers.py tests/hf/test_accelerate.py tests/hf/test_random_models.py -m "not exhaustive and not passed" -n 2 --dist worksteal -k "not dynamic_length and not contractions and not compiled_ and not onnx and not sharded" && \
	$(BIN)/python tools/exhaustive.py stamp; \
	status=$$?; wait $$checks || { cat build/types.txt; exit 1; }; exit $$status

test-all: test
	$(BIN)/python tools/exhaustive.py run all

# The oldest and the newest releases of what refold builds on, in environments of its own (tools/versions.py); hours on two cores.
test-versions: setup
	$(BIN)/python tools/versions.py $(SETS)

clean:
	rm -rf $(VENV) $(NEWEST) build dist

# make demo and make test set everything up; they need Python 3.11 and make, nothing else.
PYTHON ?= python3.11
PYTHON37 ?= $(firstword $(shell python3.7 -c 'import sys; print(sys.executable)' 2>/dev/null) \
              $(wildcard $(shell pyenv root 2>/dev/null)/versions/3.7*/bin/python3.7))
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# without bytecode, every process that a test starts compiles the package again
unexport PYTHONDONTWRITEBYTECODE

# Three workers for two cores, since tests of several hosts wait for timeouts. Tests that share an expensive fixture or
# a cache go to one worker (pytest.mark.xdist_group).
QUICK = tests/topology tests/planning tests/cli/test_cli.py tests/cluster/test_launcher.py tests/docs/test_pages.py \
        tests/test_formatting.py tests/test_presets.py tests/test_sampling.py tests/docs/test_published.py
OVER_LANES = tests/graph/test_allreduce.py tests/graph/test_entries.py
GPU_PYTHON ?= .venv/bin/python
PYTEST = -m pytest -n 3 --dist loadgroup $(PYTEST_OPTIONS)

.PHONY: wheel-test test-compat soak fuzz mutants chaos trust-slice help venv venv-tf1 demo test test-tf1 test-gpu test-lanes test-quick docs figures lint clean

help:
	@echo "make demo        train on handwritten digits, 8 devices, and check the result"
	@echo "make test        the tests, on TensorFlow 2 and Python 3.11: 5 minutes on two cores"
	@echo "make test-tf1    the same tests on TensorFlow 1.15 and Python 3.7"
	@echo "make test-gpu    tests/gpu on 8 logical GPUs of one; GPU_PYTHON=... is a Python with a TensorFlow for GPUs"
	@echo "make test-lanes  the tests of the all-reduce, with every all-reduce over 1 and over 3 lanes"
	@echo "make test-quick  the tests that need no TensorFlow, about a minute"
	@echo "make test-compat the core of the tests on TensorFlow 2.10, 2.15 and the newest, in environments of their own"
	@echo "make wheel-test  build sdist and wheel, and use each in an environment without TensorFlow"
	@echo "make lint        ruff and mypy"
	@echo "make docs        the documentation's site, in build/site"
	@echo "make figures     draw the pictures of README and of the site again"
	@echo "make soak        random all-reduces against float64, long training, threads: 30 minutes"
	@echo "make fuzz        damaged files, tables and arguments: 20 minutes"
	@echo "make mutants     plans with one fault: 10 minutes"
	@echo "make chaos       hosts that are killed, frozen, late or cut off: 30 minutes"
	@echo "make trust-slice the four of them, two minutes each"
	@echo "PYTEST_OPTIONS='-k planner -x' goes to pytest"

venv: .venv/.done
venv-tf1: .venv-tf1/.done

# what the demo needs
.venv/.demo: setup.cfg pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: Python 3.11 is needed: no '$(PYTHON)' on PATH (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet -e '.[tf,demo]'
	@touch $@

# and what tests and docs need
.venv/.done: .venv/.demo
	.venv/bin/python -m pip install --quiet -e '.[tf,tensorpack,bench,demo,dev,docs]'
	# Keras 2, for the tests; by itself it would bring the package tensorflow beside tensorflow-cpu
	.venv/bin/python -m pip install --quiet --no-deps "tf_keras==$$(.venv/bin/python -c \
	  'import importlib.metadata as m; print(".".join(m.version(m.packages_distributions()["tensorflow"][0]).split(".")[:2]))').*"
	@touch $@

.venv-tf1/.done: setup.cfg pyproject.toml
	@test -n "$(PYTHON37)" || { echo "make: Python 3.7 is needed for TensorFlow 1.15: none on PATH and none in pyenv (set PYTHON37=...)" >&2; exit 1; }
	$(PYTHON37) -m venv .venv-tf1
	.venv-tf1/bin/python -m pip install --quiet --upgrade pip
	.venv-tf1/bin/python -m pip install --quiet -e '.[tf,tensorpack,bench,demo,dev]'
	@touch $@

demo: .venv/.demo
	.venv/bin/hier-allreduce demo

test: .venv/.done
	.venv/bin/python $(PYTEST)

test-tf1: .venv-tf1/.done
	.venv-tf1/bin/python $(PYTEST)

test-gpu: .venv/.done
	$(GPU_PYTHON) -m pytest -n 0 --timeout 600 --split-gpu 8 tests/gpu $(PYTEST_OPTIONS)

test-lanes: .venv/.done
	for lanes in 1 3; do TEST_LANES=$$lanes .venv/bin/python $(PYTEST) $(OVER_LANES) || exit 1; done

test-quick: .venv/.done
	.venv/bin/python $(PYTEST) --no-tensorflow $(QUICK)

# strict: a link that leads nowhere is an error
docs: .venv/.done
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
	@echo "the site is in build/site/index.html"

figures: .venv/.done
	.venv/bin/python docs/generate/figures.py

soak: .venv/.done
	.venv/bin/python -m trust.soak $(TRUST_OPTIONS)

fuzz: .venv/.done
	.venv/bin/python -m trust.fuzz $(TRUST_OPTIONS)

mutants: .venv/.done
	.venv/bin/python -m trust.mutants_of_plans $(TRUST_OPTIONS)

chaos: .venv/.done
	.venv/bin/python -m trust.chaos $(TRUST_OPTIONS)

trust-slice: .venv/.done
	.venv/bin/python -m trust.soak --seconds 120
	.venv/bin/python -m trust.fuzz --seconds 120
	.venv/bin/python -m trust.mutants_of_plans --seconds 120
	.venv/bin/python -m trust.chaos --seconds 120

wheel-test: .venv/.done
	.ci/wheel-test .venv/bin/python

test-compat:
	.ci/test-compat

lint: .venv/.done
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	# what other systems do not have, os.sched_getaffinity for one
	.venv/bin/mypy --platform win32 --cache-dir .mypy_cache/win32
	.venv/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin

clean:
	rm -rf .venv .venv-tf1 .venv-compat-* build dist *.egg-info

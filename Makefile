# make demo and make test set everything up; they need make and a Python from 3.10 to 3.13, nothing else.
PYTHON ?= $(shell for version in 3.11 3.12 3.13 3.10; do python$$version -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
PYTHON37 ?= $(firstword $(shell python3.7 -c 'import sys; print(sys.executable)' 2>/dev/null) \
              $(wildcard $(shell pyenv root 2>/dev/null)/versions/3.7*/bin/python3.7))
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# without bytecode, every process that a test starts compiles the package again
unexport PYTHONDONTWRITEBYTECODE

# Three workers for two cores, since tests of several hosts wait for timeouts.
PYTEST = -m pytest -n 3 --dist loadgroup $(PYTEST_OPTIONS)
# the tests that say what programs meet: on GPUs too
ON_GPUS = tests/graph tests/training tests/audit tests/integrations tests/cluster/test_cluster.py \
          tests/test_random.py tests/emulated_gpu
QUICK = tests/tools/doctor tests/tools/test_entry.py tests/planning tests/docs/test_pages.py

.PHONY: help venv venv-tf1 demo test test-tf1 test-quick test-gpu test-compat bench soak wheel-test docs reference figures lint clean

help:
	@echo "make demo        train on handwritten digits, 8 devices, and check the result"
	@echo "make test        the tests, on TensorFlow 2"
	@echo "make test-tf1    the same tests on TensorFlow 1.15 and Python 3.7"
	@echo "make test-quick  the tests that need no TensorFlow"
	@echo "make test-gpu    the tests of all-reduces and training on emulated GPUs (on real ones: CONTRIBUTING.md)"
	@echo "make test-compat the tests of all-reduces and training on TensorFlow 2.10, 2.15 and the newest"
	@echo "make bench       real steps beside emulated ones; this all-reduce beside others on emulated GPUs and CPU devices"
	@echo "make soak        the random tests with more examples and another seed"
	@echo "make wheel-test  build the package and the tools, and use them in environments without TensorFlow"
	@echo "make lint        ruff and mypy, without TensorFlow"
	@echo "make docs        the documentation's site, in build/site"
	@echo "make reference   write docs/reference from the code again"
	@echo "make figures     draw the pictures of the pages again"
	@echo "PYTEST_OPTIONS='-k audit -x' goes to pytest"

venv: .venv/.done
venv-tf1: .venv-tf1/.done

# .venv grows in three steps: what lint needs …
.venv/.lint: setup.cfg pyproject.toml tools/setup.cfg
	@test -n "$(PYTHON)" || { echo "make: a Python from 3.10 to 3.13 is needed: none on PATH (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet -e '.[lint]'
	@touch $@

# … what the demo needs …
.venv/.demo: .venv/.lint
	.venv/bin/python -m pip install --quiet -e '.[tf,demo]'
	@touch $@

# … and what tests and docs need
.venv/.done: .venv/.demo
	.venv/bin/python -m pip install --quiet -e '.[tf,tensorpack,demo,dev,docs]' -e ./tools
	# Keras 2, for the tests; by itself it would bring the package tensorflow beside tensorflow-cpu
	.venv/bin/python -m pip install --quiet --no-deps "tf_keras==$$(.venv/bin/python -c \
	  'import importlib.metadata as m; print(".".join(m.version(m.packages_distributions()["tensorflow"][0]).split(".")[:2]))').*"
	@touch $@

.venv-tf1/.done: setup.cfg pyproject.toml tools/setup.cfg
	@test -n "$(PYTHON37)" || { echo "make: Python 3.7 is needed for TensorFlow 1.15: none on PATH and none in pyenv (set PYTHON37=...)" >&2; exit 1; }
	$(PYTHON37) -m venv .venv-tf1
	.venv-tf1/bin/python -m pip install --quiet --upgrade pip
	.venv-tf1/bin/python -m pip install --quiet -e '.[tf,tensorpack,demo,dev]' -e ./tools
	@touch $@

# TensorFlow's plug-in that shows GPUs on a machine without one: tests/emulated_gpu/README.md
build/emulated_gpu.so: .venv/.done FORCE
	@$(MAKE) --no-print-directory -j 2 -f tests/emulated_gpu/Makefile PYTHON=.venv/bin/python

.PHONY: FORCE
FORCE:

demo: .venv/.demo
	.venv/bin/python examples/digits.py

test: .venv/.done
	.venv/bin/python $(PYTEST)
	@command -v $(CXX) >/dev/null || echo "make test: without a C++ compiler ($(CXX)) make test-gpu is left out"

test-tf1: .venv-tf1/.done
	.venv-tf1/bin/python $(PYTEST)

test-quick: .venv/.done
	.venv/bin/python $(PYTEST) --no-tensorflow $(QUICK)

test-gpu: build/emulated_gpu.so
	.venv/bin/python $(PYTEST) --devices gpu $(ON_GPUS)

test-compat:
	.ci/test-compat

bench: .venv/.done build/emulated_gpu.so
	.venv/bin/python benchmarks/emulated.py dgx-1v,pcie-pairs,4x-rtx-4090 resnet50 --anchors --passes 60
	.venv/bin/python benchmarks/cpu_devices.py

soak: .venv/.done
	.venv/bin/python -m pytest -n 2 --hypothesis-profile soak --timeout 3600 tests/test_random.py tests/training/test_random_trainings.py $(PYTEST_OPTIONS)

# strict: a link that leads nowhere is an error; with --quiet, mkdocs would not count it
docs: .venv/.done
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
	@echo "the site is in build/site/index.html"

reference: .venv/.done
	.venv/bin/python docs/generate/reference.py

figures: .venv/.done
	.venv/bin/python docs/generate/figures.py

wheel-test: .venv/.done
	.ci/wheel-test .venv/bin/python

# all three, also if the first fails
lint: .venv/.lint
	@status=0; for check in "ruff check ." "ruff format --check ." mypy; do \
	  echo "$$check"; .venv/bin/$$check || status=1; done; exit $$status

clean:
	rm -rf .venv .venv-tf1 .venv-compat-* build dist *.egg-info tools/build tools/*.egg-info

# All commands: `make help`. What they need, `make setup` makes first, and takes no time where it is there.
#
# PYTHON    the Python to build .venv with (3.11, 3.12 or 3.13); without it the first such one on the PATH
# PIP_ARGS  passed to pip. On Linux, pip takes PyTorch's CUDA build (3 GB to download) unless it is told of the
#           smaller CPU build: make setup PIP_ARGS="--extra-index-url ADDRESS", with the address that PyTorch's
#           "get started" page gives for CPU. `make clean` first, to change a .venv that has the other build.
# LAB_ARGS  passed to JupyterLab: make lab LAB_ARGS="--no-browser --ip 0.0.0.0 --port 9000"
# BENCH_ARGS  passed to the benchmarks: make bench-gpu BENCH_ARGS="--quick", or "--help" for all of them
# PEERS     folder with scripts that run other engines for `make bench`; PEERS_ENV the folder they are installed in
# NB        the notebook that `make refresh` executes; without it all of them

PYTHONS = python3 python3.13 python3.12 python3.11 python
PY = .venv/bin/python

# A thread of torch that waits sleeps instead of spinning: with anything beside it, steps are 5 to 20 times faster.
export OMP_WAIT_POLICY = passive

.PHONY: help setup lab test test-browser bench bench-gpu conformance soak demo lint format refresh clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# A Python counts as found if it runs: pyenv puts names on the PATH that only say "command not found".
setup: ## make .venv with everything in it and fetch the model (done first by the commands below)
ifdef PYTHON
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[0] != 3)' 2>/dev/null || { \
	    echo 'PYTHON="$(PYTHON)" is no Python 3 that runs: name a Python 3.11, 3.12 or 3.13.' >&2; exit 1; }
	@"$(PYTHON)" minivllm/devtools/bootstrap.py --this-python
else
	@found=; for python in $(PYTHONS); do \
	    version=`$$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null` || continue; \
	    case $$version in 3.11|3.12|3.13) exec $$python minivllm/devtools/bootstrap.py;; esac; \
	    found="$${found:+$$found, }$$python is $$version"; \
	done; \
	echo "minivllm needs Python 3.11, 3.12 or 3.13 and finds none ($${found:-there is no Python on the PATH}):" \
	    "install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13)," \
	    "or name one you have: make setup PYTHON=/path/to/python3.12" >&2; exit 1
endif

lab: setup ## open JupyterLab on the notebooks (LAB_ARGS="--no-browser --port 9000")
	@JUPYTER_PREFER_ENV_PATH=1 $(PY) -m jupyterlab --ServerApp.root_dir=. \
	    --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
	    $$(test "$$(id -u)" != 0 || echo --allow-root) $(LAB_ARGS)

demo: setup ## a one-minute tour in the terminal
	@$(PY) -m minivllm.lessons.demo

test: lint ## all checks: lint, types, unit tests, every cell of every notebook
	$(PY) -m pytest tests
	$(PY) -m pytest --nbval notebooks

test-browser: setup ## the explorer and the chat page in a real Chromium
	@$(PY) tests/browser/chromium.py
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) playwright
	MINIVLLM_BROWSER=1 $(PY) -m pytest tests/browser

conformance: setup ## other people's load generators against our server (PEERS_ENV= names the folder that has vLLM)
	@$(PY) -m tests.conformance $(if $(PEERS_ENV),--installed $(PEERS_ENV)) --pip-args "$(PIP_ARGS)" $(BENCH_ARGS)

soak: setup ## random steps of all schedulers, every invariant checked; then 20 minutes of load on a server
	$(PY) -m tests.scheduler.soak
	$(PY) -m tests.server.soak $(BENCH_ARGS)

bench: setup ## minivllm's speed on this CPU, alone or beside other engines (PEERS=folder PEERS_ENV=folder)
	@env -u OMP_WAIT_POLICY $(PY) -m benchmarks.engines $(if $(PEERS),--peers $(PEERS)) \
	    $(if $(PEERS_ENV),--installed $(PEERS_ENV)) $(BENCH_ARGS)

bench-gpu: setup ## the kernels and the engine on a CUDA card (BENCH_ARGS="--quick")
	@$(PY) -m benchmarks.gpu $(BENCH_ARGS)

lint: setup ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup ## mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

refresh: setup ## execute the notebooks anew, in place (NB=notebooks/NAME.ipynb for one)
	$(PY) -m minivllm.devtools.refresh $(NB)

clean: ## remove .venv and all caches, but not the model
	rm -rf .venv .setup.lock .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist minivllm.egg-info
	find minivllm tests notebooks -name __pycache__ -prune -exec rm -rf {} + -o \
	    -name .ipynb_checkpoints -prune -exec rm -rf {} +

distclean: clean ## remove the model too
	rm -rf data/models

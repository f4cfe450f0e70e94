# Two commands on a fresh machine: `make demo` trains a small model, `make test` runs the default suite.
# Needs Python >= 3.11, make and the package registry; everything lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test browser check format gallery losses faults bench-device clean

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "alltokens needs Python >= 3.11, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/installed
	$(BIN)/alltokens train quickstart

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)
ifeq ($(strip $(ARGS)),)
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then $(MAKE) --no-print-directory browser; \
	else echo "left out: the browser tests, for want of chromium and chromedriver"; fi
endif

browser: $(VENV)/installed
	$(BIN)/python -m pytest -m browser tests/browser

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pictures of docs/pictures.md; RUN=DIR takes a run of `alltokens train quickstart` that is there already.
gallery: $(VENV)/installed
	$(BIN)/python docs/gallery.py $(RUN)

losses: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.test_recipe_losses

# Kills, full disks, hostile files, long runs; the figures go to benchmarks/faults.json and into docs/reliability.md.
faults: $(VENV)/installed
	OMP_NUM_THREADS=1 ALLTOKENS_FAULTS_FIGURES=benchmarks/faults.json \
		$(BIN)/python -m pytest -n $(WORKERS) -q -m 'not gpu' tests/faults
	$(BIN)/python -m benchmarks.faults

bench-device: $(VENV)/installed
	$(BIN)/python -m benchmarks.device $(ARGS)

clean:
	rm -rf $(VENV) build dist

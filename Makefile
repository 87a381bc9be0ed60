# make test PYTHON3=python3.12 takes another interpreter.
PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check --no-input
# Named after the interpreter, so that asking for another one makes the environment anew.
STAMP := $(VENV)/.made-with-$(notdir $(PYTHON3))

export PYTHONUNBUFFERED := 1
# The tests start some hundred interpreters, and each would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo monitor test test-long checks live-checks lint programs vllm bench bench-tuner bench-drift docs lock clean

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## run the exporter on a simulated vLLM; ARGS="--scenario list" and the like
	$(VENV)/bin/specdec-exporter demo $(ARGS)

monitor: $(STAMP) ## run Prometheus and Alertmanager on the demo, and print what is sent
	@$(PYTHON) -m tests.real.monitor

# A vLLM under load wants a core for itself: those tests come one after the other, first on the
# processor, and the rest beside them takes what is left.
test: ## fetch Prometheus, Chromium and vLLM, lint, and run all tests
	@$(MAKE) --no-print-directory -j3 vllm checks live-checks

checks: programs lint
	nice -n 19 $(PYTHON) -m pytest -m "not (live or long)" --cov \
		--numprocesses=3 --dist=loadfile --no-loadscope-reorder

live-checks: programs lint
	$(PYTHON) -m pytest -m live tests/real

lint: $(STAMP) ## ruff, mypy and the layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

test-long: $(STAMP) vllm ## run what takes minutes on a real vLLM: calibrate, and an evening of tuning
	$(PYTHON) -m pytest -s -m long

# A program that cannot be had is told of here; its tests are skipped, or fail where CI is set.
programs: $(STAMP)
	@$(PYTHON) -m tests.real.debian prometheus prometheus-alertmanager kubectl chromium || :

vllm:
	@tests/vllm/install.sh > /dev/null || :

bench: $(STAMP) ## measure what the exporter costs
	$(PYTHON) -m bench

bench-tuner: $(STAMP) ## measure what the tuner gets of what is possible; ARGS="--quick" and the like
	nice $(PYTHON) -m bench.tuner $(ARGS)

bench-drift: $(STAMP) ## drift detectors: false alarms and delays; ARGS="--quick", ARGS=scenarios.yaml
	nice $(PYTHON) -m bench.drift $(ARGS)

docs: $(STAMP) ## write what is made from the code, and the site of docs/ to build/site
	$(PYTHON) -m specdec_exporter.expose > docs/metrics.md.new
	@mv docs/metrics.md.new docs/metrics.md
	$(PYTHON) -m reference.settings > docs/settings.md.new
	@mv docs/settings.md.new docs/settings.md
	$(PYTHON) -m reference.api > docs/api.md.new
	@mv docs/api.md.new docs/api.md
	$(PYTHON) -m reference.shell docs/numbers.md
	$(VENV)/bin/specdec-exporter rules > alerts/specdec.rules.yaml
	$(VENV)/bin/specdec-exporter rules --source vllm > alerts/fleet.rules.yaml
	$(PYTHON) -m grafana.dashboards
	$(VENV)/bin/specdec-exporter rules --format prometheusrule > deploy/kubernetes/monitoring/prometheus-rule.yaml
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

COMPILE := $(VENV)/bin/uv pip compile pyproject.toml --quiet --no-config --universal \
	--python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock"

lock: $(STAMP) ## resolve the dependencies again; UPGRADE=1 takes newer releases
	$(COMPILE) $(if $(UPGRADE),--upgrade) --output-file requirements.lock
	$(COMPILE) $(if $(UPGRADE),--upgrade) --output-file requirements-dev.lock \
		--group dev --constraint requirements.lock

clean: ## remove what was made here, the environment included
	rm -rf $(VENV) build dist .coverage .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache

$(STAMP): requirements-dev.lock pyproject.toml
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: $(PYTHON3) is missing or older than 3.11; try: make PYTHON3=python3.11" >&2; exit 1; }
	@$(PYTHON3) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON3) cannot make environments; try: apt install python3-venv" >&2; exit 1; }
	$(PYTHON3) -m venv --clear $(VENV)
	$(PIP) install --quiet --require-hashes --no-deps --no-compile --requirement requirements-dev.lock
	$(PIP) install --quiet --no-index --no-build-isolation --editable .
	@touch $@

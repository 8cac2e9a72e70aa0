# Commands for a checkout. Each command runs its own set-up. `make help` lists them.
SHELL := /bin/sh
PY := .venv/bin/python
E2E := tests/e2e
# Three test files run at once: two compute, and one mostly waits for Kubernetes. If you have more cores, run
# make test TEST_WORKERS=5
TEST_WORKERS ?= 3
PYTEST = $(PY) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=25
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The environment may forbid writing bytecode. Each process would then compile the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

# Tests of the documentation and of packages. `make test` runs a third of these files, `make test-docs` all.
DOCS_TESTS := $(wildcard tests/integration/test_docs_*.py) tests/integration/test_plugin_archive.py \
  tests/integration/test_payload_wheels.py
TESTS ?= tests --ignore=tests/e2e --ignore=tests/release
TINY_MODEL := $(PY) -c 'from testing.engine.tiny_model import tiny_model; tiny_model()'  # before any engine loads it

.DEFAULT_GOAL := help
.PHONY: help setup setup-light kube sglang images demo test test-all test-docs e2e test-fast test-light test-changed test-busy test-vllm-versions test-avx2 test-kube-versions check docs format generate pictures pins fuzz soak bench bench-peer gpu-check gpu-bundle audit test-release release clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what the other targets need (safe to repeat)
	@tools/setup.sh

setup-light: ## install what most unit tests need, without torch, vLLM and servers (half a minute)
	@tools/setup.sh light

kube: setup ## build the Kubernetes binaries into the cache directory (once, 6-8 min)
	@$(PY) -m tools.kube.binaries

images: setup ## build the images of releases and tests, print their sizes (root; 3 min, 11 on a busy machine; later seconds)
	@$(PY) -m tools.images

demo: ## run the main use case with real engines, Redis and Kubernetes
	@tools/setup.sh base
	@$${PYTHON:-python3} -m demo.start

sglang: setup ## install SGLang into the cache directory, for tests (once, 170 MB, half a minute)
	@$(PY) -m testing.sglang

test: setup kube sglang ## run all tests that need no GPU, with real Redis, vLLM, SGLang and kube-apiserver
	@$(TINY_MODEL)
	@$(PYTEST) --cpu-report .pytest_cache/cpu.json $(TESTS) $(if $(WITHOUT_DOCS),$(DOCS_TESTS:%=--ignore=%))

test-all: export LMCACHE_TEST_SCOPE = all
test-all: export LMCACHE_TEST_SEED := $(or $(LMCACHE_TEST_SEED),$(shell date +%s))
test-all: setup kube sglang ## run all cases and ten times the random examples (hours); a part: make test-all TESTS=tests/unit
	@$(TINY_MODEL)
	@$(PYTEST) $(TESTS)

test-docs: export LMCACHE_TEST_SCOPE = all
test-docs: setup kube ## run the commands and the YAML of the documentation, open its site, and test packages
	@$(TINY_MODEL)
	@$(PYTEST) $(DOCS_TESTS)

e2e: setup sglang ## test chart, operator and engines as pods of a real kubelet (root; 30 min, and 8-22 min once); one file: make e2e E2E=FILE
	@$(PY) -m testing.node
	@$(PY) -m tools.kube.binaries $$($(PY) -c 'from testing.node.cluster import PROGRAMS; print(*PROGRAMS)')
	@$(PY) -m testing.engine.upstream
	@$(PY) -m tools.images
	@$(PY) -m testing.node $(PY) -m pytest -v --durations=8 $(E2E)

# Unit tests compute and do not wait.
test-fast test-light: TEST_WORKERS = $(shell nproc)
test-fast: setup ## run the unit tests, 2.5 minutes
	@$(PYTEST) tests/unit

test-light: setup-light ## run the unit tests that need neither torch nor vLLM, and skip the others
	@$(PYTEST) tests/unit

test-changed: setup ## run the tests that your change may break; of all commits since REV: make test-changed BASE=REV
	@files=$$($(PY) -m tools.changed_tests $(BASE)) && if [ -n "$$files" ]; then $(PYTEST) $$files; fi

test-busy: setup ## run FILES 20 times next to 4 busy loops: each new or changed test of real processes must pass
	@$(PY) -m tools.busy $(FILES)

test-vllm-versions: setup ## test the connector on the oldest and newest vLLM (downloads 500 MB once, some minutes)
	@$(PY) -m testing.engine.versions

test-avx2: export LMCACHE_TEST_CPU = $(CURDIR)/testing/avx2
test-avx2: export PYTHONPATH := $(CURDIR)/testing/avx2:$(CURDIR)
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: setup ## run the engine's tests as on a processor with AVX2 and without AVX-512
	@$(TINY_MODEL)
	@$(PYTEST) tests/unit/test_other_processor.py tests/unit/vllm_connector tests/integration/test_vllm*.py

test-kube-versions: export LMCACHE_KUBE_VERSION = 1.33
test-kube-versions: setup kube ## test operator and chart on the oldest supported Kubernetes (built once, 6-8 min)
	@$(PYTEST) tests/integration/test_operator*.py tests/integration/test_chart*.py

fuzz: setup ## search for inputs that break a promise (FUZZ_SECONDS=60 per target; one: make fuzz FUZZ=calls)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m tests.fuzz $(FUZZ)

soak: setup ## run traffic on a sidecar while everything fails (SOAK_SECONDS=3600); check answers and leaks
	@SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m testing.soak

check: setup ## check format, lint, types, borders, sizes, generated files, words, commits, chart, site
	@$(PY) -m tools.check

docs: ## serve the documentation site at http://127.0.0.1:8000; it follows your changes
	@tools/setup.sh base
	@$${PYTHON:-python3} -m tools.docs serve

format: setup-light ## format the code, and apply fixes of the linter
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

generate: setup ## generate the wire contract's code, the CRDs and the reference pages
	@tools/generate_proto.sh
	@$(PY) -m tools.generate

pictures: kube ## record a run of real programs again, and draw the pictures of the documentation (7 minutes)
	@$(PY) -m tools.pictures.record
	@$(PY) -m tools.generate

pins: setup ## resolve pyproject.toml into tools/requirements/ again
	@tools/pins.sh

bench: setup ## run all benchmarks; one: python -m benchmarks NAME [--json FILE]
	@$(PY) -m benchmarks

bench-peer: setup ## compare with upstream's packages, each in a separate environment
	@$(PY) -m benchmarks peer peer_server

gpu-check: ## test and measure the GPU of this machine, no network, 10 min; with your engine's Python: PYTHON=...
	@PATH="$${PATH#$(CURDIR)/.venv/bin:}" $${PYTHON:-python3} -m benchmarks.gpu --folder "$${OUT:-/tmp/gpu-check}" \
	  --page docs/reference/gpu-facts.md $(STEPS)

gpu-bundle: ## pack .gpu/ for a GPU machine without network; with vLLM: make gpu-bundle ENGINE=vllm
	@tools/setup.sh base
	@$${PYTHON:-python3} -m tools.gpu_bundle $(if $(ENGINE),--engine "$(ENGINE)") $(if $(MACHINE),--machine "$(MACHINE)") \
	  $(if $(TARGET_PYTHON),--python "$(TARGET_PYTHON)") $(if $(ARCHITECTURE),--architecture "$(ARCHITECTURE)")

audit: ## look for known vulnerabilities and licences in shipped packages; exit status 3: no answer
	@tools/setup.sh base
	@$${PYTHON:-python3} -m tools.provenance.audit

test-release: setup ## test signatures, SBOMs and reproducible images with a local registry (root)
	@$(PY) -m pytest -q --durations=8 tests/release

release: ## push images and chart of VERSION to REGISTRY (Docker with buildx), signed with KEY; with URL, build the plugin
	@tools/setup.sh base
	@$${PYTHON:-python3} -m tools.release --version "$(VERSION)" --registry "$(REGISTRY)" $(if $(DIGESTS),--digests "$(DIGESTS)") \
	  $(if $(KEY),--key "$(KEY)") --sboms dist/sboms \
	  $(if $(URL),--plugin dist/plugin --url "$(URL)")

clean: ## delete the results of targets in the checkout, not the cache directory
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo/report.json demo/logs

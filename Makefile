# The commands that always work from a checkout. Each does its own set-up; `make help` lists them.
SHELL := /bin/sh
PY := .venv/bin/python
E2E := tests/e2e
# Two test files run at once. On a machine with more cores: make test TEST_WORKERS=4
TEST_WORKERS ?= 2
PYTEST := $(PY) -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=25
export PYTHONPATH := $(CURDIR)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup kube images demo test e2e test-fast test-vllm-versions test-avx2 test-kube-versions check format generate pins bench bench-peer gpu-check release clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## everything the other targets need, idempotent
	@tools/setup.sh

kube: setup ## the Kubernetes binaries, built once into the cache directory (6-8 min from nothing)
	@$(PY) -m tools.kube.binaries

images: setup ## the images of a release and of tests, with their sizes (root; 3 min from nothing, then seconds)
	@$(PY) -m tools.images

demo: ## the main job on real parts, with something to look at
	@tools/setup.sh base
	@$${PYTHON:-python3} -m demo.start

test: setup kube ## everything that needs no GPU, on real Redis, vLLM and kube-apiserver
	@$(PY) -c 'from testing.engine.tiny_model import tiny_model; tiny_model()'  # older than the engines that load it
	@$(PYTEST) tests --ignore=tests/e2e

e2e: setup ## the chart, operator and engines as pods of a real kubelet (root); one file: make e2e E2E=FILE
	@$(PY) -m testing.node
	@$(PY) -m tools.kube.binaries $$($(PY) -c 'from testing.node.cluster import PROGRAMS; print(*PROGRAMS)')
	@$(PY) -m tools.images
	@$(PY) -m testing.node $(PY) -m pytest -v --durations=8 $(E2E)

test-fast: setup ## the part that needs none of them, in under a minute
	@$(PYTEST) tests/unit

test-vllm-versions: setup ## the connector on the oldest and the newest vLLM (500 MB fetched once, some minutes)
	@$(PY) -m testing.engine.versions

test-avx2: export LMCACHE_TEST_CPU = $(CURDIR)/testing/avx2
test-avx2: export PYTHONPATH := $(CURDIR)/testing/avx2:$(CURDIR)
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: setup ## the engine's tests as on a processor with AVX2 and without AVX-512
	@$(PY) -c 'from testing.engine.tiny_model import tiny_model; tiny_model()'
	@$(PYTEST) tests/unit/test_other_processor.py tests/unit/vllm_connector tests/integration/test_vllm*.py

test-kube-versions: export LMCACHE_KUBE_VERSION = 1.33
test-kube-versions: setup kube ## the operator and the chart on the oldest supported Kubernetes (built once, 6-8 min)
	@$(PYTEST) tests/integration/test_operator*.py tests/integration/test_chart.py

check: setup kube ## format, lint, types, borders, sizes, generated files, chart
	@$(PY) -m tools.check

format: setup ## format the code and mend what the linter can
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

generate: setup ## the wire contract's code, the CRD, the chart's copy of it
	@tools/generate_proto.sh
	@$(PY) -m tools.generate

pins: setup ## resolve pyproject.toml into tools/requirements/ anew
	@tools/pins.sh

bench: setup ## all benchmarks; one: python -m benchmarks NAME [--json FILE]
	@$(PY) -m benchmarks

bench-peer: setup ## the same beside upstream's packages, each in an environment of its own
	@$(PY) -m benchmarks peer peer_server

gpu-check: setup ## tests of the GPU paths on a GPU, and docs/reference/gpu-facts.md of what it shows
	@$(PY) -m benchmarks.gpu

release: ## push images and chart of VERSION to REGISTRY (Docker with buildx, logged in)
	@python3 -m tools.release --version "$(VERSION)" --registry "$(REGISTRY)" $(if $(DIGESTS),--digests "$(DIGESTS)")

clean: ## what the targets made inside the checkout (the cache directory stays)
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo/report.json demo/logs

#!/bin/sh
# Resolves pyproject.toml into tools/requirements/, with hashes. No file names an index, so that any mirror works.
# engine.txt is a freeze of the engine's own resolution. Its versions are edited by hand, and this script renews their
# hashes. It constrains the other files.
set -eu
cd "$(dirname "$0")/.."
lock() { uv pip compile --quiet --no-emit-index-url --no-header --no-annotate --python-version 3.11 --generate-hashes "$@"; }
compile() { lock --upgrade --constraint tools/requirements/engine.txt "$@"; }
renew_hashes() {
  sed -n 's/^\([A-Za-z0-9._-]*==[^ ]*\).*/\1/p' "$1" | lock --no-deps --output-file "$1.new" -
  mv "$1.new" "$1"
}
renew_hashes tools/requirements/engine.txt
compile pyproject.toml --extra sidecar --extra operator --extra dev --output-file tools/requirements/dev.txt
# The hooks before a commit use the same linter.
sed -i "s/^    rev: .*/    rev: v$(sed -n 's/^ruff==\([^ ]*\).*/\1/p' tools/requirements/dev.txt)/" .pre-commit-config.yaml
echo 'torch==2.13.0' | compile --output-file tools/requirements/torch.txt -

# Packages of the images: the same versions, and for the operator no packages of the storage core.
image() { compile --constraint tools/requirements/dev.txt --constraint tools/requirements/torch.txt "$@"; }
image pyproject.toml --extra sidecar --extra cuda --output-file sidecar/requirements.txt
image pyproject.toml --extra operator --no-emit-package numpy --no-emit-package xxhash --no-emit-package grpcio \
  --no-emit-package protobuf --output-file operator/requirements.txt
# vLLM's router, for its image and for tests (testing/router.py).
echo 'vllm-router==0.1.17' | image --output-file router/requirements.txt -
# Packages that build the images, and the editable project in .venv.
printf 'uv\nhatchling\neditables\n' | compile --output-file tools/requirements/build.txt -
# Packages that audit the images' packages and check their SBOMs (tools/provenance).
printf 'pip-audit\ncyclonedx-python-lib[json-validation]\n' | compile --output-file tools/requirements/audit.txt -
# Packages that build the documentation site (tools/docs.py). The theme needs MkDocs 1.
printf 'mkdocs<2\nmkdocs-material\n' | compile --output-file tools/requirements/docs.txt -
# SGLang's engine for tests, which testing/sglang/environment.py installs without dependencies into a folder of its
# own. torch and most other packages that it imports come from .venv. Its pins for GPUs are not installed.
printf 'sglang==0.5.23\norjson\nipython\ntraitlets\nsoundfile==0.13.1\n' | compile --no-deps \
  --output-file tools/requirements/sglang.txt -
# Atheris, which finds inputs for `make fuzz`. tests/fuzz/environment.py installs it into a folder of its own.
echo 'atheris==3.0.0' | compile --no-deps --output-file tools/requirements/fuzz.txt -
# Packages of the bundle for GPU machines (make gpu-bundle), which run Python 3.10 or later. The versions of vllm.txt are
# edited by hand, like the engine's. Its transformers must suit this vLLM, too.
bundle=tools/gpu_bundle/requirements
compile_for_oldest() {
  uv pip compile --quiet --no-emit-index-url --no-header --no-annotate --python-version 3.10 --generate-hashes --upgrade "$@"
}
printf 'opentelemetry-api\npytest\npytest-timeout\npytest-xdist\nredis\nsafetensors\n' | compile_for_oldest pyproject.toml \
  --extra sidecar --extra cuda --output-file $bundle/project.txt -
echo 'transformers>=5.16.1,<5.21' | compile_for_oldest --constraint $bundle/project.txt --output-file $bundle/transformers.txt -
renew_hashes $bundle/vllm.txt

#!/bin/sh
# Generates the message classes. protoc 31 (grpcio-tools 1.75): its code runs on protobuf 6.31 and newer, 7.x included,
# which is the support window of the engines that the client is loaded into.
set -eu
cd "$(dirname "$0")/.."
uv run --quiet --no-project --isolated --with grpcio-tools==1.75.1 --with 'setuptools<81' \
  python -m grpc_tools.protoc -I. --python_out="${1:-.}" --pyi_out="${1:-.}" \
  lmcache/rpc/kvcache.proto testing/dra/kubelet.proto

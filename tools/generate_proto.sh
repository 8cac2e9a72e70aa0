#!/bin/sh
# Generates the message classes with protoc 31 (grpcio-tools 1.75). Its code runs on protobuf 6.31 and newer, including
# 7.x. This covers the engines that import the client.
set -eu
cd "$(dirname "$0")/.."
uv run --quiet --no-project --isolated --with grpcio-tools==1.75.1 --with 'setuptools<81' \
  python -m grpc_tools.protoc -I. --python_out="${1:-.}" --pyi_out="${1:-.}" \
  lmcache/rpc/kvcache.proto testing/dra/kubelet.proto

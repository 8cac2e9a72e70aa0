#!/bin/sh
# Generates the message classes with protoc 31 (grpcio-tools 1.75). Its code runs on protobuf 6.31 and newer, including
# 7.x. This covers the engines that import the client.
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
# generate FOLDER FILE: the path of the file below the folder becomes the name of the generated module.
generate() {
  mkdir -p "$out/$1"
  uv run --quiet --no-project --isolated --with grpcio-tools==1.75.1 --with 'setuptools<81' \
    python -m grpc_tools.protoc "-I$1" "--python_out=$out/$1" "--pyi_out=$out/$1" "$2"
}
generate sidecar lmcache_client/rpc/kvcache.proto
generate . testing/dra/kubelet.proto

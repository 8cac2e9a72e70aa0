#!/bin/sh
# Test and measure this project on a GPU machine without network: sh .gpu/run.sh [STEP...]
# `sh .gpu/run.sh --help` lists the steps. Variables:
#   OUT              folder of the results (default: /tmp/gpu-out)
#   PYTHON           the Python that has torch (default: python3)
#   GPU_ENVIRONMENT  folder for the unpacked bundle; a second run reuses it (default: /tmp/lmcache-gpu-UID)
#   TOTAL            time limit in seconds (default: 540)
set -eu
bundle=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-/tmp/gpu-out}
environment=${GPU_ENVIRONMENT:-${TMPDIR:-/tmp}/lmcache-gpu-$(id -u)}
started=$(date +%s)

mkdir -p "$out"
out=$(cd "$out" && pwd)
"${PYTHON:-python3}" "$bundle/environment.py" "$environment" || exit 1

# Nothing asks the network: the machine has none, and each attempt would wait for a timeout.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# Engines that share KV need equal hashes.
export PYTHONHASHSEED=0
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export LMCACHE_CACHE_DIR="${LMCACHE_CACHE_DIR:-$environment/cache}"
export PATH="$environment/bin:$PATH"
unset PYTHONPATH PYTHONHOME  # the environment has these folders
# Containers often mount the driver's libraries here, outside of the loader's path.
if [ -d /usr/local/nvidia/lib64 ]; then
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
fi

cd "$(dirname "$bundle")"
left=$((${TOTAL:-540} - $(date +%s) + started))
exec "$environment/bin/python" -m benchmarks.gpu --folder "$out" --seconds "$left" "$@"

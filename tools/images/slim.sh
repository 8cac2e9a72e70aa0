#!/bin/sh
# Deletes files of installed packages that an image never uses.
#
#   tools/images/slim.sh FOLDER
set -eu
cd "$1"

# Tests, stubs, headers, sources of extension modules, and bytecode. The build compiles the remaining files at its end.
find . -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete
# Models and calls of every kind of Kubernetes (120 MB): the operator's objects are plain dictionaries. Three
# models are imported by the synchronous client's informer.
find . -path '*/kubernetes/*client/api/*' -name '*_api.py' -delete
find . -path '*/kubernetes/*client/models/*' -name 'v[0-9]*.py' ! -name v1_managed_fields_entry.py \
  ! -name v1_object_meta.py ! -name v1_owner_reference.py -delete
# The images use only the driver interface of CUDA, and only the arrays of numpy.
find . -path '*/cuda/bindings/*.so' ! -name 'driver.*' ! -name 'cydriver.*' ! -name 'utils.*' -delete
find . -path '*/numpy/_core/*.so' \( -name '_simd.*' -o -name '_*_tests.*' \) -delete
for unused in cuda/bindings/_v2 numpy/f2py numpy/distutils numpy/fft numpy/ma numpy/polynomial numpy/random \
    numpy/testing; do
  find . -type d -path "*/site-packages/$unused" -prune -exec rm -rf {} +
done

# Skip numpy: strip breaks libraries whose segments were moved by the build of their wheel.
find . -type f -name '*.so*' ! -path '*/numpy*' -exec strip --strip-unneeded {} +
# Bundles of different Pythons have most files in common, and one bundle has the same files as the sidecar.
hardlink --content --quiet .

#!/bin/sh
# Takes out of installed packages what an image never runs.
#
#   tools/images/slim.sh FOLDER
set -eu
cd "$1"

# Tests, stubs, headers, sources of extension modules, and bytecode (of what stays it is made in the end).
find . -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete
# Models and calls of every kind of Kubernetes (120 MB): the operator's objects are plain dictionaries. Three
# models are imported by the synchronous client's informer.
find . -path '*/kubernetes/*client/api/*' -name '*_api.py' -delete
find . -path '*/kubernetes/*client/models/*' -name 'v[0-9]*.py' ! -name v1_managed_fields_entry.py \
  ! -name v1_object_meta.py ! -name v1_owner_reference.py -delete
# Of CUDA only the driver's interface is used, of numpy only arrays.
find . -path '*/cuda/bindings/*.so' ! -name 'driver.*' ! -name 'cydriver.*' ! -name 'utils.*' -delete
find . -path '*/numpy/_core/*.so' \( -name '_simd.*' -o -name '_*_tests.*' \) -delete
for unused in cuda/bindings/_v2 numpy/f2py numpy/distutils numpy/fft numpy/ma numpy/polynomial numpy/random \
    numpy/testing; do
  find . -type d -path "*/site-packages/$unused" -prune -exec rm -rf {} +
done

# Not numpy's: strip breaks libraries whose segments were moved when their wheel was made.
find . -type f -name '*.so*' ! -path '*/numpy*' -exec strip --strip-unneeded {} +
# The bundles of several Pythons share most of their files, and one of them all with the sidecar.
hardlink --content --quiet .

#!/bin/sh
# Builds the runner against the libraries of ExecuTorch's wheel: build.sh SITE-PACKAGES/executorch RUNNER [LIBRARY]
# LIBRARY: deltic's operators, as `deltic export --operators deltic` names it; for programs that want them.
set -e
here=$(dirname "$0")
g++ -std=c++17 -O2 -Wall -Wextra -DC10_USING_CUSTOM_GENERATED_MACROS \
    -isystem "$1/include" -isystem "$1/include/executorch/runtime/core/portable_type/c10" \
    "$here/runner.cpp" "$here/operators.cpp" -o "$2" $3 -L"$1/lib" -Wl,-rpath,"$1/lib" -Wl,--no-as-needed \
    -lexecutorch -lexecutorch_kernels_optimized -lexecutorch_backend_xnnpack -lexecutorch_threadpool

#!/usr/bin/env bash
# Build dist/flashinfer-*.whl, install it beside FlashInfer in .venv, and show what it repairs.
#
#   scripts/build.sh                the whole of it, on a fresh machine, GPU or not
#   scripts/build.sh --wheel-only   build the wheel and nothing else
#
# FLASHINFER_CUDA_ARCH_LIST ("9.0 10.0") says what to compile for.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "$*" in
  "" | --wheel-only) ;;
  *) die "scripts/build.sh takes --wheel-only or nothing, got: $*" ;;
esac

python="$(build_python)"
[[ "${python}" == "${VENV}/bin/python" ]] && install_build_requirements
build_wheel "${python}"
[[ "${1:-}" == --wheel-only ]] && exit

make_venv
install_upstream
install_wheel
install --group emulation
say "reproduce the reported failure, and see it gone"
"${VENV}/bin/python" scripts/reproduce.py

#!/usr/bin/env bash
# Lint, build the wheel and the CPU emulation, install the wheel beside FlashInfer in .venv, and run
# the tests: those of the GPUs too, where there are GPUs. Does all set-up on a fresh machine.
#
#   scripts/test.sh [--wheel FILE] [pytest arguments]
#
# --wheel FILE tests a wheel that was built elsewhere from these sources.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

wheel=""
if [[ "${1:-}" == --wheel ]]; then
  [[ -f "${2:-}" ]] || die "--wheel ${2:-}: there is no such file"
  wheel="$(realpath "$2")"
  shift 2
fi

install_build_requirements
bash scripts/lint.sh
if [[ -n "${wheel}" ]]; then
  mkdir -p dist
  rm -f dist/flashinfer-*.whl
  cp "${wheel}" dist/
else
  build_wheel "${VENV}/bin/python"
fi
install --group verify
say "verify the wheel"
"${VENV}/bin/python" scripts/verify_wheel.py dist/flashinfer-*.whl

install_upstream
install_wheel
install --group test
say "build the CPU emulation"
"${VENV}/bin/python" emulation/build.py

# Arguments may leave nothing to run of a suite.
run_tests() {
  say "test $*"
  "${VENV}/bin/python" -m pytest "$@" "${arguments[@]}" || [[ $? == 5 && ${#arguments[@]} -gt 0 ]]
}
arguments=("$@")

# A file's tests share what is expensive to make, so a file is not split.
run_tests --numprocesses auto --maxprocesses 8 --dist loadfile \
  tests/unit tests/contract tests/emulation
# One at a time, because they use all GPUs, where there are GPUs.
run_tests tests/consumers
if has_gpu; then run_tests tests/gpu; fi

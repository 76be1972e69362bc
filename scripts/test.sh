#!/usr/bin/env bash
# Lint, build the wheel and the CPU emulation, install the wheel beside FlashInfer in .venv, and run
# the tests: those of the GPUs too, where there are GPUs. Does all set-up on a fresh machine.
#
#   scripts/test.sh [pytest arguments]

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_build_requirements
bash scripts/lint.sh
build_wheel "${VENV}/bin/python"
install --group verify
say "verify the wheel"
"${VENV}/bin/python" scripts/verify_wheel.py dist/flashinfer-*.whl

install_upstream
install_wheel
say "build the CPU emulation"
"${VENV}/bin/python" emulation/build.py

suites=(tests/unit tests/contract tests/emulation)
if has_gpu; then suites+=(tests/gpu); fi
say "test ${suites[*]}"
"${VENV}/bin/python" -m pytest "${suites[@]}" "$@"

#!/usr/bin/env bash
# Lint: ruff, mypy --strict, clang-format, shellcheck. `scripts/lint.sh --fix` rewrites what it can.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "$*" in
  "" | --fix) ;;
  *) die "scripts/lint.sh takes --fix or nothing, got: $*" ;;
esac

make_venv
install_torch
install --group lint --group test --group upstream-import

bin="${VENV}/bin"
mapfile -t sources < <(
  find csrc include emulation \( -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' \
    -o -name '*.cpp' \)
)

if [[ "${1:-}" == --fix ]]; then
  "${bin}/ruff" check --fix .
  "${bin}/ruff" format .
  "${bin}/clang-format" -i "${sources[@]}"
  exit
fi

say "ruff"
"${bin}/ruff" check .
"${bin}/ruff" format --check .
say "mypy --strict"
"${bin}/mypy" flashinfer/elastic build_tools scripts
say "clang-format"
"${bin}/clang-format" --dry-run -Werror "${sources[@]}"
say "shellcheck"
"${bin}/shellcheck" -x scripts/*.sh .ci/run

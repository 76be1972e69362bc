# shellcheck shell=bash
# Sourced by the other scripts: the virtual environment they share, and the steps they have in common.
#
# PYTHON (python3)   the interpreter .venv is made from
# MAX_JOBS           how many compilers run at once

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly ROOT
readonly VENV="${ROOT}/.venv"
readonly TORCH="torch==2.13.0"
readonly UPSTREAM="flashinfer-python==0.6.13"
cd "${ROOT}"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

has_gpu() { command -v nvidia-smi > /dev/null && nvidia-smi --list-gpus 2> /dev/null | grep -q GPU; }

# Can this interpreter build the wheel as it is, without a download?
can_build() {
  "$1" - << 'EOF' 2> /dev/null
import importlib.metadata as metadata
import shutil

from build_tools import kernels, requirements, toolkit

assert int(metadata.version("setuptools").split(".")[0]) >= 77
assert toolkit.find_nvcc() and kernels.find_ninja() and kernels.find_tvm_ffi()
assert shutil.which("g++")
EOF
}

# Makes .venv where there is none. A torch that works already is used, not downloaded again.
make_venv() {
  local python="${PYTHON:-python3}"
  if [[ ! -x "${VENV}/bin/python" ]]; then
    say "make ${VENV}"
    "${python}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      die "Python 3.10 or later is needed; set PYTHON"
    if "${python}" -c 'import torch' 2> /dev/null; then
      "${python}" -m venv --system-site-packages "${VENV}"
    else
      "${python}" -m venv "${VENV}"
    fi
  fi
  # Dependency groups need pip 25.1.
  "${VENV}/bin/python" -m pip --version | grep -qE '^pip (2[6-9]|[3-9][0-9]|25\.[1-9])' ||
    "${VENV}/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
}

install() { "${VENV}/bin/python" -m pip install --quiet "$@"; }

# The interpreter that builds: this machine's where it has all it takes, else .venv's.
build_python() {
  local python="${PYTHON:-python3}"
  if [[ ! -x "${VENV}/bin/python" ]] && can_build "${python}"; then
    command -v "${python}"
  else
    printf '%s\n' "${VENV}/bin/python"
  fi
}

# The library is compiled against the oldest TVM FFI that is supported, so .venv gets that one.
# Without a network, whatever .venv sees will do: the wheel then asks for that version or later.
install_build_requirements() {
  make_venv
  say "install what the build needs"
  # shellcheck disable=SC2046  # one requirement a word
  install "setuptools>=77" $("${VENV}/bin/python" -m build_tools.requirements) ||
    can_build "${VENV}/bin/python"
}

# torch for this machine. Without a GPU a CPU build is enough, and the CUDA one is several gigabytes:
# where pip is set up with an index of CPU builds, it is taken from there.
install_torch() {
  "${VENV}/bin/python" -c 'import torch' 2> /dev/null && return
  say "install torch"
  if has_gpu; then
    install "${TORCH}"
  else
    install "${TORCH}+cpu" 2> /dev/null || install "${TORCH}"
  fi
}

# Upstream must lie in .venv itself: the wheel's files land in its package directory.
install_upstream() {
  install_torch
  say "install ${UPSTREAM} and what it imports"
  install --group upstream-import
  "${VENV}/bin/python" - "${VENV}" "${UPSTREAM##*==}" << 'EOF' ||
import importlib.metadata as metadata
import sys

for found in metadata.distributions(name="flashinfer-python"):
    in_venv = str(found.locate_file("")).startswith(sys.argv[1])
    sys.exit(not in_venv or found.version != sys.argv[2])
sys.exit(1)
EOF
    install --no-deps --ignore-installed "${UPSTREAM}"
}

# Builds dist/flashinfer-*.whl without build isolation: the compilers' inputs then have the same
# paths every time, and ninja compiles what changed only.
build_wheel() {
  local python="$1"
  say "build the wheel"
  local staging
  staging="$(mktemp -d)"
  "${python}" -m pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir "${staging}"
  mkdir -p dist
  rm -f dist/flashinfer-*.whl
  mv "${staging}"/flashinfer-*.whl dist/
  rmdir "${staging}"
  ls -l dist/flashinfer-*.whl
}

install_wheel() {
  say "install the wheel beside ${UPSTREAM}"
  install --no-deps --force-reinstall dist/flashinfer-*.whl
}

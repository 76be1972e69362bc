#!/usr/bin/env bash
# Build and verify this machine's share of the wheel matrix: one wheel for each architecture and the
# combined one, in dist/matrix/ with their SHA-256 sums. The other CPU's wheels are built by running
# this there, since a wheel counts as good only once its library has been loaded.

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[[ $# == 0 ]] || die "scripts/build_matrix.sh takes no arguments, got: $*"

install_build_requirements
install --group verify

matrix=dist/matrix
rm -rf "${matrix}"
mkdir -p "${matrix}"
for architectures in "9.0" "10.0" "9.0 10.0"; do
  export FLASHINFER_CUDA_ARCH_LIST="${architectures}"
  build_wheel "${VENV}/bin/python"
  mv dist/flashinfer-*.whl "${matrix}/"
done
say "verify"
"${VENV}/bin/python" scripts/verify_wheel.py "${matrix}"/*.whl
(cd "${matrix}" && sha256sum ./*.whl | tee SHA256SUMS)

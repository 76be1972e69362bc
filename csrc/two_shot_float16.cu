#include "flashinfer_elastic/two_shot.cuh"
#include "kernel_table.cuh"

namespace flashinfer_elastic {

Kernel two_shot_float16(uint32_t ranks, bool whole) {
  return kernel_for<TwoShot, Float16>(ranks, whole);
}

}  // namespace flashinfer_elastic

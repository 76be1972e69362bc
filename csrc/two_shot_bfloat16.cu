#include "flashinfer_elastic/two_shot.cuh"
#include "kernel_table.cuh"

namespace flashinfer_elastic {

Kernel two_shot_bfloat16(uint32_t ranks, Variant variant) {
  return kernel_for<TwoShot, BFloat16>(ranks, variant);
}

}  // namespace flashinfer_elastic

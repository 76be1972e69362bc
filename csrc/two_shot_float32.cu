#include "flashinfer_elastic/two_shot.cuh"
#include "kernel_table.cuh"

namespace flashinfer_elastic {

Kernel two_shot_float32(uint32_t ranks, Variant variant) {
  return kernel_for<TwoShot, Float32>(ranks, variant);
}

}  // namespace flashinfer_elastic

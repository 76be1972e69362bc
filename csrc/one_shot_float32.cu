#include "flashinfer_elastic/one_shot.cuh"
#include "kernel_table.cuh"

namespace flashinfer_elastic {

Kernel one_shot_float32(uint32_t ranks, Variant variant) {
  return kernel_for<OneShot, Float32>(ranks, variant);
}

}  // namespace flashinfer_elastic

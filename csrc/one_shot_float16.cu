#include "flashinfer_elastic/one_shot.cuh"
#include "kernel_table.cuh"

namespace flashinfer_elastic {

Kernel one_shot_float16(uint32_t ranks, Variant variant) {
  return kernel_for<OneShot, Float16>(ranks, variant);
}

}  // namespace flashinfer_elastic

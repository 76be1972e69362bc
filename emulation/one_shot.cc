#include "flashinfer_elastic/one_shot.cuh"

#include "kernel_table.h"

namespace flashinfer_elastic::emulation {

Kernel one_shot_kernel(ElementType type, uint32_t ranks, bool specialised) {
  return kernel_for<OneShot>(type, ranks, specialised);
}

}  // namespace flashinfer_elastic::emulation

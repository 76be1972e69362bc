#include "flashinfer_elastic/two_shot.cuh"

#include "kernel_table.h"

namespace flashinfer_elastic::emulation {

Kernel two_shot_kernel(ElementType type, uint32_t ranks, bool specialised) {
  return kernel_for<TwoShot>(type, ranks, specialised);
}

}  // namespace flashinfer_elastic::emulation

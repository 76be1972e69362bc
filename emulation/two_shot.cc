#include "flashinfer_elastic/two_shot.cuh"

#include "kernel_table.h"

namespace flashinfer_elastic::emulation {

Kernel two_shot_kernel(const Variant& variant) { return kernel_for<TwoShot>(variant); }

}  // namespace flashinfer_elastic::emulation

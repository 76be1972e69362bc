#include "flashinfer_elastic/one_shot.cuh"

#include "kernel_table.h"

namespace flashinfer_elastic::emulation {

Kernel one_shot_kernel(const Variant& variant) { return kernel_for<OneShot>(variant); }

}  // namespace flashinfer_elastic::emulation

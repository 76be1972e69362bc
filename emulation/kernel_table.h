// Instantiates an algorithm for each element type and group size. Of the sizes that a device build
// is specialised for, those that the tests use: the rest differ in a loop's trip count alone.
#pragma once

#include "flashinfer_elastic/numerics.cuh"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic::emulation {

template <template <typename, uint32_t, typename> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks, bool specialised) {
  switch (specialised ? ranks : 0) {
    case 2:
      return Algorithm<T, 2, Unicast<2>>::run;
    case 3:
      return Algorithm<T, 3, Unicast<3>>::run;
    case 4:
      return Algorithm<T, 4, Unicast<4>>::run;
    case 5:
      return Algorithm<T, 5, Unicast<5>>::run;
    case 8:
      return Algorithm<T, 8, Unicast<8>>::run;
    default:
      return Algorithm<T, 0, Unicast<0>>::run;
  }
}

template <template <typename, uint32_t, typename> class Algorithm>
Kernel kernel_for(ElementType type, uint32_t ranks, bool specialised) {
  switch (type) {
    case ElementType::kFloat16:
      return kernel_for<Algorithm, Float16>(ranks, specialised);
    case ElementType::kBFloat16:
      return kernel_for<Algorithm, BFloat16>(ranks, specialised);
    case ElementType::kFloat32:
      return kernel_for<Algorithm, Float32>(ranks, specialised);
  }
  return nullptr;
}

}  // namespace flashinfer_elastic::emulation

// Instantiates an algorithm as kernels. Those for whole rows are specialised for the usual group
// sizes; ragged and unaligned rows are rare, and share one kernel for groups of any size.
#pragma once

#include "flashinfer_elastic/launch_shape.h"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic {

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          uint32_t kRanks, bool kWhole, bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads, kResidentThreads / kMaxThreads)
    run_kernel(const __grid_constant__ Arguments a) {
  Algorithm<T, kRanks, Unicast<kRanks>, kWhole, kQuantized>::run(a);
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          uint32_t kRanks>
Kernel kernel_for(Variant variant) {
  if (variant.quantized) {
    return variant.whole ? run_kernel<Algorithm, T, kRanks, true, true>
                         : run_kernel<Algorithm, T, 0, false, true>;
  }
  return variant.whole ? run_kernel<Algorithm, T, kRanks, true, false>
                       : run_kernel<Algorithm, T, 0, false, false>;
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks, Variant variant) {
  switch (ranks) {
    case 2:
      return kernel_for<Algorithm, T, 2>(variant);
    case 3:
      return kernel_for<Algorithm, T, 3>(variant);
    case 4:
      return kernel_for<Algorithm, T, 4>(variant);
    case 5:
      return kernel_for<Algorithm, T, 5>(variant);
    case 6:
      return kernel_for<Algorithm, T, 6>(variant);
    case 7:
      return kernel_for<Algorithm, T, 7>(variant);
    case 8:
      return kernel_for<Algorithm, T, 8>(variant);
    default:
      return kernel_for<Algorithm, T, 0>(variant);
  }
}

}  // namespace flashinfer_elastic

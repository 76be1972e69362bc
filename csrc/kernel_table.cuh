// Instantiates an algorithm as kernels, one for each group size it is specialised for.
#pragma once

#include "flashinfer_elastic/launch_shape.h"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic {

template <template <typename, uint32_t, typename, bool> class Algorithm, typename T,
          uint32_t kRanks, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads, kResidentThreads / kMaxThreads)
    run_kernel(const __grid_constant__ Arguments a) {
  Algorithm<T, kRanks, Unicast<kRanks>, kWhole>::run(a);
}

template <template <typename, uint32_t, typename, bool> class Algorithm, typename T,
          uint32_t kRanks>
Kernel kernel_for(bool whole) {
  return whole ? run_kernel<Algorithm, T, kRanks, true> : run_kernel<Algorithm, T, kRanks, false>;
}

template <template <typename, uint32_t, typename, bool> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks, bool whole) {
  switch (ranks) {
    case 2:
      return kernel_for<Algorithm, T, 2>(whole);
    case 3:
      return kernel_for<Algorithm, T, 3>(whole);
    case 4:
      return kernel_for<Algorithm, T, 4>(whole);
    case 5:
      return kernel_for<Algorithm, T, 5>(whole);
    case 6:
      return kernel_for<Algorithm, T, 6>(whole);
    case 7:
      return kernel_for<Algorithm, T, 7>(whole);
    case 8:
      return kernel_for<Algorithm, T, 8>(whole);
    default:
      return kernel_for<Algorithm, T, 0>(whole);
  }
}

}  // namespace flashinfer_elastic

// Instantiates an algorithm as kernels, one for each group size it is specialised for.
#pragma once

#include "flashinfer_elastic/launch_shape.h"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic {

// A multiprocessor has room for kMaxThreads threads of such a kernel, which launch_shape.h counts
// on.
template <template <typename, uint32_t, typename> class Algorithm, typename T, uint32_t kRanks>
__global__ void __launch_bounds__(kMaxThreads, 1)
    run_kernel(const __grid_constant__ Arguments arguments) {
  Algorithm<T, kRanks, Unicast<kRanks>>::run(arguments);
}

template <template <typename, uint32_t, typename> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks) {
  switch (ranks) {
    case 2:
      return run_kernel<Algorithm, T, 2>;
    case 3:
      return run_kernel<Algorithm, T, 3>;
    case 4:
      return run_kernel<Algorithm, T, 4>;
    case 5:
      return run_kernel<Algorithm, T, 5>;
    case 6:
      return run_kernel<Algorithm, T, 6>;
    case 7:
      return run_kernel<Algorithm, T, 7>;
    case 8:
      return run_kernel<Algorithm, T, 8>;
    default:
      return run_kernel<Algorithm, T, 0>;
  }
}

}  // namespace flashinfer_elastic

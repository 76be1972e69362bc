// Instantiates an algorithm as kernels. Those for whole rows are specialised for the usual group
// sizes; ragged and unaligned rows are rare, and share one kernel for groups of any size.
#pragma once

#include "flashinfer_elastic/launch_shape.h"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic {

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          uint32_t kRanks, typename Link, bool kWhole, bool kQuantized>
__global__ void __launch_bounds__(kMaxThreads, kResidentThreads / kMaxThreads)
    run_kernel(const __grid_constant__ Arguments a) {
  Algorithm<T, kRanks, Link, kWhole, kQuantized>::run(a);
}

// `kRanks` is the group size to specialise for, or 0.
template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          template <uint32_t> class Transport, uint32_t kRanks>
Kernel kernel_over(Variant variant) {
  if (variant.quantized) {
    return variant.whole ? run_kernel<Algorithm, T, kRanks, Transport<kRanks>, true, true>
                         : run_kernel<Algorithm, T, 0, Transport<0>, false, true>;
  }
  return variant.whole ? run_kernel<Algorithm, T, kRanks, Transport<kRanks>, true, false>
                       : run_kernel<Algorithm, T, 0, Transport<0>, false, false>;
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel unicast_kernel(uint32_t ranks, Variant variant) {
  switch (ranks) {
    case 2:
      return kernel_over<Algorithm, T, Unicast, 2>(variant);
    case 3:
      return kernel_over<Algorithm, T, Unicast, 3>(variant);
    case 4:
      return kernel_over<Algorithm, T, Unicast, 4>(variant);
    case 5:
      return kernel_over<Algorithm, T, Unicast, 5>(variant);
    case 6:
      return kernel_over<Algorithm, T, Unicast, 6>(variant);
    case 7:
      return kernel_over<Algorithm, T, Unicast, 7>(variant);
    case 8:
      return kernel_over<Algorithm, T, Unicast, 8>(variant);
    default:
      return kernel_over<Algorithm, T, Unicast, 0>(variant);
  }
}

// One store serves a group of any size, so only the loop over what arrives gains from knowing it:
// specialised for the sizes that NVLink switches usually join.
template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel multicast_kernel(uint32_t ranks, Variant variant) {
  switch (ranks) {
    case 4:
      return kernel_over<Algorithm, T, Multicast, 4>(variant);
    case 8:
      return kernel_over<Algorithm, T, Multicast, 8>(variant);
    default:
      return kernel_over<Algorithm, T, Multicast, 0>(variant);
  }
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks, Variant variant) {
  return variant.multicast ? multicast_kernel<Algorithm, T>(ranks, variant)
                           : unicast_kernel<Algorithm, T>(ranks, variant);
}

}  // namespace flashinfer_elastic

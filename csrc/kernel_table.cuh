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

// Specialised where the group has one of the sizes, else the kernel for any.
template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          template <uint32_t> class Transport, uint32_t... kSizes>
Kernel kernel_of(uint32_t ranks, Variant variant) {
  Kernel kernel = kernel_over<Algorithm, T, Transport, 0>(variant);
  ((ranks == kSizes
        ? static_cast<void>(kernel = kernel_over<Algorithm, T, Transport, kSizes>(variant))
        : static_cast<void>(0)),
   ...);
  return kernel;
}

// One multicast store serves a group of any size, so only the loop over what arrives gains from
// knowing it: specialised for the sizes that NVLink switches usually join.
template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel kernel_for(uint32_t ranks, Variant variant) {
  return variant.multicast ? kernel_of<Algorithm, T, Multicast, 4, 8>(ranks, variant)
                           : kernel_of<Algorithm, T, Unicast, 2, 3, 4, 5, 6, 7, 8>(ranks, variant);
}

}  // namespace flashinfer_elastic

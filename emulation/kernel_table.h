// Instantiates an algorithm for each element type and group size. Of the sizes that a device build
// is specialised for, those that the tests use: the rest differ in a loop's trip count alone.
#pragma once

#include "flashinfer_elastic/numerics.cuh"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic::emulation {

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          uint32_t kRanks, typename Link>
Kernel kernel_over(const Variant& variant) {
  if (variant.quantized) {
    return variant.whole ? Algorithm<T, kRanks, Link, true, true>::run
                         : Algorithm<T, kRanks, Link, false, true>::run;
  }
  return variant.whole ? Algorithm<T, kRanks, Link, true, false>::run
                       : Algorithm<T, kRanks, Link, false, false>::run;
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T,
          uint32_t kRanks>
Kernel kernel_for_ranks(const Variant& variant) {
  return variant.multicast ? kernel_over<Algorithm, T, kRanks, Multicast<kRanks>>(variant)
                           : kernel_over<Algorithm, T, kRanks, Unicast<kRanks>>(variant);
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm, typename T>
Kernel kernel_for(const Variant& variant) {
  switch (variant.specialised ? variant.ranks : 0) {
    case 2:
      return kernel_for_ranks<Algorithm, T, 2>(variant);
    case 3:
      return kernel_for_ranks<Algorithm, T, 3>(variant);
    case 4:
      return kernel_for_ranks<Algorithm, T, 4>(variant);
    case 5:
      return kernel_for_ranks<Algorithm, T, 5>(variant);
    case 8:
      return kernel_for_ranks<Algorithm, T, 8>(variant);
    default:
      return kernel_for_ranks<Algorithm, T, 0>(variant);
  }
}

template <template <typename, uint32_t, typename, bool, bool> class Algorithm>
Kernel kernel_for(const Variant& variant) {
  switch (variant.type) {
    case ElementType::kFloat16:
      return kernel_for<Algorithm, Float16>(variant);
    case ElementType::kBFloat16:
      return kernel_for<Algorithm, BFloat16>(variant);
    case ElementType::kFloat32:
      return kernel_for<Algorithm, Float32>(variant);
  }
  return nullptr;
}

}  // namespace flashinfer_elastic::emulation

// Instantiates an algorithm for each element type and group size. Of the sizes that a device build
// is specialised for, those that the tests use: the rest differ in a loop's trip count alone.
#pragma once

#include "flashinfer_elastic/numerics.cuh"
#include "flashinfer_elastic/transport.cuh"
#include "kernels.h"

namespace flashinfer_elastic::emulation {

template <template <typename, uint32_t, typename, bool> class Algorithm, typename T,
          uint32_t kRanks>
Kernel kernel_for(bool whole, bool multicast) {
  if (multicast) {
    return whole ? Algorithm<T, kRanks, Multicast<kRanks>, true>::run
                 : Algorithm<T, kRanks, Multicast<kRanks>, false>::run;
  }
  return whole ? Algorithm<T, kRanks, Unicast<kRanks>, true>::run
               : Algorithm<T, kRanks, Unicast<kRanks>, false>::run;
}

template <template <typename, uint32_t, typename, bool> class Algorithm, typename T>
Kernel kernel_for(const Variant& variant) {
  switch (variant.specialised ? variant.ranks : 0) {
    case 2:
      return kernel_for<Algorithm, T, 2>(variant.whole, variant.multicast);
    case 3:
      return kernel_for<Algorithm, T, 3>(variant.whole, variant.multicast);
    case 4:
      return kernel_for<Algorithm, T, 4>(variant.whole, variant.multicast);
    case 5:
      return kernel_for<Algorithm, T, 5>(variant.whole, variant.multicast);
    case 8:
      return kernel_for<Algorithm, T, 8>(variant.whole, variant.multicast);
    default:
      return kernel_for<Algorithm, T, 0>(variant.whole, variant.multicast);
  }
}

template <template <typename, uint32_t, typename, bool> class Algorithm>
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

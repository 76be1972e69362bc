// The compiled kernels, one translation unit for each strategy and element type.
#pragma once

#include "flashinfer_elastic/arguments.h"

namespace flashinfer_elastic {

using Kernel = void (*)(Arguments);

struct Variant {
  bool whole;      // faster, and takes only rows of whole vectors, one segment a thread
  bool quantized;  // writes a quantised copy of the norm's output
  bool multicast;  // sends to all ranks with one store
};

// Each gives the kernel for a group of `ranks`: one specialised for that number, or one for any.
Kernel one_shot_float16(uint32_t ranks, Variant variant);
Kernel one_shot_bfloat16(uint32_t ranks, Variant variant);
Kernel one_shot_float32(uint32_t ranks, Variant variant);
Kernel two_shot_float16(uint32_t ranks, Variant variant);
Kernel two_shot_bfloat16(uint32_t ranks, Variant variant);
Kernel two_shot_float32(uint32_t ranks, Variant variant);

}  // namespace flashinfer_elastic

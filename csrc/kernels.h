// The compiled kernels, one translation unit for each strategy and element type.
#pragma once

#include "flashinfer_elastic/arguments.h"

namespace flashinfer_elastic {

using Kernel = void (*)(Arguments);

// Each gives the kernel for a group of `ranks`, specialised for 2 to 8 and generic beyond. `whole`
// asks for the faster one that takes only rows of whole vectors, one segment a thread.
Kernel one_shot_float16(uint32_t ranks, bool whole);
Kernel one_shot_bfloat16(uint32_t ranks, bool whole);
Kernel one_shot_float32(uint32_t ranks, bool whole);
Kernel two_shot_float16(uint32_t ranks, bool whole);
Kernel two_shot_bfloat16(uint32_t ranks, bool whole);
Kernel two_shot_float32(uint32_t ranks, bool whole);

}  // namespace flashinfer_elastic

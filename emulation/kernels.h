// The kernels, compiled for the emulated machine from the same headers as for a device.
#pragma once

#include "flashinfer_elastic/arguments.h"
#include "multiprocessor.h"

namespace flashinfer_elastic::emulation {

// `specialised` picks the kernel compiled for just this number of ranks, where there is one, as a
// device launch does; otherwise the one for any number.
Kernel one_shot_kernel(ElementType type, uint32_t ranks, bool specialised);
Kernel two_shot_kernel(ElementType type, uint32_t ranks, bool specialised);

// Threads 0 and 1 of a block pass a number through shared memory, with or without the barrier that
// this takes: shows that ThreadSanitizer sees what fibers do.
Kernel planted_race_kernel(bool with_barrier);

}  // namespace flashinfer_elastic::emulation

// The kernels, compiled for the emulated machine from the same headers as for a device.
#pragma once

#include "flashinfer_elastic/arguments.h"
#include "multiprocessor.h"

namespace flashinfer_elastic::emulation {

// Of the kernels of an algorithm, the one to launch.
struct Variant {
  ElementType type;
  uint32_t ranks;
  bool specialised;  // compiled for just this number of ranks, if there is one; else for any
  bool whole;        // every row is made of whole vectors, one a thread
  bool quantized;    // writes a quantised copy of the norm's output
  bool multicast;    // sends to all ranks at once
};

Kernel one_shot_kernel(const Variant& variant);
Kernel two_shot_kernel(const Variant& variant);

// Threads 0 and 1 of a block pass a number through shared memory, with or without the barrier that
// this takes: shows that ThreadSanitizer sees what fibers do.
Kernel planted_race_kernel(bool with_barrier);

}  // namespace flashinfer_elastic::emulation

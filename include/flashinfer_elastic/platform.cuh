// Selects the machine the kernels run on: a CUDA device, or the CPU emulation used by the tests.
// The algorithms include this header only; every name they take from it is in namespace `hw`.
#pragma once

#include "words.h"

#if defined(__CUDACC__)
#include "platform_cuda.cuh"
#else
#include "platform_cpu.h"  // provided by emulation/
#endif

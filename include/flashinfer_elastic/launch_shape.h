// How many blocks and threads a call gets: a pure function of values that all ranks share, because
// ranks that launch different grids would wait for each other for ever.
#pragma once

#include <cstdint>

#include "arguments.h"

namespace flashinfer_elastic {

struct LaunchShape {
  uint32_t cluster;   // blocks that share a row
  uint32_t clusters;  // rows (one-shot) or teams of rows (two-shot) in flight
  uint32_t threads;   // per block
};

inline constexpr uint32_t kMaxThreads = 512;  // per block, and per multiprocessor
inline constexpr uint32_t kMaxCluster = 8;

// `multiprocessors` is the smallest count in the group. All blocks of a grid fit on the device at
// once (kernels are compiled for kMaxThreads threads a multiprocessor), so none waits for one that
// cannot start.
inline LaunchShape launch_shape(Strategy strategy, uint32_t tokens, uint32_t hidden, uint32_t ranks,
                                uint32_t multiprocessors) {
  auto ceil_div = [](uint32_t a, uint32_t b) { return (a + b - 1) / b; };
  uint32_t units = strategy == Strategy::kOneShot ? tokens : ceil_div(tokens, ranks);
  uint32_t warps = ceil_div(ceil_div(hidden, 8), 32);  // one segment a thread
  uint32_t cluster = 1;
  // Few rows: spread each over several multiprocessors. Long rows: a segment a thread if possible.
  while (cluster < kMaxCluster && cluster < warps &&
         ((cluster < 4 && units * cluster * 2 <= multiprocessors) ||
          ceil_div(warps, cluster) * 32 > kMaxThreads)) {
    cluster *= 2;
  }
  uint32_t threads = ceil_div(warps, cluster) * 32;
  if (threads > kMaxThreads) threads = kMaxThreads;
  uint32_t per_multiprocessor = kMaxThreads / threads;
  // A cluster stays within one of up to eight groups of multiprocessors, each of which may have
  // cluster - 1 left over.
  uint32_t usable = multiprocessors - (multiprocessors > 64 ? 8 * (cluster - 1) : 0);
  uint32_t resident = usable * per_multiprocessor / cluster;
  if (resident == 0) resident = 1;
  return {cluster, units < resident ? units : resident, threads};
}

}  // namespace flashinfer_elastic

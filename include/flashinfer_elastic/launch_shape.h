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

inline constexpr uint32_t kMaxThreads = 512;  // per block
// What kernels are compiled to leave room for on a multiprocessor: at most 64 registers a thread.
inline constexpr uint32_t kResidentThreads = 2 * kMaxThreads;
inline constexpr uint32_t kMaxCluster = 8;
inline constexpr uint32_t kManyRowsWarps = 8;  // per block, with many rows to do

namespace detail {

constexpr uint32_t round_up_quotient(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// That a row keeps busy with a segment for each thread.
constexpr uint32_t warps_of(uint32_t hidden) {
  return round_up_quotient(round_up_quotient(hidden, 8), 32);
}

}  // namespace detail

// `multiprocessors` is the smallest count in the group. All blocks of a grid fit on the device at
// once (a multiprocessor holds kResidentThreads threads of any of the kernels), so none waits for
// one that cannot start.
inline LaunchShape launch_shape(Strategy strategy, uint32_t tokens, uint32_t hidden, uint32_t ranks,
                                uint32_t multiprocessors) {
  using detail::round_up_quotient;
  uint32_t units = strategy == Strategy::kOneShot ? tokens : round_up_quotient(tokens, ranks);
  uint32_t warps = detail::warps_of(hidden);
  uint32_t cluster = 1;
  auto wider = [&] { return cluster < kMaxCluster && cluster * 2 <= warps; };
  // Long rows: a segment a thread if possible.
  while (wider() && round_up_quotient(warps, cluster) * 32 > kMaxThreads) cluster *= 2;
  // Few rows: spread each over as many multiprocessors as two blocks on each allow. On 2x H200, at
  // H = 7168, clusters of 8 take one row from 3.42 us (clusters of 2) to 3.08.
  while (wider() && units * cluster * 2 <= multiprocessors * 2) cluster *= 2;
  // Many rows: smaller blocks, of which more wait for one row each. On 2x H200, at H = 4096 and
  // 1024 rows, two blocks a row take 27.5 us, one takes 27.8.
  uint32_t at_once = multiprocessors * (kResidentThreads / kMaxThreads);
  if (cluster == 1 && wider() && warps > kManyRowsWarps && units > 3 * at_once) cluster = 2;
  uint32_t threads = round_up_quotient(warps, cluster) * 32;
  if (threads > kMaxThreads) threads = kMaxThreads;
  // A cluster stays within one of up to eight groups of multiprocessors, which come in pairs. Where
  // the blocks of a pair do not fill clusters, a group may have cluster - 1 places left over.
  uint32_t per_multiprocessor = kResidentThreads / threads;
  uint32_t blocks = multiprocessors * per_multiprocessor;
  uint32_t lost = 2 * per_multiprocessor % cluster != 0 ? 8 * (cluster - 1) : 0;
  uint32_t resident = blocks > lost ? (blocks - lost) / cluster : 0;
  if (resident == 0) resident = 1;
  return {cluster, units < resident ? units : resident, threads};
}

// Segments of a row that each block of a cluster takes: whole warps of them, and the last may find
// less or nothing.
inline uint32_t block_segments(const LaunchShape& shape, uint32_t hidden) {
  return detail::round_up_quotient(detail::warps_of(hidden), shape.cluster) * 32;
}

// How many blocks of a cluster have a part in a row: the first ones.
inline uint32_t sharing_blocks(const LaunchShape& shape, uint32_t hidden) {
  return detail::round_up_quotient(detail::warps_of(hidden), block_segments(shape, hidden) / 32);
}

// Whether a thread has at most one segment of a row.
inline bool one_segment_a_thread(const LaunchShape& shape, uint32_t hidden) {
  return block_segments(shape, hidden) <= shape.threads;
}

}  // namespace flashinfer_elastic

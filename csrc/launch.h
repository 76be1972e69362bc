// Launching a call on a workspace's group, with every index checked against the allocation first.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashinfer_elastic/arguments.h"

namespace flashinfer_elastic {

// Sets of size classes, one for each strategy. Bit c stands for launches whose rows have, on each
// rank, from 2^(c-1) to 2^c - 1 bytes.
struct SizeClasses {
  uint64_t one_shot;
  uint64_t two_shot;

  bool contain(Strategy strategy, uint64_t payload_bytes) const;
};

// A workspace on the host: its group, and what orders calls made from different streams.
class Context {
 public:
  Context(const Group& group, uint32_t multiprocessors, int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }

  // Sends launches of these classes by multicast from now on, and all others to one rank after the
  // other, as all are at first. The same on all ranks. Throws std::invalid_argument where the group
  // has no multicast address.
  void choose_multicast(SizeClasses classes);

  // Waits that have timed out on this rank since its buffers were initialised; waits for the
  // device.
  uint32_t expired_waits() const;

  // Launches one call, or one chunk of one. Throws std::invalid_argument where the problem does
  // not fit the buffers, std::runtime_error where CUDA refuses; nothing has been launched then.
  void launch(Strategy strategy, ElementType type, const Problem& problem, bool dependent_launch,
              cudaStream_t stream);

 private:
  void follow_last_stream(cudaStream_t stream);

  Group group_;
  SizeClasses multicast_ = {};
  uint32_t multiprocessors_;  // smallest in the group
  int device_;
  cudaEvent_t order_ = nullptr;
  cudaStream_t last_stream_ = nullptr;
  bool used_ = false;
};

}  // namespace flashinfer_elastic

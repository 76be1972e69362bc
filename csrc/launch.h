// Launching a call on a workspace's group, with every index checked against the allocation first.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "flashinfer_elastic/arguments.h"

namespace flashinfer_elastic {

// A workspace on the host: its group, and what orders calls made from different streams.
class Context {
 public:
  Context(const Group& group, uint32_t multiprocessors, int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Group& group() const { return group_; }
  int device() const { return device_; }

  // Launches one call, or one chunk of one. Throws std::invalid_argument where the problem does
  // not fit the buffers, std::runtime_error where CUDA refuses; nothing has been launched then.
  void launch(Strategy strategy, ElementType type, const Problem& problem, bool dependent_launch,
              cudaStream_t stream);

 private:
  void follow_last_stream(cudaStream_t stream);

  Group group_;
  uint32_t multiprocessors_;  // smallest in the group
  int device_;
  cudaEvent_t order_ = nullptr;
  cudaStream_t last_stream_ = nullptr;
  bool used_ = false;
};

}  // namespace flashinfer_elastic

// What the emulated ranks share: their Lamport buffers, how far each has come, and the news that
// one of them failed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace flashinfer_elastic::emulation {

enum class FailureKind {
  kTimeout,   // a peer's word never came
  kProtocol,  // a word was stored over another, lost, or sent where it must not be
  kMachine,   // the kernel misused the machine: a barrier not all reach, a misaligned vector
};

struct Failure {
  uint32_t rank;
  FailureKind kind;
  std::string message;
};

class Fabric {
 public:
  static constexpr uint32_t kBuffers = 2;  // see rotation.cuh

  Fabric(uint32_t ranks, uint64_t buffer_bytes);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  uint32_t ranks() const { return ranks_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  std::byte* memory(uint32_t rank) const { return memory_ + rank * rank_bytes_; }
  // Stands for all ranks' memory in multicast stores; any other access to it is an error.
  uint64_t multicast() const { return reinterpret_cast<uint64_t>(multicast_); }

  struct Place {
    bool inside;  // of some rank's buffers, as a whole aligned word
    uint32_t rank;
    uint64_t offset;
  };
  Place locate(const void* address) const;
  // The offset that a multicast address stands for, if it is one.
  std::optional<uint64_t> multicast_offset(uint64_t address) const;

  // How many words of a rank's buffers hold something that nobody has read.
  uint64_t unread(uint32_t rank) const;

  // Stops `rank`, whose first failure is kept. As on devices, a rank that gave up waiting does not
  // keep the others from finding out for themselves; anything else is an error in the kernels, and
  // stops them all.
  void fail(uint32_t rank, FailureKind kind, std::string message);
  bool stopped(uint32_t rank) const { return stopped_[rank].load(std::memory_order_relaxed); }
  bool failed() const;
  std::vector<Failure> failures() const;

  // Calls that a rank has begun in this run.
  void begin_run();
  void begin_call(uint32_t rank, uint64_t call);
  bool peers_have_begun(uint32_t rank, uint64_t call) const;

 private:
  uint32_t ranks_;
  uint64_t buffer_bytes_;
  uint64_t rank_bytes_;
  std::byte* memory_;
  void* multicast_;
  std::unique_ptr<std::atomic<uint64_t>[]> begun_;
  std::unique_ptr<std::atomic<bool>[]> stopped_;
  mutable std::mutex mutex_;
  std::vector<Failure> failures_;  // in the order they came
};

}  // namespace flashinfer_elastic::emulation

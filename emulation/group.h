// A group of emulated ranks: each has its memory and its turn counter, which live as long as the
// group, and operating-system threads that run its kernels.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fabric.h"
#include "flashinfer_elastic/arguments.h"
#include "flashinfer_elastic/launch_shape.h"
#include "multiprocessor.h"

namespace flashinfer_elastic::emulation {

// A run that failed, with the kind of the first failure.
struct RunError : std::runtime_error {
  RunError(FailureKind kind, const std::string& what) : std::runtime_error(what), kind(kind) {}
  FailureKind kind;
};

// The same call on all ranks.
struct Call {
  Strategy strategy;
  ElementType type;
  bool specialised;                  // see kernels.h
  bool whole;                        // likewise, where the problem and the shape allow it
  bool multicast;                    // likewise
  std::optional<LaunchShape> shape;  // launch_shape's by default
  Hold hold;
  uint32_t held_rank;
  std::vector<Problem> problem;  // of each rank; tokens and hidden are the same
};

// What becomes of ranks in a run; of each rank.
struct Attendance {
  std::vector<size_t> calls;   // how many of the run's it makes before it is gone
  std::vector<double> late_s;  // how long after the others it starts
};

struct Settings {
  uint32_t ranks;
  uint64_t buffer_bytes;
  double timeout_s;  // 0: wait for ever
  Jitter jitter;
  uint32_t multiprocessors;  // of each rank
  uint32_t first_epoch;
  bool single_buffer;  // a deliberate fault: both turns use the same buffer
  bool gives_up;       // waits over multicast end without an error; `expired` counts them
};

class Group {
 public:
  explicit Group(const Settings& settings);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Every rank makes these calls in this order, at its own pace. Throws RunError if one fails,
  // after which the group takes no more calls, as a device's context would.
  void run(const std::vector<Call>& calls, const Attendance& attendance);
  // One block of two threads on rank 0.
  void run_planted_race(bool with_barrier, uint32_t* output);

  uint32_t epoch(uint32_t rank) const { return rotations_.at(rank).turns / kTurn; }
  // Waits of a rank that timed out and gave up.
  uint32_t expired(uint32_t rank) const { return rotations_.at(rank).expired; }
  // Deliberate faults.
  void set_epoch(uint32_t rank, uint32_t epoch) { rotations_.at(rank).turns = epoch * kTurn; }
  void set_word(uint32_t rank, uint64_t offset, uint32_t word);

  // How often a rank that was held back saw all its peers ahead of it.
  uint64_t holds_reached() const;

  uint32_t ranks() const { return settings_.ranks; }

 private:
  struct Job {
    std::vector<std::vector<Launch>> launches;          // of each rank
    std::vector<std::unique_ptr<Progress[]>> progress;  // of each rank and launch
    std::vector<double> late_s;                         // of each rank
  };

  void run(Job& job);
  void work(uint32_t rank, Multiprocessor& multiprocessor);
  void run_on(uint32_t rank, Multiprocessor& multiprocessor, Job& job);
  void check(const Job& job);
  Launch launch(const Call& call, uint32_t rank);
  [[noreturn]] void throw_failure() const;

  Settings settings_;
  Fabric fabric_;
  std::vector<Rotation> rotations_;
  std::vector<uint32_t> epochs_;  // expected of each rank
  std::vector<std::unique_ptr<Multiprocessor>> multiprocessors_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Job* job_ = nullptr;
  uint64_t jobs_ = 0;
  size_t busy_ = 0;
  bool closing_ = false;
};

}  // namespace flashinfer_elastic::emulation

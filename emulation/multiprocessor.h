// Runs clusters, one at a time, on the operating-system thread that calls it; the threads of a
// cluster are fibers that take turns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fabric.h"
#include "fiber.h"
#include "flashinfer_elastic/arguments.h"
#include "flashinfer_elastic/launch_shape.h"
#include "machine.h"

namespace flashinfer_elastic::emulation {

using Kernel = void (*)(const Arguments&);

// Where a rank is kept back so that its peers get ahead of it as far as the protocol lets them.
enum class Hold {
  kNone,
  kAtLaunch,       // until all peers have begun the same call
  kBeforeReading,  // having sent, until all peers have begun the next call
};

// A kernel's launch on one rank.
struct Launch {
  Kernel kernel;
  Arguments arguments;
  LaunchShape shape;
  uint32_t shared_bytes;  // of a block
  Hold hold;
};

// How far a launch has come.
struct Progress {
  std::atomic<uint32_t> taken{0};     // clusters
  std::atomic<uint32_t> finished{0};  // clusters; its address is also ThreadSanitizer's tag
};

// Random delays, reproducible up to the operating system's own scheduling.
struct Jitter {
  uint64_t seed;
  uint32_t max_delay_us;  // 0: none at all
};

// Memory handed out piece by piece and taken back all at once.
class Arena {
 public:
  void* take(size_t bytes);
  void clear();

 private:
  static constexpr size_t kChunk = size_t{1} << 20;
  std::vector<std::unique_ptr<std::byte[]>> chunks_;
  std::vector<std::unique_ptr<std::byte[]>> large_;
  size_t chunk_ = 0;
  size_t used_ = 0;
};

class Multiprocessor {
 public:
  Multiprocessor(Fabric& fabric, uint32_t rank, uint32_t index, Jitter jitter);
  ~Multiprocessor();
  Multiprocessor(const Multiprocessor&) = delete;
  Multiprocessor& operator=(const Multiprocessor&) = delete;

  Fabric& fabric() { return fabric_; }
  uint32_t rank() const { return rank_; }
  uint64_t call() const { return call_; }
  // Whether a wait of this rank has ended without its word, so that what follows is anything.
  bool gave_up() const;
  bool jitters() const { return jitter_.max_delay_us != 0; }
  uint64_t holds_reached() const { return holds_reached_; }

  // `launched` is released (sanitizer.h) by whoever made the launches of this run.
  void begin_run(void* launched);
  // Before a call's first cluster.
  void begin_call(const Launch& launch, uint64_t call, Progress* predecessor, Progress* progress);
  void run_cluster(uint32_t cluster);

  // Stops all ranks: the kernel is wrong.
  void fail(const std::string& what);

  // In [0, bound).
  uint32_t random(uint32_t bound);
  // For the running thread: perhaps lets others go first, perhaps sleeps.
  void jitter();
  void hold_before_reading() {
    if (hold_ == Hold::kBeforeReading) hold();
  }
  void wait_for_predecessor();

  // For the running thread.
  void let_others_run(ThreadState as);
  void arrive(Barrier& barrier);
  void wait(Barrier& barrier, uint32_t phase);
  void expect(Mailbox& box, uint32_t floats);
  void wait(Mailbox& box, uint32_t parity);
  void complete(Mailbox& box);
  bool post_later(Mailbox& box, float* place, float value);
  float exchange(Warp& warp, float value, uint32_t mask);

 private:
  struct Post {
    Mailbox* box;
    float* place;
    float value;
  };

  static void thread_body();
  void schedule();
  bool take_ready();
  void run_ready();
  void cancel();
  void deliver(bool all);
  void complete_phase(Mailbox& box);
  void wake(Thread*& waiting);
  void park(Thread*& waiting);
  void idle();
  void sleep_at_random();
  void hold();
  void hold_at_launch();
  Thread& thread(size_t index);

  Fabric& fabric_;
  uint32_t rank_;
  Jitter jitter_;
  uint64_t random_;

  void* launched_ = nullptr;
  const Launch* launch_ = nullptr;
  uint64_t call_ = 0;
  Progress* predecessor_ = nullptr;
  Progress* progress_ = nullptr;
  Hold hold_ = Hold::kNone;
  uint64_t hold_since_ = 0;
  uint64_t hold_met_ = 0;
  uint64_t holds_reached_ = 0;

  Fiber scheduler_;
  std::deque<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<void*> stacks_;
  Arena arena_;
  std::vector<Thread*> ready_;
  std::vector<Thread*> next_;
  std::vector<Thread*> spinning_;
  std::vector<Post> posts_;  // under way
  uint64_t turn_ = 0;
  uint32_t live_ = 0;
  uint32_t idle_turns_ = 0;
  bool progressed_ = false;
  bool cancelled_ = false;
};

}  // namespace flashinfer_elastic::emulation

// The emulated device as a running kernel sees it: its threads, blocks and clusters, and what they
// can ask of it. The names mean what they mean in CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fiber.h"

namespace flashinfer_elastic::emulation {

class Multiprocessor;
struct Thread;

// Barrier of `expected` threads. A call's barriers are never reused by another call: its address is
// also what ThreadSanitizer knows it by (one tag for even and one for odd phases).
struct Barrier {
  uint32_t expected;
  uint32_t arrived;
  uint32_t phase;
  Thread* waiting;
  char tags[2];
};

// A barrier in shared memory that a phase completes once it was told how many floats to expect and
// so many have come.
struct Mailbox {
  int32_t missing;      // floats expected less floats that came; negative while nothing is expected
  uint32_t unexpected;  // 1 until the phase was told what to expect
  uint32_t phase;
  Thread* waiting;
  char tags[2];
};

struct Warp {
  uint32_t arrived;
  uint32_t phase;
  Thread* waiting;
  uint64_t sleeps_until;  // scheduler's turns, see there
  float exchanged[2][32];
  char tags[2];
};

struct Block {
  uint32_t index;  // in its cluster
  std::byte* shared;
  Barrier barrier;
};

struct Cluster {
  uint32_t index;
  uint32_t clusters;  // of the grid
  uint32_t blocks;    // of this cluster
  uint32_t threads;   // of a block
  uint32_t shared_bytes;
  Block* block;
  Barrier barrier;
};

enum class ThreadState { kRunnable, kSpinning, kParked, kDone };

struct Thread {
  uint32_t index;  // in its block
  Block* block;
  Cluster* cluster;
  Warp* warp;
  Multiprocessor* multiprocessor;
  ThreadState state;
  Thread* next_waiting;
  bool arrived;            // at the cluster's barrier, and has not waited there yet
  uint32_t arrived_phase;  // in which phase
  Fiber* fiber;
};

// Unwinds a thread of a run that was stopped.
struct Cancelled {};

// An operating-system thread's current emulated thread. Only the scheduler sets it.
extern __thread Thread* running_thread __attribute__((tls_model("initial-exec")));
inline const Thread& this_thread() { return *running_thread; }

void sync_block();
void cluster_arrive();
void cluster_wait();
void sync_warp();
float shuffle_xor(float value, uint32_t mask);

// The place, `bytes` long, that `mine` of this block is in block `block` of the cluster.
void* shared_of(void* mine, size_t bytes, uint32_t block);
void open_mailbox(Mailbox* box);
void expect_in_mailbox(Mailbox* box, uint32_t floats);
void wait_for_mailbox(Mailbox* box, uint32_t parity);
// With random delays, a post may be left to come at any later time. If not, the caller stores the
// value and then completes the post.
bool post_later(Mailbox* box, float* place, float value);
void complete_post(Mailbox* box);

void wait_for_predecessor();

uint64_t nanoseconds();
// Lets the other threads of the cluster, and then the other ranks, go on.
void pause();

[[noreturn]] void fail_wait(uint32_t rank, uint32_t peer, const char* phase, uint32_t token,
                            uint64_t waited_ns);
[[noreturn]] void fail_alignment(const void* address);

template <typename Word>
inline void check_vector(const Word* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0) fail_alignment(address);
}

}  // namespace flashinfer_elastic::emulation

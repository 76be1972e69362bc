#include "multiprocessor.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "sanitizer.h"

namespace flashinfer_elastic::emulation {
namespace {

constexpr size_t kStackBytes = size_t{64} << 10;
constexpr size_t kStacksPerMapping = 128;
constexpr uint32_t kTurnsBeforeSleep = 8;
constexpr uint64_t kIdleSleepNs = 20'000;
// What a rank that is kept back allows its peers, once they are as far as they can get, to finish
// their stores; and for how long it is kept back where they do not get there.
constexpr uint64_t kHoldSettleNs = 2'000'000;
constexpr uint64_t kHoldLimitNs = 5'000'000'000;
// One in so many accesses to the ranks' memory lets other threads run; one in so many sleeps.
constexpr uint32_t kYieldOneIn = 64;
constexpr uint32_t kSleepOneIn = 4096;
// In one of so many turns a warp falls asleep, for up to 2**kLogLongestSleep turns: long enough for
// others to get as far ahead of it as the kernel lets them.
constexpr uint32_t kWarpSleepsOneIn = 16;
constexpr uint32_t kLogLongestSleep = 9;

void sleep_ns(uint64_t ns) {
  timespec t{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  nanosleep(&t, nullptr);
}

uint64_t scrambled(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

__thread Thread* running_thread __attribute__((tls_model("initial-exec"))) = nullptr;

// ---- memory of blocks ----

void* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > kChunk) {
    large_.push_back(std::make_unique<std::byte[]>(bytes));
    return large_.back().get();
  }
  if (chunk_ < chunks_.size() && used_ + bytes > kChunk) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) chunks_.push_back(std::make_unique<std::byte[]>(kChunk));
  void* taken = chunks_[chunk_].get() + used_;
  used_ += bytes;
  return taken;
}

void Arena::clear() {
  chunk_ = 0;
  used_ = 0;
  large_.clear();
}

// ---- one multiprocessor ----

Multiprocessor::Multiprocessor(Fabric& fabric, uint32_t rank, uint32_t index, Jitter jitter)
    : fabric_(fabric),
      rank_(rank),
      jitter_(jitter),
      random_(scrambled(scrambled(jitter.seed) + (uint64_t{rank} << 32 | index))) {}

Multiprocessor::~Multiprocessor() {
  fibers_.clear();
  for (void* stacks : stacks_) munmap(stacks, kStackBytes * kStacksPerMapping);
}

uint32_t Multiprocessor::random(uint32_t bound) {
  random_ = scrambled(random_);
  return static_cast<uint32_t>((random_ >> 32) * bound >> 32);
}

void Multiprocessor::sleep_at_random() { sleep_ns(uint64_t{1000} * random(jitter_.max_delay_us)); }

void Multiprocessor::jitter() {
  if (!jitters()) return;
  uint32_t draw = random(kSleepOneIn);
  if (draw == 0) {
    sleep_at_random();
  } else if (draw % kYieldOneIn == 1) {
    let_others_run(ThreadState::kRunnable);
  }
}

bool Multiprocessor::gave_up() const {
  const flashinfer_elastic::Group& group = launch_->arguments.group;
  return group.gives_up && __atomic_load_n(&group.rotation->expired, __ATOMIC_RELAXED) != 0;
}

void Multiprocessor::begin_run(void* launched) {
  launched_ = launched;
  arena_.clear();
}

void Multiprocessor::begin_call(const Launch& launch, uint64_t call, Progress* predecessor,
                                Progress* progress) {
  launch_ = &launch;
  call_ = call;
  predecessor_ = predecessor;
  progress_ = progress;
  hold_ = launch.hold;
  hold_since_ = 0;
  hold_met_ = 0;
  if (jitters() && random(8) == 0) sleep_at_random();
  if (hold_ == Hold::kAtLaunch) hold_at_launch();
  fabric_.begin_call(rank_, call);
}

void Multiprocessor::hold_at_launch() {
  uint64_t since = nanoseconds();
  while (!fabric_.peers_have_begun(rank_, call_)) {
    if (fabric_.stopped(rank_) || nanoseconds() - since > kHoldLimitNs) return;
    sleep_ns(kIdleSleepNs);
  }
  sleep_ns(kHoldSettleNs);
  ++holds_reached_;
}

void Multiprocessor::hold() {
  uint64_t now = nanoseconds();
  if (hold_since_ == 0) hold_since_ = now;
  while (hold_ == Hold::kBeforeReading) {
    if (hold_met_ == 0) {
      if (fabric_.peers_have_begun(rank_, call_ + 1)) hold_met_ = now;
    } else if (now - hold_met_ > kHoldSettleNs) {
      ++holds_reached_;
      hold_ = Hold::kNone;
    }
    if (now - hold_since_ > kHoldLimitNs) hold_ = Hold::kNone;
    pause();
    now = nanoseconds();
  }
}

Thread& Multiprocessor::thread(size_t index) {
  while (threads_.size() <= index) {
    if (fibers_.size() % kStacksPerMapping == 0) {
      void* stacks = mmap(nullptr, kStackBytes * kStacksPerMapping, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stacks == MAP_FAILED) throw std::bad_alloc();
      stacks_.push_back(stacks);
    }
    auto* stack = static_cast<std::byte*>(stacks_.back()) +
                  kStackBytes * (fibers_.size() % kStacksPerMapping);
    fibers_.push_back(std::make_unique<Fiber>(&thread_body, stack, kStackBytes));
    Thread thread{};
    thread.multiprocessor = this;
    thread.fiber = fibers_.back().get();
    threads_.push_back(thread);
  }
  return threads_[index];
}

void Multiprocessor::run_cluster(uint32_t index) {
  const LaunchShape& shape = launch_->shape;
  auto* cluster = static_cast<Cluster*>(arena_.take(sizeof(Cluster)));
  auto* blocks = static_cast<Block*>(arena_.take(sizeof(Block) * shape.cluster));
  live_ = shape.cluster * shape.threads;
  *cluster = {index,
              shape.clusters,
              shape.cluster,
              shape.threads,
              launch_->shared_bytes,
              blocks,
              {live_, 0, 0, nullptr, {}}};
  warps_.assign(live_ / 32, Warp{});
  // Room for all now: fibers, each another thread to ThreadSanitizer, must not share allocations.
  for (std::vector<Thread*>* threads : {&ready_, &next_, &spinning_}) {
    threads->clear();
    threads->reserve(live_);
  }
  posts_.clear();
  cancelled_ = false;
  idle_turns_ = 0;
  for (uint32_t b = 0; b < shape.cluster; ++b) {
    auto* shared = static_cast<std::byte*>(arena_.take(launch_->shared_bytes + 1));
    std::fill(shared, shared + launch_->shared_bytes, std::byte{0xff});  // NaN until written
    blocks[b] = {b, shared, {shape.threads, 0, 0, nullptr, {}}};
    for (uint32_t i = 0; i < shape.threads; ++i) {
      uint32_t flat = b * shape.threads + i;
      Thread& t = thread(flat);
      t.index = i;
      t.block = &blocks[b];
      t.cluster = cluster;
      t.warp = &warps_[flat / 32];
      t.state = ThreadState::kRunnable;
      t.next_waiting = nullptr;
      t.arrived = false;
      next_.push_back(&t);
    }
  }
  sanitizer::release(cluster);
  schedule();
  bool intact = true;
  for (auto& fiber : fibers_) intact = intact && fiber->stack_is_intact();
  if (!intact) fail("a thread used up its stack");
}

void Multiprocessor::thread_body() {
  for (;;) {
    Thread& self = *running_thread;
    Multiprocessor& m = *self.multiprocessor;
    try {
      sanitizer::acquire(m.launched_);
      sanitizer::acquire(self.cluster);
      m.launch_->kernel(m.launch_->arguments);
    } catch (const Cancelled&) {
    } catch (const std::exception& error) {
      m.fail(error.what());
    }
    sanitizer::release(m.progress_);
    m.let_others_run(ThreadState::kDone);
  }
}

void Multiprocessor::schedule() {
  while (live_ > 0) {
    deliver(next_.empty() && spinning_.empty());
    if (take_ready()) {
      run_ready();
      continue;
    }
    if (!fabric_.stopped(rank_)) fail("threads wait where others never arrive");
    cancel();
  }
  running_thread = nullptr;
  if (!posts_.empty() && !fabric_.stopped(rank_)) {
    fail("a block ended before all that was posted to it had come");
  }
}

// Picks the threads whose turn is next: all that can go on, or else all that spin. With random
// delays, in random order, and without the warps that sleep.
bool Multiprocessor::take_ready() {
  ready_.clear();
  if (!jitters()) {
    ready_.swap(next_);
  } else {
    ++turn_;
    if (random(kWarpSleepsOneIn) == 0) {
      warps_[random(static_cast<uint32_t>(warps_.size()))].sleeps_until =
          turn_ + (1u << random(kLogLongestSleep + 1));
    }
    auto sleeps = [&](const Thread* t) { return t->warp->sleeps_until > turn_; };
    auto asleep = std::partition(next_.begin(), next_.end(), sleeps);
    ready_.assign(asleep, next_.end());
    next_.erase(asleep, next_.end());
    if (ready_.empty() && spinning_.empty()) ready_.swap(next_);
    for (size_t i = ready_.size(); i > 1; --i) {
      std::swap(ready_[i - 1], ready_[random(static_cast<uint32_t>(i))]);
    }
  }
  if (ready_.empty() && !spinning_.empty()) {
    idle();
    ready_.swap(spinning_);
  }
  return !ready_.empty();
}

void Multiprocessor::run_ready() {
  progressed_ = false;
  for (Thread* t : ready_) {
    running_thread = t;
    scheduler_.switch_to(*t->fiber);
    switch (t->state) {
      case ThreadState::kRunnable:
        next_.push_back(t);
        break;
      case ThreadState::kSpinning:
        spinning_.push_back(t);
        break;
      case ThreadState::kParked:
        break;
      case ThreadState::kDone:
        --live_;
        break;
    }
    progressed_ = progressed_ || t->state != ThreadState::kSpinning;
  }
}

void Multiprocessor::fail(const std::string& what) {
  fabric_.fail(rank_, FailureKind::kMachine,
               "rank " + std::to_string(rank_) + ", call " + std::to_string(call_) + ": " + what);
}

// In random order, some or all of the posts under way.
void Multiprocessor::deliver(bool all) {
  for (size_t i = posts_.size(); i > 0; --i) {
    if (!all && random(2) == 0) continue;
    std::swap(posts_[i - 1], posts_[random(static_cast<uint32_t>(i))]);
    std::swap(posts_[i - 1], posts_.back());
    Post post = posts_.back();
    posts_.pop_back();
    *post.place = post.value;
    --post.box->missing;
    complete_phase(*post.box);
  }
}

// Wakes every thread that waits for others of its cluster, to be unwound.
void Multiprocessor::cancel() {
  cancelled_ = true;
  for (Thread& t : threads_) {
    if (t.state != ThreadState::kParked) continue;
    t.state = ThreadState::kRunnable;
    next_.push_back(&t);
  }
}

void Multiprocessor::idle() {
  idle_turns_ = progressed_ ? 0 : idle_turns_ + 1;
  if (idle_turns_ < kTurnsBeforeSleep) {
    sched_yield();
  } else {
    sleep_ns(kIdleSleepNs);
  }
}

void Multiprocessor::let_others_run(ThreadState as) {
  Thread& self = *running_thread;
  self.state = as;
  self.fiber->switch_to(scheduler_);
  if (as != ThreadState::kDone && (cancelled_ || fabric_.stopped(rank_))) throw Cancelled{};
}

void Multiprocessor::park(Thread*& waiting) {
  running_thread->next_waiting = waiting;
  waiting = running_thread;
  let_others_run(ThreadState::kParked);
}

void Multiprocessor::wake(Thread*& waiting) {
  for (Thread* t = waiting; t != nullptr; t = t->next_waiting) {
    t->state = ThreadState::kRunnable;
    next_.push_back(t);
  }
  waiting = nullptr;
}

void Multiprocessor::arrive(Barrier& barrier) {
  if (++barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.phase;
  wake(barrier.waiting);
}

void Multiprocessor::wait(Barrier& barrier, uint32_t phase) {
  while (barrier.phase == phase) park(barrier.waiting);
}

bool Multiprocessor::post_later(Mailbox& box, float* place, float value) {
  // ThreadSanitizer must see who stores what.
  if (!jitters() || sanitizer::kActive || random(2) == 0) return false;
  posts_.push_back({&box, place, value});
  return true;
}

void Multiprocessor::expect(Mailbox& box, uint32_t floats) {
  sanitizer::release(&box.tags[box.phase & 1]);
  box.missing += static_cast<int32_t>(floats);
  --box.unexpected;
  complete_phase(box);
}

void Multiprocessor::complete(Mailbox& box) {
  sanitizer::release(&box.tags[box.phase & 1]);
  --box.missing;
  complete_phase(box);
}

void Multiprocessor::complete_phase(Mailbox& box) {
  if (box.unexpected != 0) return;
  if (box.missing < 0) {
    fail("a mailbox got more floats than its phase expects");
    return;
  }
  if (box.missing > 0) return;
  box.unexpected = 1;
  ++box.phase;
  wake(box.waiting);
}

void Multiprocessor::wait(Mailbox& box, uint32_t parity) {
  while ((box.phase & 1) == parity) park(box.waiting);
  sanitizer::acquire(&box.tags[parity]);
}

// A shuffle orders no memory, so ThreadSanitizer is told nothing.
float Multiprocessor::exchange(Warp& warp, float value, uint32_t mask) {
  uint32_t phase = warp.phase;
  uint32_t lane = running_thread->index % 32;
  float* values = warp.exchanged[phase & 1];
  values[lane] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.phase;
    wake(warp.waiting);
  }
  while (warp.phase == phase) park(warp.waiting);
  return values[(lane ^ mask) % 32];
}

void Multiprocessor::wait_for_predecessor() {
  if (predecessor_ == nullptr) return;
  while (predecessor_->finished.load(std::memory_order_acquire) < (launch_ - 1)->shape.clusters) {
    pause();
  }
  sanitizer::acquire(predecessor_);
}

// ---- what a thread asks of its machine ----

namespace {

Thread& self() { return *running_thread; }

[[noreturn]] void misuse(const std::string& what) {
  self().multiprocessor->fail(what);
  throw Cancelled{};
}

}  // namespace

void sync_block() {
  Barrier& barrier = self().block->barrier;
  uint32_t phase = barrier.phase;
  sanitizer::release(&barrier.tags[phase & 1]);
  self().multiprocessor->arrive(barrier);
  self().multiprocessor->wait(barrier, phase);
  sanitizer::acquire(&barrier.tags[phase & 1]);
}

// The cluster's barrier orders no memory, so ThreadSanitizer is told nothing.
void cluster_arrive() {
  Thread& t = self();
  if (t.arrived) misuse("a thread arrived twice at its cluster's barrier");
  t.arrived = true;
  t.arrived_phase = t.cluster->barrier.phase;
  t.multiprocessor->arrive(t.cluster->barrier);
}

void cluster_wait() {
  Thread& t = self();
  if (!t.arrived) misuse("a thread waits at its cluster's barrier, where it has not arrived");
  t.arrived = false;
  t.multiprocessor->wait(t.cluster->barrier, t.arrived_phase);
}

void sync_warp() {
  Warp& warp = *self().warp;
  char* tag = &warp.tags[warp.phase & 1];
  sanitizer::release(tag);
  self().multiprocessor->exchange(warp, 0.0f, 0);
  sanitizer::acquire(tag);
}

float shuffle_xor(float value, uint32_t mask) {
  return self().multiprocessor->exchange(*self().warp, value, mask);
}

void* shared_of(void* mine, size_t bytes, uint32_t block) {
  const Thread& t = self();
  auto offset = reinterpret_cast<uintptr_t>(mine) - reinterpret_cast<uintptr_t>(t.block->shared);
  if (offset + bytes > t.cluster->shared_bytes || block >= t.cluster->blocks) {
    misuse("an access outside the cluster's shared memory");
  }
  return t.cluster->block[block].shared + offset;
}

void open_mailbox(Mailbox* box) { *box = {0, 1, 0, nullptr, {}}; }
void expect_in_mailbox(Mailbox* box, uint32_t floats) {
  self().multiprocessor->expect(*box, floats);
}
void wait_for_mailbox(Mailbox* box, uint32_t parity) { self().multiprocessor->wait(*box, parity); }
bool post_later(Mailbox* box, float* place, float value) {
  return self().multiprocessor->post_later(*box, place, value);
}
void complete_post(Mailbox* box) { self().multiprocessor->complete(*box); }

void wait_for_predecessor() { self().multiprocessor->wait_for_predecessor(); }

uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

void pause() { self().multiprocessor->let_others_run(ThreadState::kSpinning); }

void fail_wait(uint32_t rank, uint32_t peer, const char* phase, uint32_t token,
               uint64_t waited_ns) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "rank %u waited %llu ms for %s of rank %u, token %u: that rank has died, hangs, or "
                "made a different sequence of calls on this workspace",
                rank, static_cast<unsigned long long>(waited_ns / 1'000'000), phase, peer, token);
  self().multiprocessor->fabric().fail(rank, FailureKind::kTimeout, text);
  throw Cancelled{};
}

void fail_alignment(const void* address) {
  char text[64];
  std::snprintf(text, sizeof(text), "a vector access at %p, which is not aligned", address);
  misuse(text);
}

}  // namespace flashinfer_elastic::emulation

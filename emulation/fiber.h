// A stack of its own and a way to switch to it: what lets one operating-system thread run the many
// threads of a cluster, each of which may wait in the middle of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashinfer_elastic::emulation {

// ThreadSanitizer is told of every switch, and that a switch orders nothing: fibers race with each
// other as the threads they stand for would.
class Fiber {
 public:
  // The operating-system thread that is running.
  Fiber() = default;
  // `body` runs at the first switch to the fiber and never returns. `stack` is `bytes` long.
  Fiber(void (*body)(), std::byte* stack, size_t bytes);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Continues `to` where it left off, and returns when something switches back to this one.
  void switch_to(Fiber& to);

  // False once the stack was used up and memory below it may have been written.
  bool stack_is_intact() const;

 private:
  void* stack_pointer_ = nullptr;
  uint64_t* guard_ = nullptr;
  void* sanitizer_ = nullptr;
  bool owns_sanitizer_ = false;
};

}  // namespace flashinfer_elastic::emulation

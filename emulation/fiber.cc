#include "fiber.h"

#include "sanitizer.h"

#if !defined(__x86_64__)
#error "the emulation switches contexts with x86-64 instructions"
#endif

// Saves what the calling convention lets a callee keep, exchanges stacks, restores. Rounding modes
// are the same in all fibers and stay.
extern "C" void flashinfer_elastic_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.type flashinfer_elastic_switch_stack, @function
.hidden flashinfer_elastic_switch_stack
.globl flashinfer_elastic_switch_stack
flashinfer_elastic_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size flashinfer_elastic_switch_stack, .-flashinfer_elastic_switch_stack
)");

namespace flashinfer_elastic::emulation {
namespace {

constexpr uint64_t kGuard = 0x5ca1ab1e0ddba11u;
constexpr size_t kSavedRegisters = 6;

}  // namespace

Fiber::Fiber(void (*body)(), std::byte* stack, size_t bytes)
    : guard_(reinterpret_cast<uint64_t*>(stack)),
      sanitizer_(sanitizer::create_fiber()),
      owns_sanitizer_(true) {
  *guard_ = kGuard;
  // As if `body` had been called from nowhere and had been switched away from at once.
  auto* top = reinterpret_cast<uint64_t*>(stack + bytes);
  *--top = 0;  // its return address; also what leaves the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(body);
  for (size_t i = 0; i < kSavedRegisters; ++i) *--top = 0;
  stack_pointer_ = top;
}

Fiber::~Fiber() {
  if (owns_sanitizer_) sanitizer::destroy_fiber(sanitizer_);
}

void Fiber::switch_to(Fiber& to) {
  if (sanitizer_ == nullptr) sanitizer_ = sanitizer::current_fiber();
  sanitizer::switch_to_fiber(to.sanitizer_);
  flashinfer_elastic_switch_stack(&stack_pointer_, to.stack_pointer_);
}

bool Fiber::stack_is_intact() const { return guard_ == nullptr || *guard_ == kGuard; }

}  // namespace flashinfer_elastic::emulation

// What ThreadSanitizer is told. The machine itself is compiled without instrumentation, because a
// fiber scheduler is all data races to its eye; the kernels are instrumented, and these calls say
// which of their accesses are ordered.
#pragma once

#if FLASHINFER_ELASTIC_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace flashinfer_elastic::emulation::sanitizer {

#if FLASHINFER_ELASTIC_TSAN
inline constexpr bool kActive = true;
// Everything done before a `release` of a tag is ordered before what follows an `acquire` of it.
inline void release(void* tag) { __tsan_release(tag); }
inline void acquire(void* tag) { __tsan_acquire(tag); }
inline void* create_fiber() { return __tsan_create_fiber(0); }
inline void destroy_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void* current_fiber() { return __tsan_get_current_fiber(); }
inline void switch_to_fiber(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
#else
inline constexpr bool kActive = false;
inline void release(void*) {}
inline void acquire(void*) {}
inline void* create_fiber() { return nullptr; }
inline void destroy_fiber(void*) {}
inline void* current_fiber() { return nullptr; }
inline void switch_to_fiber(void*) {}
#endif

}  // namespace flashinfer_elastic::emulation::sanitizer

// The verbs of platform_cuda.cuh on the CPU, for the tests: the kernels' headers compile against
// this file as plain C++ and compute the same bits. What a verb does to the emulated machine is in
// machine.h and memory.h; here are only its name and, for arithmetic, its definition.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "flashinfer_elastic/words.h"
#include "machine.h"
#include "memory.h"

#define FE_DEVICE inline
#define FE_COLD [[gnu::noinline, gnu::cold]] inline
#define FE_SHARED

namespace flashinfer_elastic::hw {

// ---- who am I ----

inline uint32_t thread_index() { return emulation::this_thread().index; }
inline uint32_t thread_count() { return emulation::this_thread().cluster->threads; }
inline uint32_t block_count() {
  const emulation::Cluster& cluster = *emulation::this_thread().cluster;
  return cluster.blocks * cluster.clusters;
}
inline uint32_t cluster_size() { return emulation::this_thread().cluster->blocks; }
inline uint32_t block_in_cluster() { return emulation::this_thread().block->index; }
inline uint32_t cluster_index() { return emulation::this_thread().cluster->index; }
inline uint32_t cluster_count() { return emulation::this_thread().cluster->clusters; }

inline void settle(uint64_t, uint64_t = 0, uint64_t = 0) {}

// ---- barriers and shuffles ----

inline void sync_block() { emulation::sync_block(); }
inline void cluster_arrive() { emulation::cluster_arrive(); }
inline void cluster_wait() { emulation::cluster_wait(); }
inline void sync_warp() { emulation::sync_warp(); }
inline float shuffle_xor(float value, uint32_t mask) { return emulation::shuffle_xor(value, mask); }

// ---- shared memory: plain accesses, so that ThreadSanitizer sees who races for it ----

using SharedPlace = std::byte*;

inline SharedPlace shared_memory() { return emulation::this_thread().block->shared; }
inline Float4 load_shared(SharedPlace place) {
  const auto* vector = reinterpret_cast<const Float4*>(place);
  emulation::check_vector(vector);
  return *vector;
}
inline void store_shared(SharedPlace place, float value) {
  *reinterpret_cast<float*>(place) = value;
}

inline constexpr uint32_t kMailboxBytes = sizeof(emulation::Mailbox);

inline emulation::Mailbox* mailbox(SharedPlace place) {
  return reinterpret_cast<emulation::Mailbox*>(place);
}
inline void open(SharedPlace box) { emulation::open_mailbox(mailbox(box)); }
inline void expect(SharedPlace box, uint32_t floats) {
  emulation::expect_in_mailbox(mailbox(box), floats);
}
inline void wait(SharedPlace box, uint32_t parity) {
  emulation::wait_for_mailbox(mailbox(box), parity);
}
inline void post(SharedPlace box, SharedPlace place, uint32_t block, float value) {
  auto* their_box =
      static_cast<emulation::Mailbox*>(emulation::shared_of(box, kMailboxBytes, block));
  auto* their_place = static_cast<float*>(emulation::shared_of(place, sizeof(float), block));
  if (emulation::post_later(their_box, their_place, value)) return;
  *their_place = value;
  emulation::complete_post(their_box);
}

// ---- programmatic dependent launch ----

inline void wait_for_predecessor() { emulation::wait_for_predecessor(); }
// A kernel may start as soon as every cluster of the one before it has, whatever this one says:
// more overlap than a device would give.
inline void allow_successor() {}

// ---- memory that ranks share ----

inline Word4 load_shared_by_ranks(const Word4* address) { return emulation::load_word(address); }
inline void store_shared_by_ranks(Word4* address, Word4 value) {
  emulation::send_word(address, value);
}
inline void store_to_all_ranks(uint64_t address, Word4 value) {
  emulation::send_word_to_all(address, value);
}
inline void reset_shared_by_ranks(Word4* address) { emulation::reset_word(address); }

// ---- this rank's own device memory ----

inline uint32_t load_state(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void raise_state(uint32_t* address, uint32_t value) {
  __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline uint32_t add_state(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline void prefetch(const void*) {}

inline Word4 load_global(const Word4* address) {
  emulation::check_vector(address);
  return *address;
}
inline void store_global(Word4* address, Word4 value) {
  emulation::check_vector(address);
  *address = value;
}
inline uint32_t load_global(const uint32_t* address) { return *address; }
inline void store_global(uint32_t* address, uint32_t value) { *address = value; }
inline uint16_t load_global(const uint16_t* address) { return *address; }
inline void store_global(uint16_t* address, uint16_t value) { *address = value; }
inline void store_global(uint64_t* address, uint64_t value) {
  emulation::check_vector(address);
  *address = value;
}
inline void store_global(uint8_t* address, uint8_t value) { *address = value; }

// ---- arithmetic: IEEE round to nearest even, never contracted (-ffp-contract=off) ----

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A device's arithmetic has a single NaN; a CPU's hands on its operand's.
inline float with_device_nan(float value) {
  return value != value ? float_of_bits(0x7fffffffu) : value;
}

inline float add(float a, float b) { return with_device_nan(a + b); }
inline float mul(float a, float b) { return with_device_nan(a * b); }
inline float divide(float a, float b) { return with_device_nan(a / b); }
inline float minimum(float a, float b) { return with_device_nan(std::fmin(a, b)); }
inline float maximum(float a, float b) { return with_device_nan(std::fmax(a, b)); }
inline float fma(float a, float b, float c) { return with_device_nan(std::fma(a, b, c)); }

// 1 / sqrt(a), rounded once: the float64 quotient is at most next to a tie, and which side of it
// the exact value is on shows in the sign of tie**2 * a - 1, which one fma gives without error.
inline float reciprocal_sqrt(float a) {
  double estimate = 1.0 / std::sqrt(static_cast<double>(a));
  float nearest = with_device_nan(static_cast<float>(estimate));
  if (!(a > 0.0f) || std::isinf(a)) return nearest;
  for (float other : {std::nextafter(nearest, 0.0f), std::nextafter(nearest, INFINITY)}) {
    double tie = (static_cast<double>(nearest) + other) / 2;  // exact, and so is its square
    bool above_tie = std::fma(tie * tie, static_cast<double>(a), -1.0) < 0;
    if (above_tie == (other > nearest)) return other;
  }
  return nearest;
}

inline float float_of_half(uint16_t bits) {
  uint32_t sign = (bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return float_of_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact
  return float_of_bits(sign | bits_of_float(magnitude));
}

inline uint16_t half_of_float(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  uint32_t rounded;
  if (magnitude >= 0x47800000u) {  // 65536 and beyond
    rounded = 0x7c00;
  } else if (magnitude >= 0x38800000u) {  // normal; a carry may well make it infinite
    rounded = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  } else {  // counts of 2**-24, rounded by the add: 0.5 has just that unit in the last place
    rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  }
  return static_cast<uint16_t>(sign | rounded);
}

inline uint32_t half2_of_floats(float low, float high) {
  return half_of_float(low) | static_cast<uint32_t>(half_of_float(high)) << 16;
}

inline uint16_t bfloat_of_float(float value) {
  uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint32_t bfloat2_of_floats(float low, float high) {
  return bfloat_of_float(low) | static_cast<uint32_t>(bfloat_of_float(high)) << 16;
}

// Through floats: they have more than twice the bits, so rounding twice is rounding once.
inline uint32_t half2_add(uint32_t a, uint32_t b) {
  auto low = [](uint32_t pair) { return float_of_half(static_cast<uint16_t>(pair)); };
  return half2_of_floats(add(low(a), low(b)), add(low(a >> 16), low(b >> 16)));
}

inline uint32_t bfloat2_add(uint32_t a, uint32_t b) {
  auto low = [](uint32_t pair) { return float_of_bits(pair << 16); };
  return bfloat2_of_floats(add(low(a), low(b)), add(low(a >> 16), low(b >> 16)));
}

inline uint32_t e4m3_of_float(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t sign = bits >> 24 & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return sign | 0x7e;  // 448 and beyond
  if (magnitude >= 0x3c800000u) {                    // normal
    return sign | (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
  }
  // Counts of 2**-9, rounded by the add: 2**14 has just that unit in the last place.
  return sign | (bits_of_float(float_of_bits(magnitude) + 0x1p14f) - bits_of_float(0x1p14f));
}

inline uint32_t e4m3x2_of_floats(float low, float high) {
  return e4m3_of_float(low) | e4m3_of_float(high) << 8;
}

inline float float_of_e4m3(uint32_t byte) {
  uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7f) return float_of_bits(0x7fffffffu);
  float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                              : float_of_bits((magnitude << 20) + (120u << 23));
  return (byte & 0x80u) != 0 ? -value : value;
}

// ---- time and failure ----

inline uint64_t nanoseconds() { return emulation::nanoseconds(); }
inline void pause() { emulation::pause(); }

// Of several waits that expire, the group reports the first by itself.
[[noreturn]] FE_COLD void fail_wait(bool first, uint32_t rank, uint32_t peer, const char* phase,
                                    uint32_t token, uint64_t waited_ns) {
  if (first) emulation::fail_wait(rank, peer, phase, token, waited_ns);
  for (;;) pause();  // until the first has stopped this rank
}

}  // namespace flashinfer_elastic::hw

#include "memory.h"

#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "fabric.h"
#include "multiprocessor.h"

namespace flashinfer_elastic::emulation {
namespace {

using Parts = std::array<uint32_t, 4>;

Parts parts_of(Word4 w) { return {w.x, w.y, w.z, w.w}; }

[[noreturn, gnu::cold]] void violation(const char* verb, const void* address, const char* what) {
  Multiprocessor& m = *this_thread().multiprocessor;
  Fabric::Place place = m.fabric().locate(address);
  char text[256];
  if (place.inside) {
    uint64_t buffer = m.fabric().buffer_bytes();
    std::snprintf(text, sizeof(text),
                  "rank %u, call %llu, %s at rank %u, buffer %llu, offset %llu: %s", m.rank(),
                  static_cast<unsigned long long>(m.call()), verb, place.rank,
                  static_cast<unsigned long long>(place.offset / buffer),
                  static_cast<unsigned long long>(place.offset % buffer), what);
  } else {
    std::snprintf(text, sizeof(text), "rank %u, call %llu, %s at %p: %s", m.rank(),
                  static_cast<unsigned long long>(m.call()), verb, address, what);
  }
  m.fabric().fail(m.rank(), FailureKind::kProtocol, text);
  throw Cancelled{};
}

// Gives the rank whose memory it is.
uint32_t checked_rank(const char* verb, const void* address) {
  Fabric::Place place = this_thread().multiprocessor->fabric().locate(address);
  if (!place.inside) violation(verb, address, "outside every rank's buffers, or misaligned");
  return place.rank;
}

void check_is_own(const char* verb, const void* address) {
  if (checked_rank(verb, address) != this_thread().multiprocessor->rank()) {
    violation(verb, address, "another rank's memory");
  }
}

// The order in which a vector's parts move.
std::array<uint8_t, 4> order(Multiprocessor& m) {
  std::array<uint8_t, 4> order{0, 1, 2, 3};
  if (m.jitters()) {
    for (uint32_t i = 3; i > 0; --i) std::swap(order[i], order[m.random(i + 1)]);
  }
  return order;
}

// Gives what was there.
Parts swap(Word4* address, const Parts& parts) {
  Multiprocessor& m = *this_thread().multiprocessor;
  auto* words = reinterpret_cast<uint32_t*>(address);
  Parts before;
  for (uint8_t i : order(m)) {
    before[i] = __atomic_exchange_n(words + i, parts[i], __ATOMIC_RELAXED);
    m.jitter();
  }
  return before;
}

}  // namespace

Word4 load_word(const Word4* address) {
  Multiprocessor& m = *this_thread().multiprocessor;
  check_is_own("load", address);
  m.hold_before_reading();
  auto* words = reinterpret_cast<const uint32_t*>(address);
  Parts parts;
  for (uint8_t i : order(m)) {
    parts[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED);
    m.jitter();
  }
  return {parts[0], parts[1], parts[2], parts[3]};
}

void send_word(Word4* address, Word4 value) {
  checked_rank("store", address);
  Parts parts = parts_of(value);
  for (uint32_t part : parts) {
    if (part == kSentinel) violation("store", address, "sent the word that means empty");
  }
  for (uint32_t part : swap(address, parts)) {
    if (part != kSentinel) violation("store", address, "overwrote data that nobody has read");
  }
}

void send_word_to_all(uint64_t address, Word4 value) {
  Multiprocessor& m = *this_thread().multiprocessor;
  Fabric& fabric = m.fabric();
  std::optional<uint64_t> offset = fabric.multicast_offset(address);
  if (!offset) {
    violation("multicast store", reinterpret_cast<const void*>(address), "no multicast address");
  }
  uint32_t first = m.jitters() ? m.random(fabric.ranks()) : 0;
  for (uint32_t i = 0; i < fabric.ranks(); ++i) {
    uint32_t rank = (first + i) % fabric.ranks();
    send_word(reinterpret_cast<Word4*>(fabric.memory(rank) + *offset), value);
  }
}

void reset_word(Word4* address) {
  check_is_own("reset", address);
  for (uint32_t part : swap(address, {kSentinel, kSentinel, kSentinel, kSentinel})) {
    if (part == kSentinel && !this_thread().multiprocessor->gave_up()) {
      violation("reset", address, "was empty, or not all of it had come");
    }
  }
}

}  // namespace flashinfer_elastic::emulation

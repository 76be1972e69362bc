// Where every word lies in a Lamport buffer. A buffer is a list of row slots; which slots a call
// uses depends on its strategy alone.
#pragma once

#include "arguments.h"
#include "numerics.cuh"

namespace flashinfer_elastic {

// A slot holds one row, padded to whole segments.
FE_SHARED constexpr uint64_t slot_bytes(uint32_t hidden, uint32_t element_bytes) {
  return static_cast<uint64_t>(segments_of(hidden)) * kSegmentElements * element_bytes;
}
template <typename T>
FE_SHARED constexpr uint64_t slot_bytes(uint32_t hidden) {
  return slot_bytes(hidden, T::kBytes);
}

template <typename T>
FE_SHARED constexpr uint64_t word_offset(uint32_t hidden, uint64_t slot, uint32_t segment,
                                         uint32_t word) {
  return slot * slot_bytes<T>(hidden) +
         (static_cast<uint64_t>(segment) * T::kWords + word) * sizeof(Word4);
}

// One-shot: every rank keeps every rank's rows.
FE_SHARED constexpr uint64_t one_shot_slot(uint32_t token, uint32_t source, uint32_t ranks) {
  return static_cast<uint64_t>(token) * ranks + source;
}
FE_SHARED constexpr uint64_t one_shot_slots(uint32_t tokens, uint32_t ranks) {
  return static_cast<uint64_t>(tokens) * ranks;
}

// Two-shot: token t is summed by rank t % ranks, which keeps the contributions to its own tokens;
// behind them every rank keeps the sums of all tokens.
FE_SHARED constexpr uint64_t contribution_slot(uint32_t token, uint32_t source, uint32_t ranks) {
  return static_cast<uint64_t>(token / ranks) * ranks + source;
}
FE_SHARED constexpr uint64_t contribution_slots(uint32_t tokens, uint32_t ranks) {
  return static_cast<uint64_t>(ceil_div(tokens, ranks)) * ranks;
}
FE_SHARED constexpr uint64_t sum_slot(uint32_t token, uint32_t tokens, uint32_t ranks) {
  return contribution_slots(tokens, ranks) + token;
}
FE_SHARED constexpr uint64_t two_shot_slots(uint32_t tokens, uint32_t ranks) {
  return contribution_slots(tokens, ranks) + tokens;
}

// Of one buffer, by a call.
inline uint64_t required_bytes(Strategy strategy, ElementType type, uint32_t tokens,
                               uint32_t hidden, uint32_t ranks) {
  uint64_t slots = strategy == Strategy::kOneShot ? one_shot_slots(tokens, ranks)
                                                  : two_shot_slots(tokens, ranks);
  return slots * slot_bytes(hidden, element_bytes(type));
}

}  // namespace flashinfer_elastic

// Segments of the caller's matrices: vector accesses where a row allows them, single elements at
// ragged ends and in unaligned rows. The choice changes no value. `kWhole` says at compile time
// that every row of every matrix is made of whole vectors.
#pragma once

#include "arguments.h"
#include "numerics.cuh"
#include "platform.cuh"

namespace flashinfer_elastic {

template <typename T>
struct Segment {
  Word4 word[T::kWords];
};

namespace detail {

// Elements beyond the row's end read as +0.0.
template <typename T>
FE_DEVICE Word4 load_ragged(const typename T::Bits* element, uint32_t count) {
  uint32_t w[4];
  constexpr uint32_t kPer32 = 4 / T::kBytes;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    w[i] = 0;
#pragma unroll
    for (uint32_t j = 0; j < kPer32; ++j) {
      uint32_t index = i * kPer32 + j;
      if (index < count) {
        w[i] |= static_cast<uint32_t>(hw::load_global(element + index)) << (16 * j);
      }
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

template <typename T>
FE_DEVICE void store_ragged(typename T::Bits* element, uint32_t count, Word4 value) {
  const uint32_t w[4] = {value.x, value.y, value.z, value.w};
  constexpr uint32_t kPer32 = 4 / T::kBytes;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
    for (uint32_t j = 0; j < kPer32; ++j) {
      uint32_t index = i * kPer32 + j;
      if (index < count) {
        hw::store_global(element + index, static_cast<typename T::Bits>(w[i] >> (16 * j)));
      }
    }
  }
}

FE_DEVICE uint32_t remaining(uint32_t first, uint32_t hidden) {
  return first < hidden ? hidden - first : 0;
}

}  // namespace detail

// The elements [8*segment, 8*segment + 8) of a dense run of `hidden` elements, which is at address
// `run`.
template <typename T, bool kWhole>
FE_DEVICE Segment<T> load_segment(uint64_t run, bool vectors, uint32_t segment, uint32_t hidden) {
  Segment<T> s;
  uint32_t first = segment * kSegmentElements;
  auto* element = reinterpret_cast<const typename T::Bits*>(run) + first;
  if (kWhole || (vectors && first + kSegmentElements <= hidden)) {
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      s.word[i] = hw::load_global(reinterpret_cast<const Word4*>(element) + i);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      s.word[i] = detail::load_ragged<T>(element + i * T::kPerWord,
                                         detail::remaining(first + i * T::kPerWord, hidden));
    }
  }
  return s;
}

// Of a row's first element.
template <typename T>
FE_DEVICE uint64_t row_address(const Rows& rows, uint32_t token) {
  return rows.address + static_cast<int64_t>(token) * rows.stride * T::kBytes;
}

// What this rank adds to the sum, as it is sent; `run` is a row of the problem's input.
template <typename T, bool kWhole>
FE_DEVICE Segment<T> load_contribution(const Problem& problem, uint64_t run, uint32_t segment) {
  Segment<T> own = load_segment<T, kWhole>(run, problem.input.vectors, segment, problem.hidden);
#pragma unroll
  for (uint32_t i = 0; i < T::kWords; ++i) own.word[i] = without_negative_zero<T>(own.word[i]);
  return own;
}

template <typename T, bool kWhole>
FE_DEVICE void store_segment(uint64_t run, bool vectors, uint32_t segment, uint32_t hidden,
                             const Segment<T>& s) {
  uint32_t first = segment * kSegmentElements;
  auto* element = reinterpret_cast<typename T::Bits*>(run) + first;
  if (kWhole || (vectors && first + kSegmentElements <= hidden)) {
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      hw::store_global(reinterpret_cast<Word4*>(element) + i, s.word[i]);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      detail::store_ragged<T>(element + i * T::kPerWord,
                              detail::remaining(first + i * T::kPerWord, hidden), s.word[i]);
    }
  }
}

}  // namespace flashinfer_elastic

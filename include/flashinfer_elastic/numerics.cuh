// The one definition of the arithmetic, whatever the strategy, rank count, chunking or launch
// shape. A *segment* is eight consecutive elements of a row and always belongs to one thread;
// sums over a row follow a tree over segments that depends on the row's length alone.
#pragma once

#include "arguments.h"
#include "platform.cuh"
#include "words.h"

namespace flashinfer_elastic {

inline constexpr uint32_t kSegmentElements = 8;
inline constexpr uint32_t kWarpLanes = 32;

FE_SHARED constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
FE_SHARED constexpr uint32_t segments_of(uint32_t hidden) {
  return ceil_div(hidden, kSegmentElements);
}
// One partial sum of squares for 32 consecutive segments.
FE_SHARED constexpr uint32_t partials_of(uint32_t hidden) {
  return ceil_div(segments_of(hidden), kWarpLanes);
}

// Element types: how many 16-byte words a segment takes, and the conversions of one such word.
struct Float16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr uint32_t kWords = 1;
  static constexpr uint32_t kPerWord = 8;
  using Bits = uint16_t;
  FE_DEVICE static float low(uint32_t pair) {
    return hw::float_of_half(static_cast<uint16_t>(pair & 0xffffu));
  }
  FE_DEVICE static float high(uint32_t pair) {
    return hw::float_of_half(static_cast<uint16_t>(pair >> 16));
  }
  FE_DEVICE static uint32_t pack(float low, float high) { return hw::half2_of_floats(low, high); }
  FE_DEVICE static uint32_t plus_zero(uint32_t pair) { return hw::half2_plus_zero(pair); }
};

struct BFloat16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr uint32_t kWords = 1;
  static constexpr uint32_t kPerWord = 8;
  using Bits = uint16_t;
  FE_DEVICE static float low(uint32_t pair) { return hw::float_of_bits(pair << 16); }
  FE_DEVICE static float high(uint32_t pair) { return hw::float_of_bits(pair & 0xffff0000u); }
  FE_DEVICE static uint32_t pack(float low, float high) { return hw::bfloat2_of_floats(low, high); }
  FE_DEVICE static uint32_t plus_zero(uint32_t pair) { return hw::bfloat2_plus_zero(pair); }
};

struct Float32 {
  static constexpr uint32_t kBytes = 4;
  static constexpr uint32_t kWords = 2;
  static constexpr uint32_t kPerWord = 4;
  using Bits = uint32_t;
  FE_DEVICE static uint32_t plus_zero(uint32_t bits) {
    return hw::bits_of_float(hw::add(hw::float_of_bits(bits), 0.0f));
  }
};

// Floats of one 16-byte word.
template <typename T>
struct Floats {
  float v[T::kPerWord];
};

template <typename T>
FE_DEVICE Floats<T> unpack(Word4 w) {
  if constexpr (T::kBytes == 4) {
    return {{hw::float_of_bits(w.x), hw::float_of_bits(w.y), hw::float_of_bits(w.z),
             hw::float_of_bits(w.w)}};
  } else {
    return {{T::low(w.x), T::high(w.x), T::low(w.y), T::high(w.y), T::low(w.z), T::high(w.z),
             T::low(w.w), T::high(w.w)}};
  }
}

// Rounds to the element type.
template <typename T>
FE_DEVICE Word4 pack(const Floats<T>& f) {
  if constexpr (T::kBytes == 4) {
    return {hw::bits_of_float(f.v[0]), hw::bits_of_float(f.v[1]), hw::bits_of_float(f.v[2]),
            hw::bits_of_float(f.v[3])};
  } else {
    return {T::pack(f.v[0], f.v[1]), T::pack(f.v[2], f.v[3]), T::pack(f.v[4], f.v[5]),
            T::pack(f.v[6], f.v[7])};
  }
}

// -0.0 becomes +0.0 and every other number stays what it is, so that no word of data equals the
// sentinel.
template <typename T>
FE_DEVICE Word4 without_negative_zero(Word4 w) {
  return {T::plus_zero(w.x), T::plus_zero(w.y), T::plus_zero(w.z), T::plus_zero(w.w)};
}

// fp32 accumulation in the order the caller adds, from rank 0's contribution up.
template <typename T>
FE_DEVICE void accumulate(Floats<T>& sum, Word4 contribution) {
  Floats<T> f = unpack<T>(contribution);
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) sum.v[i] = hw::add(sum.v[i], f.v[i]);
}

// The all-reduce's result for one word: rounded once, and safe to send on.
template <typename T>
FE_DEVICE Word4 finish_sum(const Floats<T>& sum) {
  return without_negative_zero<T>(pack<T>(sum));
}

template <typename T>
FE_DEVICE Word4 add_rounded(Word4 a, Word4 b) {
  Floats<T> x = unpack<T>(a), y = unpack<T>(b);
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) x.v[i] = hw::add(x.v[i], y.v[i]);
  return pack<T>(x);
}

// Continues a segment's sequential sum of squares.
template <typename T>
FE_DEVICE float square_sum(Word4 w, float sum) {
  Floats<T> f = unpack<T>(w);
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) sum = hw::fma(f.v[i], f.v[i], sum);
  return sum;
}

// Balanced tree over the 32 lanes; every lane gets the result.
FE_DEVICE float sum_of_lanes(float value) {
#pragma unroll
  for (uint32_t mask = 1; mask < kWarpLanes; mask <<= 1) {
    value = hw::add(value, hw::shuffle_xor(value, mask));
  }
  return value;
}

// Sum over a row's partials, the same in every lane of every warp of every block.
FE_DEVICE float sum_of_partials(const float* partials, uint32_t count) {
  float sum = 0.0f;
  for (uint32_t i = hw::thread_index() % kWarpLanes; i < count; i += kWarpLanes) {
    sum = hw::add(sum, partials[i]);
  }
  return sum_of_lanes(sum);
}

// `inverse_hidden` is 1 / hidden, rounded. The root is the correctly rounded one.
FE_DEVICE float reciprocal_rms(float square_sum, float inverse_hidden, float epsilon) {
  return hw::reciprocal_sqrt(hw::fma(square_sum, inverse_hidden, epsilon));
}

// `scale` holds gamma + weight_bias.
template <typename T>
FE_DEVICE Word4 normalized(Word4 residual, float rstd, const Floats<T>& scale) {
  Floats<T> x = unpack<T>(residual);
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) {
    x.v[i] = hw::mul(hw::mul(x.v[i], rstd), scale.v[i]);
  }
  return pack<T>(x);
}

}  // namespace flashinfer_elastic

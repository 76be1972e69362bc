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
  FE_DEVICE static uint32_t add(uint32_t a, uint32_t b) { return hw::half2_add(a, b); }
};

struct BFloat16 {
  static constexpr uint32_t kBytes = 2;
  static constexpr uint32_t kWords = 1;
  static constexpr uint32_t kPerWord = 8;
  using Bits = uint16_t;
  FE_DEVICE static float low(uint32_t pair) { return hw::float_of_bits(pair << 16); }
  FE_DEVICE static float high(uint32_t pair) { return hw::float_of_bits(pair & 0xffff0000u); }
  FE_DEVICE static uint32_t pack(float low, float high) { return hw::bfloat2_of_floats(low, high); }
  FE_DEVICE static uint32_t add(uint32_t a, uint32_t b) { return hw::bfloat2_add(a, b); }
};

struct Float32 {
  static constexpr uint32_t kBytes = 4;
  static constexpr uint32_t kWords = 2;
  static constexpr uint32_t kPerWord = 4;
  using Bits = uint32_t;
  FE_DEVICE static uint32_t add(uint32_t a, uint32_t b) {
    return hw::bits_of_float(hw::add(hw::float_of_bits(a), hw::float_of_bits(b)));
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

// Element by element, rounded once to the element type: of two numbers of 16 bits the same as an
// fp32 sum that is then rounded, because fp32 has more than twice their bits.
template <typename T>
FE_DEVICE Word4 add_rounded(Word4 a, Word4 b) {
  return {T::add(a.x, b.x), T::add(a.y, b.y), T::add(a.z, b.z), T::add(a.w, b.w)};
}

// -0.0 becomes +0.0 and every other number stays what it is, so that no word of data equals the
// sentinel. Sums of such words need it no more: a sum is -0.0 only if all its terms are, and none
// is so small that rounding makes it zero, since they are all multiples of the type's smallest
// number.
template <typename T>
FE_DEVICE Word4 without_negative_zero(Word4 w) {
  return add_rounded<T>(w, {0, 0, 0, 0});
}

// fp32 accumulation in the order the caller adds, from rank 0's contribution up.
template <typename T>
FE_DEVICE void accumulate(Floats<T>& sum, Word4 contribution) {
  Floats<T> f = unpack<T>(contribution);
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) sum.v[i] = hw::add(sum.v[i], f.v[i]);
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

// Partials are kept in lists padded with zeros to whole warps of them.
FE_SHARED constexpr uint32_t padded_partials(uint32_t count) {
  return ceil_div(count, kWarpLanes) * kWarpLanes;
}

// Reduces a row's partials, the same in every lane of every warp of every block: partials that are
// 32 apart one after the other, and then those of a warp's lanes in a balanced tree. A lane takes
// in four neighbours, so the tree's first two levels need no shuffles.
template <typename Combine>
FE_DEVICE float reduce_partials(hw::SharedPlace partials, uint32_t count, Combine combine) {
  hw::SharedPlace place = partials + hw::thread_index() % 8 * sizeof(Float4);
  Float4 v = hw::load_shared(place);
#pragma unroll 1  // hardly any row has more than 32
  for (uint32_t i = kWarpLanes; i < count; i += kWarpLanes) {
    Float4 further = hw::load_shared(place + i * sizeof(float));
    v = {combine(v.x, further.x), combine(v.y, further.y), combine(v.z, further.z),
         combine(v.w, further.w)};
  }
  float result = combine(combine(v.x, v.y), combine(v.z, v.w));
#pragma unroll
  for (uint32_t mask = 1; mask < 8; mask <<= 1) {
    result = combine(result, hw::shuffle_xor(result, mask));
  }
  // The list is read before any lane says so to others by what it publishes next.
  hw::sync_warp();
  return result;
}

FE_DEVICE float sum_of_partials(hw::SharedPlace partials, uint32_t count) {
  return reduce_partials(partials, count, [](float a, float b) { return hw::add(a, b); });
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

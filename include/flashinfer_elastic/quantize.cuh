// Quantised copies of a norm's output. What is quantised is x, the output rounded to its element
// type, so that a fused call gives what the norm and then a quantiser would. All operations are
// IEEE single-precision, each rounded to nearest even; `max` takes the number where the other is
// NaN.
//
//   e4m3(v)  rounds to nearest even; beyond +-448, infinities too, gives +-448; NaN stays NaN
//   e2m1(v)  rounds to nearest even; beyond +-6, infinities too, gives +-6; NaN gives +6
//
// Float8: q = e4m3(x / scale).
//
// Dynamic float8, for each row:
//   s = max(max|x| / 448, 2**-9 / 448), stored as float; q = e4m3(x / s). The bound is where the
//   smallest e4m3 number would be that of a row whose largest element it is.
//
// NvFloat4, for each 16 elements:
//   s = e4m3(scale * (max|x| * (1/6))), with 1/6 rounded
//   m = float(s) = 0 ? 0 : scale / float(s)
//   q = e2m1(x * m), two to a byte, the first in the low half.
//
// MxFloat8, for each 32 elements:
//   s = the exponent of the smallest power of two that is no less than a = max|x| * (1/448), with
//       1/448 rounded, as e8m0: a's biased exponent, and one more if any bit of its mantissa is
//       set; at most 254; subnormal a up to 2**-127, the least, give 0
//   m = s = 0 ? 0 : 2**(127 - s), which for s = 254 is too small and gives 0
//   q = e4m3(x * m), of NaN +448.
#pragma once

#include "arguments.h"
#include "numerics.cuh"
#include "platform.cuh"
#include "rows.cuh"

namespace flashinfer_elastic {

inline constexpr float kLargestFloat8 = 448.0f;
inline constexpr float kLargestFloat4 = 6.0f;
inline constexpr float kSmallestDynamicScale = 0x1p-9f / kLargestFloat8;

// Elements that share a scale, where some but not all of a row do.
FE_SHARED constexpr uint32_t scale_block(Recipe recipe) {
  return recipe == Recipe::kNvFloat4 ? 16 : recipe == Recipe::kMxFloat8 ? 32 : 0;
}

// Where the scale of a block lies, in bytes. Swizzled scales come in tiles of 128 rows by 4 blocks,
// 512 bytes each, in which row r is the part r / 32 of line r % 32.
FE_SHARED constexpr uint64_t scale_place(ScaleLayout layout, uint32_t row, uint32_t block,
                                         uint32_t blocks) {
  if (layout == ScaleLayout::kLinear) return static_cast<uint64_t>(row) * blocks + block;
  uint64_t tile = static_cast<uint64_t>(row / 128) * ceil_div(blocks, 4) + block / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// A segment's elements.
struct Elements {
  float v[kSegmentElements];
};

template <typename T>
FE_DEVICE Elements elements_of(const Segment<T>& segment) {
  Elements e;
#pragma unroll
  for (uint32_t i = 0; i < T::kWords; ++i) {
    Floats<T> f = unpack<T>(segment.word[i]);
#pragma unroll
    for (uint32_t j = 0; j < T::kPerWord; ++j) e.v[i * T::kPerWord + j] = f.v[j];
  }
  return e;
}

FE_DEVICE float magnitude(float value) {
  return hw::float_of_bits(hw::bits_of_float(value) & 0x7fffffffu);
}

// Of one segment; NaN only if all are.
FE_DEVICE float largest_magnitude(const Elements& e) {
  float largest = magnitude(e.v[0]);
#pragma unroll
  for (uint32_t i = 1; i < kSegmentElements; ++i) {
    largest = hw::maximum(largest, magnitude(e.v[i]));
  }
  return largest;
}

// Over groups of `lanes` neighbouring lanes, a power of two; every lane gets its group's result.
FE_DEVICE float largest_of_lanes(float value, uint32_t lanes) {
  for (uint32_t mask = 1; mask < lanes; mask <<= 1) {
    value = hw::maximum(value, hw::shuffle_xor(value, mask));
  }
  return value;
}

FE_DEVICE float largest_of_partials(hw::SharedPlace partials, uint32_t count) {
  return reduce_partials(partials, count, [](float a, float b) { return hw::maximum(a, b); });
}

FE_DEVICE float dynamic_scale(float largest) {
  return hw::maximum(hw::divide(largest, kLargestFloat8), kSmallestDynamicScale);
}

FE_DEVICE uint32_t e2m1_of_float(float value) {
  uint32_t sign = hw::bits_of_float(value) >> 28 & 8;  // of NaN that was computed, 0
  float size = hw::minimum(magnitude(value), kLargestFloat4);
  uint32_t bits = hw::bits_of_float(size);
  // From 1 on, the exponent and one bit of the mantissa; 1.0 is code 2. Below, counts of one half,
  // rounded by an addition: 2**22 has just that unit in the last place.
  uint32_t normal = ((bits + 0x1fffffu + (bits >> 22 & 1)) >> 22) - ((127u << 1) - 2);
  uint32_t small = hw::bits_of_float(hw::add(size, 0x1p22f)) & 3;
  return sign | (size < 1.0f ? small : normal);
}

// The smallest power of two that is not less than `value`, which has no sign, as a biased exponent.
FE_DEVICE uint32_t e8m0_above(float value) {
  uint32_t bits = hw::bits_of_float(value);
  if (bits <= 0x00400000u) return 0;  // 2**-127 at most
  uint32_t exponent = (bits + 0x7fffffu) >> 23;
  return exponent < 254 ? exponent : 254;
}

// Codes of a segment's elements times a factor, or by a divisor; the first in the lowest bits.
template <typename Scaled>
FE_DEVICE uint64_t e4m3_codes(Scaled scaled) {
  uint32_t half[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    half[i] = hw::e4m3x2_of_floats(scaled(4 * i), scaled(4 * i + 1)) |
              hw::e4m3x2_of_floats(scaled(4 * i + 2), scaled(4 * i + 3)) << 16;
  }
  return half[0] | static_cast<uint64_t>(half[1]) << 32;
}

FE_DEVICE uint32_t e2m1_codes(const Elements& e, float factor) {
  uint32_t codes = 0;
#pragma unroll
  for (uint32_t i = 0; i < kSegmentElements; ++i) {
    codes |= e2m1_of_float(hw::mul(e.v[i], factor)) << (4 * i);
  }
  return codes;
}

// Writes the quantised copy, a segment at a time.
template <bool kWhole>
class Quantizer {
 public:
  FE_DEVICE explicit Quantizer(const Problem& problem)
      : quantization_(problem.quantization), hidden_(problem.hidden) {}

  FE_DEVICE Recipe recipe() const { return quantization_.recipe; }

  // By one thread for each row.
  FE_DEVICE void store_row_scale(uint32_t token, float scale) const {
    auto* scales = reinterpret_cast<uint32_t*>(quantization_.scales);
    hw::store_global(scales + quantization_.first_row + token, hw::bits_of_float(scale));
  }

  // The scale that divides or multiplies: the caller's, or what store_row_scale was given.
  FE_DEVICE float given_scale() const {
    if (quantization_.scale_address == 0) return quantization_.scale;
    return hw::float_of_bits(
        hw::load_global(reinterpret_cast<const uint32_t*>(quantization_.scale_address)));
  }

  // By whole warps. `has` says whether the segment is in the row; if not, its elements are zero.
  FE_DEVICE void store(uint32_t token, uint32_t segment, bool has, const Elements& e,
                       float scale) const {
    switch (quantization_.recipe) {
      case Recipe::kNvFloat4: {
        float largest = largest_of_lanes(largest_magnitude(e), 2);
        uint32_t code =
            hw::e4m3x2_of_floats(hw::mul(scale, hw::mul(largest, 1.0f / kLargestFloat4)), 0.0f);
        float decoded = hw::float_of_e4m3(code);
        float factor = decoded == 0.0f ? 0.0f : hw::divide(scale, decoded);
        if (!has) return;
        store_codes<4>(token, segment, e2m1_codes(e, factor));
        store_block_scale(token, segment, code);
        return;
      }
      case Recipe::kMxFloat8: {
        float largest = largest_of_lanes(largest_magnitude(e), 4);
        uint32_t code = e8m0_above(hw::mul(largest, 1.0f / kLargestFloat8));
        float factor = code == 0 ? 0.0f : hw::float_of_bits((254 - code) << 23);
        if (!has) return;
        store_codes<8>(token, segment, e4m3_codes([&](uint32_t i) {
                         return hw::minimum(hw::mul(e.v[i], factor), kLargestFloat8);
                       }));
        store_block_scale(token, segment, code);
        return;
      }
      default:
        if (!has) return;
        store_codes<8>(token, segment,
                       e4m3_codes([&](uint32_t i) { return hw::divide(e.v[i], scale); }));
    }
  }

 private:
  // The codes of a segment take kBytes bytes.
  template <uint32_t kBytes>
  FE_DEVICE void store_codes(uint32_t token, uint32_t segment, uint64_t codes) const {
    uint64_t address = quantization_.values + static_cast<int64_t>(token) * quantization_.stride +
                       static_cast<uint64_t>(segment) * kBytes;
    uint32_t count = detail::remaining(segment * kSegmentElements, hidden_);
    bool at_once = kWhole || (quantization_.vectors && count >= kSegmentElements);
    if (at_once) {
      if constexpr (kBytes == 8) {
        hw::store_global(reinterpret_cast<uint64_t*>(address), codes);
      } else {
        hw::store_global(reinterpret_cast<uint32_t*>(address), static_cast<uint32_t>(codes));
      }
      return;
    }
    // Codes of half a byte come in whole blocks only, so `count` is in bytes where it matters.
#pragma unroll
    for (uint32_t i = 0; i < kBytes; ++i) {
      if (i < count) {
        hw::store_global(reinterpret_cast<uint8_t*>(address) + i,
                         static_cast<uint8_t>(codes >> (8 * i)));
      }
    }
  }

  // By the first lane of a block. In a swizzled layout, blocks up to a multiple of four that the
  // row has not got become zero, as matrix products read them; rows that it has not got stay.
  FE_DEVICE void store_block_scale(uint32_t token, uint32_t segment, uint32_t code) const {
    uint32_t per_block = scale_block(quantization_.recipe) / kSegmentElements;
    if (segment % per_block != 0) return;
    auto* scales = reinterpret_cast<uint8_t*>(quantization_.scales);
    uint32_t blocks = segments_of(hidden_) / per_block;
    uint32_t row = quantization_.first_row + token;
    uint32_t block = segment / per_block;
    hw::store_global(scales + scale_place(quantization_.layout, row, block, blocks),
                     static_cast<uint8_t>(code));
    if (quantization_.layout == ScaleLayout::kLinear || block + 1 != blocks) return;
    for (uint32_t i = blocks; i % 4 != 0; ++i) {
      hw::store_global(scales + scale_place(quantization_.layout, row, i, blocks), uint8_t{0});
    }
  }

  const Quantization& quantization_;
  uint32_t hidden_;
};

}  // namespace flashinfer_elastic

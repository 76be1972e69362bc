// The machine words that travel between ranks and within a block, common to device, emulation and
// host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashinfer_elastic {

// The unit of a load or store: 16 bytes, moved as one vector access.
struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

struct alignas(16) Float4 {
  float x, y, z, w;
};

// A word that no rank ever sends. As fp32 it is -0.0; as a pair of 16-bit floats it is
// (+0.0, -0.0). Senders turn every -0.0 into +0.0, so data never equals it.
inline constexpr uint32_t kSentinel = 0x80000000u;

}  // namespace flashinfer_elastic

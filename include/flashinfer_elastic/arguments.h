// What a launch is told. Plain data: filled on the host, passed by value to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashinfer_elastic {

inline constexpr uint32_t kMaxRanks = 64;

enum class ElementType : uint32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };
enum class Strategy : uint32_t { kOneShot = 0, kTwoShot = 1 };

constexpr uint32_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Lives in this rank's device memory, zero before the first launch. Only the device writes it, so
// eager calls and replays of any captured graph may be mixed.
struct Rotation {
  uint32_t epoch;    // calls made so far; its lowest bit names the buffer in use
  uint32_t arrived;  // blocks of the running launch that have read `epoch`
  uint32_t expired;  // waits that have timed out; the first is reported
};

// The workspace as one rank sees it; fixed for the workspace's life.
struct Group {
  uint32_t rank;
  uint32_t ranks;
  uint64_t timeout_ns;    // of each wait for a peer; 0 = for ever
  uint64_t buffer_bytes;  // of each of the two Lamport buffers, which lie one behind the other
  Rotation* rotation;
  uint64_t multicast;          // where a store reaches all ranks' buffers; 0 = nowhere
  uint64_t memory[kMaxRanks];  // where each rank's buffers are mapped in this process
};

// A matrix of `tokens` rows; `stride` is in elements between rows, which are dense themselves.
struct Rows {
  uint64_t address;
  int64_t stride;
  bool vectors;  // every row starts on a 16-byte boundary
};

// One call, or one chunk of one.
struct Problem {
  uint32_t tokens;
  uint32_t hidden;
  Rows input;
  Rows output;       // the sum, or with `normalize` the norm's output
  Rows residual_in;  // the rest only with `normalize`
  Rows residual_out;
  uint64_t gamma;  // `hidden` elements, of the problem's type or fp32
  bool gamma_vectors;
  bool gamma_float32;
  bool normalize;
  float inverse_hidden;  // 1 / hidden
  float epsilon;
  float weight_bias;
};

struct Arguments {
  Group group;
  Problem problem;
};

}  // namespace flashinfer_elastic

// What a launch is told. Plain data: filled on the host, passed by value to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashinfer_elastic {

inline constexpr uint32_t kMaxRanks = 64;

enum class ElementType : uint32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };
enum class Strategy : uint32_t { kOneShot = 0, kTwoShot = 1 };

constexpr uint32_t element_bytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// What a call adds to Rotation::turns.
inline constexpr uint32_t kTurn = 1u << 20;

// Lives in this rank's device memory, zero before the first launch. Only the device writes it, so
// eager calls and replays of any captured graph may be mixed.
struct Rotation {
  uint32_t turns;    // kTurn for each call made so far, and the running one's blocks' parts
  uint32_t expired;  // waits that have timed out; the first is reported
};

// The workspace as one rank sees it; fixed for the workspace's life.
struct Group {
  uint32_t rank;
  uint32_t ranks;
  uint64_t timeout_ns;    // of each wait for a peer; 0 = for ever
  uint64_t buffer_bytes;  // of each of the two Lamport buffers, which lie one behind the other
  Rotation* rotation;
  bool gives_up;       // a trial of multicast: see wait.cuh
  uint64_t multicast;  // where a store reaches all ranks' buffers; 0 = nowhere
  // Where the ranks' buffers are mapped in this process, around the ring from this rank's own.
  uint64_t memory[kMaxRanks];
};

// A matrix of `tokens` rows; `stride` is in elements between rows, which are dense themselves.
struct Rows {
  uint64_t address;
  int64_t stride;
  bool vectors;  // every row starts on a 16-byte boundary
};

// How a norm's output is quantised: the recipes are in quantize.cuh. The numbers are upstream's.
enum class Recipe : uint32_t {
  kNone = 0,
  kFloat8 = 1,         // e4m3, by a scale that is given
  kNvFloat4 = 2,       // e2m1, with an e4m3 scale for each 16 elements
  kDynamicFloat8 = 3,  // e4m3, with a float scale for each row
  kMxFloat8 = 4,       // e4m3, with a power of two for each 32 elements
};

// Where block scales lie. The numbers are upstream's.
enum class ScaleLayout : uint32_t { kSwizzled128x4 = 0, kLinear = 2 };

struct Quantization {
  Recipe recipe;
  ScaleLayout layout;
  uint32_t first_row;      // the place among the scales' rows of this chunk's first token
  float scale;             // what the caller gave as a number,
  uint64_t scale_address;  // or, if not zero, where one float lies
  uint64_t values;         // of this chunk's first token
  int64_t stride;          // in bytes between rows of values, which are dense themselves
  bool vectors;            // every row of values starts on an 8-byte boundary
  uint64_t scales;         // of row 0
};

// One call, or one chunk of one.
struct Problem {
  uint32_t tokens;
  uint32_t hidden;
  Rows input;
  Rows output;  // the sum, or with `normalize` the norm's output; its address may be 0 if quantised
  Rows residual_in;  // the rest only with `normalize`
  Rows residual_out;
  uint64_t gamma;  // `hidden` elements, of the problem's type or fp32
  bool gamma_vectors;
  bool gamma_float32;
  bool normalize;
  float inverse_hidden;  // 1 / hidden
  float epsilon;
  float weight_bias;
  uint32_t block_segments;    // the part of a row that a block takes, and
  uint32_t sharing_blocks;    // how many of a cluster's have a part; see launch_shape.h
  Quantization quantization;  // only with `normalize`
};

struct Arguments {
  Group group;
  Problem problem;
};

}  // namespace flashinfer_elastic

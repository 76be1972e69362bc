// What becomes of a row once its sum is known: written out as it is, or residual add and RMSNorm,
// perhaps quantised.
// One definition for all strategies; a cluster of blocks shares a row, each a contiguous part.
#pragma once

#include "arguments.h"
#include "numerics.cuh"
#include "platform.cuh"
#include "quantize.cuh"
#include "rows.cuh"

namespace flashinfer_elastic {

// The segments of a row that this thread works on: first(), then every thread_count() further ones.
// Whole warps stay in the loop together, because sums over a warp's lanes need all of them; a lane
// may find itself past the row's end (`has`). `kWhole` promises whole vectors (rows.cuh) and no
// more than one segment a thread.
template <bool kWhole>
class RowShare {
 public:
  FE_DEVICE explicit RowShare(uint32_t hidden) : segments_(segments_of(hidden)) {
    uint32_t partials = partials_of(hidden);
    uint32_t per_block = ceil_div(partials, hw::cluster_size()) * kWarpLanes;
    uint32_t begin = per_block * hw::block_in_cluster();
    end_ = begin + per_block;
    if (end_ > partials * kWarpLanes) end_ = partials * kWarpLanes;
    first_ = begin + hw::thread_index();
    single_ = per_block <= hw::thread_count();
  }

  FE_DEVICE uint32_t first() const { return first_; }
  FE_DEVICE uint32_t next(uint32_t segment) const { return segment + hw::thread_count(); }
  FE_DEVICE bool contains(uint32_t segment) const {
    return kWhole ? segment == first_ && segment < end_ : segment < end_;
  }
  FE_DEVICE bool has(uint32_t segment) const { return segment < segments_; }
  // No thread has a second segment, so what belongs to the first may stay in registers.
  FE_DEVICE bool single() const { return kWhole || single_; }

 private:
  uint32_t segments_;
  uint32_t first_;
  uint32_t end_;
  bool single_;
};

template <typename T>
struct Scale {
  Floats<T> word[T::kWords];
};

inline constexpr uint32_t kPartialSets = 2;

// `kQuantized` says whether the norm's output is quantised: kernels that do not are faster without.
template <typename T, bool kWhole, bool kQuantized>
class RowTail {
 public:
  FE_DEVICE RowTail(const Problem& problem, const RowShare<kWhole>& share)
      : problem_(problem),
        share_(share),
        boxes_(static_cast<hw::Mailbox*>(hw::shared_memory())),
        partials_(reinterpret_cast<float*>(boxes_ + kSets)) {
    if (!in_cluster()) return;
    if (hw::thread_index() == 0) {
      for (uint32_t i = 0; i < kSets; ++i) hw::open(boxes_ + i);
    }
    hw::cluster_arrive();
  }

  // After wait_for_predecessor and before the first row. The weight is near by the time the first
  // row's sum is.
  FE_DEVICE void prepare() {
    if (!problem_.normalize) return;
    // Before the prefetch, which its acquire would undo.
    if (in_cluster()) hw::cluster_wait();
    if (share_.has(share_.first())) {
      uint32_t bytes = problem_.gamma_float32 ? Float32::kBytes : T::kBytes;
      hw::prefetch(reinterpret_cast<const char*>(problem_.gamma) +
                   static_cast<uint64_t>(share_.first()) * kSegmentElements * bytes);
    }
    if (kQuantized && problem_.quantization.scale_address != 0) {
      hw::prefetch(reinterpret_cast<const void*>(problem_.quantization.scale_address));
    }
  }

  // Whether this warp has no part in any row and must not wait for what the others exchange:
  // nothing in a cluster waits for it, so they could be any number of rounds ahead. Without a
  // cluster a block's barrier does wait for all its warps.
  FE_DEVICE bool is_idle() const {
    return hw::cluster_size() > 1 && !share_.contains(share_.first());
  }

  // Completes a row; `sum_of(segment)` waits for, and gives, a segment of its sum. Called by all
  // threads of a cluster that are not idle, with the same token.
  template <typename SumOf>
  FE_DEVICE void finish(uint32_t token, SumOf sum_of) {
    if (problem_.normalize) {
      add_and_normalize(token, sum_of);
    } else {
      for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
        if (!share_.has(s)) continue;
        store_segment<T, kWhole>(problem_.output, token, s, problem_.hidden, sum_of(s));
      }
    }
  }

 private:
  template <typename SumOf>
  FE_DEVICE void add_and_normalize(uint32_t token, SumOf sum_of) {
    uint32_t hidden = problem_.hidden;
    uint32_t count = partials_of(hidden);
    Segment<T> row{};  // the residual stream's new value
    for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
      float squares = 0.0f;
      if (share_.has(s)) {
        Segment<T> residual = load_segment<T, kWhole>(problem_.residual_in, token, s, hidden);
        row = sum_of(s);
#pragma unroll
        for (uint32_t i = 0; i < T::kWords; ++i) {
          row.word[i] = add_rounded<T>(row.word[i], residual.word[i]);
          squares = square_sum<T>(row.word[i], squares);
        }
        store_segment<T, kWhole>(problem_.residual_out, token, s, hidden, row);
      }
      publish(s / kWarpLanes, count, sum_of_lanes(squares));
    }
    float square_sum = sum_of_partials(collect(count), count);
    float rstd = reciprocal_rms(square_sum, problem_.inverse_hidden, problem_.epsilon);
    if constexpr (kQuantized) {
      store_quantized(token, row, rstd);
    } else {
      for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
        if (!share_.has(s)) continue;
        store_segment<T, kWhole>(problem_.output, token, s, hidden, normalize(token, s, row, rstd));
      }
    }
  }

  // A segment of the norm's output. `row` is the new residual if each thread has a single segment.
  FE_DEVICE Segment<T> normalize(uint32_t token, uint32_t segment, Segment<T> row,
                                 float rstd) const {
    Scale<T> scale = load_scale(segment);
    if (!share_.single()) {
      row = load_segment<T, kWhole>(problem_.residual_out, token, segment, problem_.hidden);
    }
    Segment<T> out;
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      out.word[i] = normalized<T>(row.word[i], rstd, scale.word[i]);
    }
    return out;
  }

  FE_DEVICE void store_quantized(uint32_t token, const Segment<T>& row, float rstd) {
    Quantizer<kWhole> quantizer(problem_);
    Segment<T> out{};
    float scale;
    if (quantizer.recipe() == Recipe::kDynamicFloat8) {
      uint32_t count = partials_of(problem_.hidden);
      for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
        if (share_.has(s)) out = normalize(token, s, row, rstd);
        float largest = share_.has(s) ? largest_magnitude(elements_of<T>(out)) : 0.0f;
        publish(s / kWarpLanes, count, largest_of_lanes(largest, kWarpLanes));
      }
      scale = dynamic_scale(largest_of_partials(collect(count), count));
      if (share_.first() == 0) quantizer.store_row_scale(token, scale);
    } else {
      scale = quantizer.given_scale();
    }
    for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
      bool has = share_.has(s);
      if (has) {
        if (!share_.single() || quantizer.recipe() != Recipe::kDynamicFloat8) {
          out = normalize(token, s, row, rstd);
        }
        if (problem_.output.address != 0) {
          store_segment<T, kWhole>(problem_.output, token, s, problem_.hidden, out);
        }
      }
      quantizer.store(token, s, has, elements_of<T>(out), scale);
    }
  }

  FE_DEVICE Scale<T> load_scale(uint32_t segment) const {
    Scale<T> scale;
    uint32_t hidden = problem_.hidden;
    float* flat = &scale.word[0].v[0];
    if (problem_.gamma_float32) {
      Segment<Float32> g =
          load_segment<Float32, kWhole>(problem_.gamma, problem_.gamma_vectors, segment, hidden);
#pragma unroll
      for (uint32_t i = 0; i < Float32::kWords; ++i) {
        Floats<Float32> f = unpack<Float32>(g.word[i]);
#pragma unroll
        for (uint32_t j = 0; j < Float32::kPerWord; ++j) flat[i * Float32::kPerWord + j] = f.v[j];
      }
    } else {
      Segment<T> g =
          load_segment<T, kWhole>(problem_.gamma, problem_.gamma_vectors, segment, hidden);
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) scale.word[i] = unpack<T>(g.word[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kSegmentElements; ++i) {
      flat[i] = hw::add(flat[i], problem_.weight_bias);
    }
    return scale;
  }

  FE_DEVICE bool in_cluster() const { return problem_.normalize && hw::cluster_size() > 1; }

  // A *round* is what one publish and collect of all warps is for: a row's sum of squares, or its
  // largest element. Rounds use two sets of partials in turn: a warp that is one round ahead must
  // not overwrite what others still read. Two rounds ahead is impossible, because a round needs the
  // partials of all warps that take part, and what a warp publishes in a round depends on all that
  // it read in the one before.
  FE_DEVICE uint32_t set() const { return round_ % kSets; }

  // Every block of the cluster that has a part in the row gets every partial.
  FE_DEVICE void publish(uint32_t index, uint32_t count, float value) const {
    float* place = partials_ + set() * count + index;
    uint32_t lane = hw::thread_index() % kWarpLanes;
    if (hw::cluster_size() == 1) {
      if (lane == 0) *place = value;
    } else if (lane < problem_.sharing_blocks) {
      hw::post(boxes_ + set(), place, lane, value);
    }
  }

  // Waits for all partials of the round, and gives them. Goes on to the next round.
  FE_DEVICE const float* collect(uint32_t count) {
    const float* partials = partials_ + set() * count;
    if (hw::cluster_size() == 1) {
      hw::sync_block();
    } else {
      if (hw::thread_index() == 0) hw::expect(boxes_ + set(), count);
      hw::wait(boxes_ + set(), round_ / kSets % 2);
    }
    ++round_;
    return partials;
  }

  static constexpr uint32_t kSets = kPartialSets;

  const Problem& problem_;
  const RowShare<kWhole>& share_;
  hw::Mailbox* boxes_;
  float* partials_;
  uint32_t round_ = 0;
};

// Shared memory a block needs, in bytes.
FE_SHARED constexpr uint32_t row_tail_shared_bytes(uint32_t hidden) {
  return kPartialSets *
         static_cast<uint32_t>(sizeof(hw::Mailbox) + partials_of(hidden) * sizeof(float));
}

}  // namespace flashinfer_elastic

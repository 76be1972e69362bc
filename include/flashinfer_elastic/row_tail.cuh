// What becomes of a row once its sum is known: written out as it is, or residual add and RMSNorm.
// One definition for all strategies; a cluster of blocks shares a row, each a contiguous part.
#pragma once

#include "arguments.h"
#include "numerics.cuh"
#include "platform.cuh"
#include "rows.cuh"

namespace flashinfer_elastic {

// The segments of a row that this thread works on: first(), then every thread_count() further ones.
// Whole warps stay in the loop together, because sums over a warp's lanes need all of them; a lane
// may find itself past the row's end (`has`).
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
  FE_DEVICE bool contains(uint32_t segment) const { return segment < end_; }
  FE_DEVICE bool has(uint32_t segment) const { return segment < segments_; }
  // No thread has a second segment, so what belongs to the first may stay in registers.
  FE_DEVICE bool single() const { return single_; }

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

template <typename T>
class RowTail {
 public:
  FE_DEVICE RowTail(const Problem& problem, const RowShare& share)
      : problem_(problem), share_(share), partials_(hw::shared_floats()) {
    // A block's shared memory may be written only once the block has started.
    if (problem_.normalize && hw::cluster_size() > 1) hw::cluster_arrive();
  }

  // After wait_for_predecessor and before the first row.
  FE_DEVICE void prepare() {
    if (!problem_.normalize) return;
    if (share_.single() && share_.has(share_.first())) scale_ = load_scale(share_.first());
    if (hw::cluster_size() > 1) hw::cluster_wait();
  }

  // Completes a row; `sum_of(segment)` waits for, and gives, a segment of its sum. Called by all
  // threads of a cluster with the same token.
  template <typename SumOf>
  FE_DEVICE void finish(uint32_t token, SumOf sum_of) {
    if (problem_.normalize) {
      add_and_normalize(token, sum_of);
    } else {
      for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
        if (!share_.has(s)) continue;
        store_segment<T>(problem_.output, token, s, problem_.hidden, sum_of(s));
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
        Segment<T> residual = load_segment<T>(problem_.residual_in, token, s, hidden);
        row = sum_of(s);
#pragma unroll
        for (uint32_t i = 0; i < T::kWords; ++i) {
          row.word[i] = add_rounded<T>(row.word[i], residual.word[i]);
          squares = square_sum<T>(row.word[i], squares);
        }
        store_segment<T>(problem_.residual_out, token, s, hidden, row);
      }
      publish_partial(s / kWarpLanes, sum_of_lanes(squares));
    }
    barrier();
    float rstd = reciprocal_rms(sum_of_partials(partials_, count), hidden, problem_.epsilon);
    swap_partials(count);
    for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
      if (!share_.has(s)) continue;
      if (!share_.single()) {
        row = load_segment<T>(problem_.residual_out, token, s, hidden);
        scale_ = load_scale(s);
      }
      Segment<T> out;
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) {
        out.word[i] = normalized<T>(row.word[i], rstd, scale_.word[i]);
      }
      store_segment<T>(problem_.output, token, s, hidden, out);
    }
  }

  FE_DEVICE Scale<T> load_scale(uint32_t segment) const {
    Scale<T> scale;
    uint32_t hidden = problem_.hidden;
    float* flat = &scale.word[0].v[0];
    if (problem_.gamma_float32) {
      Segment<Float32> g =
          load_segment<Float32>(problem_.gamma, problem_.gamma_vectors, segment, hidden);
#pragma unroll
      for (uint32_t i = 0; i < Float32::kWords; ++i) {
        Floats<Float32> f = unpack<Float32>(g.word[i]);
#pragma unroll
        for (uint32_t j = 0; j < Float32::kPerWord; ++j) flat[i * Float32::kPerWord + j] = f.v[j];
      }
    } else {
      Segment<T> g = load_segment<T>(problem_.gamma, problem_.gamma_vectors, segment, hidden);
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) scale.word[i] = unpack<T>(g.word[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kSegmentElements; ++i) {
      flat[i] = hw::add(flat[i], problem_.weight_bias);
    }
    return scale;
  }

  // Every block of the cluster gets every partial.
  FE_DEVICE void publish_partial(uint32_t index, float value) const {
    uint32_t blocks = hw::cluster_size();
    uint32_t lane = hw::thread_index() % kWarpLanes;
    if (blocks == 1) {
      if (lane == 0) partials_[index] = value;
    } else if (lane < blocks) {
      hw::store_shared_of(partials_ + index, lane, value);
    }
  }

  FE_DEVICE void barrier() const {
    if (hw::cluster_size() == 1) {
      hw::sync_block();
    } else {
      hw::cluster_arrive();
      hw::cluster_wait();
    }
  }

  // Rows use two sets of partials in turn: a thread that is one row ahead, past this row's barrier,
  // must not overwrite what others still read; two rows ahead is impossible without another
  // barrier.
  FE_DEVICE void swap_partials(uint32_t count) {
    float* base = hw::shared_floats();
    partials_ = partials_ == base ? base + count : base;
  }

  const Problem& problem_;
  const RowShare& share_;
  float* partials_;
  Scale<T> scale_;
};

// Shared memory a block needs, in bytes.
FE_SHARED constexpr uint32_t row_tail_shared_bytes(uint32_t hidden) {
  return 2 * partials_of(hidden) * static_cast<uint32_t>(sizeof(float));
}

}  // namespace flashinfer_elastic

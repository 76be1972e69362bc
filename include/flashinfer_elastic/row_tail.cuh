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
// may find itself past the row's end (`has`). `kWhole` promises whole vectors (rows.cuh) and no
// more than one segment a thread.
template <bool kWhole>
class RowShare {
 public:
  FE_DEVICE explicit RowShare(uint32_t hidden) : segments_(segments_of(hidden)) {
    uint32_t partials = partials_of(hidden);
    uint32_t per_block = ceil_div(partials, hw::cluster_size()) * kWarpLanes;
    blocks_ = ceil_div(partials, per_block / kWarpLanes);
    uint32_t begin = per_block * hw::block_in_cluster();
    end_ = begin + per_block;
    if (end_ > partials * kWarpLanes) end_ = partials * kWarpLanes;
    first_ = begin + hw::thread_index();
    single_ = per_block <= hw::thread_count();
  }

  // Blocks of the cluster that have a part in a row; the others, if any, come last.
  FE_DEVICE uint32_t blocks() const { return blocks_; }
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
  uint32_t blocks_;
  uint32_t first_;
  uint32_t end_;
  bool single_;
};

template <typename T>
struct Scale {
  Floats<T> word[T::kWords];
};

inline constexpr uint32_t kPartialSets = 2;

template <typename T, bool kWhole>
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
  }

  // Completes a row; `sum_of(segment)` waits for, and gives, a segment of its sum. Called by all
  // threads of a cluster with the same token.
  template <typename SumOf>
  FE_DEVICE void finish(uint32_t token, SumOf sum_of) {
    if (problem_.normalize) {
      // A warp without a part in rows must not take part in their mailboxes either: nobody would
      // wait for it, and it could find itself two rows behind.
      if (in_cluster() && !share_.contains(share_.first())) return;
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
    float rstd = reciprocal_rms(collect(count), problem_.inverse_hidden, problem_.epsilon);
    for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
      if (!share_.has(s)) continue;
      Scale<T> scale = load_scale(s);
      if (!share_.single()) {
        row = load_segment<T, kWhole>(problem_.residual_out, token, s, hidden);
      }
      Segment<T> out;
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) {
        out.word[i] = normalized<T>(row.word[i], rstd, scale.word[i]);
      }
      store_segment<T, kWhole>(problem_.output, token, s, hidden, out);
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

  // Rows use two sets of partials in turn: a warp that is one row ahead must not overwrite what
  // others still read. Two rows ahead is impossible, because a row needs the partials of all warps
  // that read any.
  FE_DEVICE uint32_t set() const { return row_ % kSets; }

  // Every block of the cluster that has a part in the row gets every partial.
  FE_DEVICE void publish(uint32_t index, uint32_t count, float value) const {
    float* place = partials_ + set() * count + index;
    uint32_t lane = hw::thread_index() % kWarpLanes;
    if (hw::cluster_size() == 1) {
      if (lane == 0) *place = value;
    } else if (lane < share_.blocks()) {
      hw::post(boxes_ + set(), place, lane, value);
    }
  }

  // Waits for the row's partials, and gives their sum. Goes on to the next set.
  FE_DEVICE float collect(uint32_t count) {
    const float* partials = partials_ + set() * count;
    if (hw::cluster_size() == 1) {
      hw::sync_block();
    } else {
      if (hw::thread_index() == 0) hw::expect(boxes_ + set(), count);
      hw::wait(boxes_ + set(), row_ / kSets % 2);
    }
    ++row_;
    return sum_of_partials(partials, count);
  }

  static constexpr uint32_t kSets = kPartialSets;

  const Problem& problem_;
  const RowShare<kWhole>& share_;
  hw::Mailbox* boxes_;
  float* partials_;
  uint32_t row_ = 0;
};

// Shared memory a block needs, in bytes.
FE_SHARED constexpr uint32_t row_tail_shared_bytes(uint32_t hidden) {
  return kPartialSets *
         static_cast<uint32_t>(sizeof(hw::Mailbox) + partials_of(hidden) * sizeof(float));
}

}  // namespace flashinfer_elastic

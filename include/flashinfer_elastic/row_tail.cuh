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
// `kWhole` promises whole vectors (rows.cuh) and no more than one segment a thread.
template <bool kWhole>
class RowShare {
 public:
  FE_DEVICE explicit RowShare(const Problem& problem) : segments_(segments_of(problem.hidden)) {
    uint32_t begin = problem.block_segments * hw::block_in_cluster();
    uint32_t padded = partials_of(problem.hidden) * kWarpLanes;
    first_ = begin + hw::thread_index();
    end_ = begin + problem.block_segments < padded ? begin + problem.block_segments : padded;
    single_ = problem.block_segments <= hw::thread_count();
  }

  // Calls visit(segment) for each. Whole warps make the same calls together, because sums over a
  // warp's lanes need all of them; a lane may find itself past the row's end (`has`).
  template <typename Visit>
  FE_DEVICE void for_each(Visit visit) const {
    if constexpr (kWhole) {
      if (takes_part()) visit(first_);
    } else {
#pragma unroll 1
      for (uint32_t s = first_; s < end_; s += hw::thread_count()) visit(s);
    }
  }

  FE_DEVICE uint32_t first() const { return first_; }
  FE_DEVICE bool has(uint32_t segment) const { return segment < segments_; }
  FE_DEVICE bool takes_part() const { return first_ < end_; }
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
        boxes_(hw::shared_memory()),
        partials_(boxes_ + kSets * hw::kMailboxBytes) {
    if (!problem.normalize) return;
    clear_padding();
    if (!in_cluster()) return;
    if (hw::thread_index() == 0) {
      for (uint32_t i = 0; i < kSets; ++i) hw::open(box(i));
    }
    hw::cluster_arrive();
  }

  // Says which row is to be completed next; best said before anything is waited for.
  FE_DEVICE void aim(uint32_t token) {
    token_ = token;
    output_ = row_address<T>(problem_.output, token);
    residual_in_ = row_address<T>(problem_.residual_in, token);
    residual_out_ = row_address<T>(problem_.residual_out, token);
    hw::settle(output_, residual_in_, residual_out_);
  }

  // After wait_for_predecessor and the first row's sends, whose flight hides what it takes.
  FE_DEVICE void prepare() {
    if (!problem_.normalize) return;
    if (in_cluster()) hw::cluster_wait();
    if (kKeepsScale && share_.has(share_.first())) scale_ = load_scale(share_.first());
    if (kQuantized && problem_.quantization.scale_address != 0) {
      hw::prefetch(reinterpret_cast<const void*>(problem_.quantization.scale_address));
    }
    epsilon_ = problem_.epsilon;
    inverse_hidden_ = problem_.inverse_hidden;
    hw::settle(hw::bits_of_float(epsilon_), hw::bits_of_float(inverse_hidden_));
  }

  // Whether this warp has no part in any row and must not wait for what the others exchange:
  // nothing in a cluster waits for it, so they could be any number of rounds ahead. Without a
  // cluster a block's barrier does wait for all its warps.
  FE_DEVICE bool is_idle() const { return hw::cluster_size() > 1 && !share_.takes_part(); }

  // Completes the row; `sum_of(segment)` waits for, and gives, a segment of its sum. Called by all
  // threads of a cluster that are not idle, for the same row.
  template <typename SumOf>
  FE_DEVICE void finish(SumOf sum_of) {
    if (problem_.normalize) {
      add_and_normalize(sum_of);
    } else {
      share_.for_each([&](uint32_t s) {
        if (share_.has(s)) store_output(s, sum_of(s));
      });
    }
  }

 private:
  template <typename SumOf>
  FE_DEVICE void add_and_normalize(SumOf sum_of) {
    uint32_t hidden = problem_.hidden;
    uint32_t count = partials_of(hidden);
    Segment<T> row{};  // the residual stream's new value
    share_.for_each([&](uint32_t s) {
      float squares = 0.0f;
      if (share_.has(s)) {
        Segment<T> residual =
            load_segment<T, kWhole>(residual_in_, problem_.residual_in.vectors, s, hidden);
        row = sum_of(s);
#pragma unroll
        for (uint32_t i = 0; i < T::kWords; ++i) {
          row.word[i] = add_rounded<T>(row.word[i], residual.word[i]);
          squares = square_sum<T>(row.word[i], squares);
        }
        store_segment<T, kWhole>(residual_out_, problem_.residual_out.vectors, s, hidden, row);
      }
      publish(s / kWarpLanes, sum_of_lanes(squares));
    });
    float square_sum = sum_of_partials(collect(count), count);
    float rstd = reciprocal_rms(square_sum, inverse_hidden_, epsilon_);
    if constexpr (kQuantized) {
      store_quantized(row, rstd);
    } else {
      share_.for_each([&](uint32_t s) {
        if (share_.has(s)) store_output(s, normalize(s, row, rstd));
      });
    }
  }

  FE_DEVICE void store_output(uint32_t segment, const Segment<T>& value) const {
    store_segment<T, kWhole>(output_, problem_.output.vectors, segment, problem_.hidden, value);
  }

  // A segment of the norm's output. `row` is the new residual if each thread has a single segment.
  FE_DEVICE Segment<T> normalize(uint32_t segment, Segment<T> row, float rstd) const {
    Scale<T> scale = kKeepsScale ? scale_ : load_scale(segment);
    if (!share_.single()) {
      row = load_segment<T, kWhole>(residual_out_, problem_.residual_out.vectors, segment,
                                    problem_.hidden);
    }
    Segment<T> out;
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      out.word[i] = normalized<T>(row.word[i], rstd, scale.word[i]);
    }
    return out;
  }

  FE_DEVICE void store_quantized(const Segment<T>& row, float rstd) {
    Quantizer<kWhole> quantizer(problem_);
    Segment<T> out{};
    float scale;
    if (quantizer.recipe() == Recipe::kDynamicFloat8) {
      uint32_t count = partials_of(problem_.hidden);
      share_.for_each([&](uint32_t s) {
        if (share_.has(s)) out = normalize(s, row, rstd);
        float largest = share_.has(s) ? largest_magnitude(elements_of<T>(out)) : 0.0f;
        publish(s / kWarpLanes, largest_of_lanes(largest, kWarpLanes));
      });
      scale = dynamic_scale(largest_of_partials(collect(count), count));
      if (share_.first() == 0) quantizer.store_row_scale(token_, scale);
    } else {
      scale = quantizer.given_scale();
    }
    share_.for_each([&](uint32_t s) {
      bool has = share_.has(s);
      if (has) {
        if (!share_.single() || quantizer.recipe() != Recipe::kDynamicFloat8) {
          out = normalize(s, row, rstd);
        }
        if (problem_.output.address != 0) store_output(s, out);
      }
      quantizer.store(token_, s, has, elements_of<T>(out), scale);
    });
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

  // Visible to the block's other threads after its next barrier, before the first round.
  FE_DEVICE void clear_padding() const {
    uint32_t count = partials_of(problem_.hidden);
    uint32_t place = count + hw::thread_index();
    if (place >= padded_partials(count)) return;
    for (uint32_t i = 0; i < kSets; ++i) {
      hw::store_shared(partials(i) + place * sizeof(float), 0.0f);
    }
  }

  FE_DEVICE hw::SharedPlace partials(uint32_t set) const {
    return partials_ + set * padded_partials(partials_of(problem_.hidden)) * sizeof(float);
  }

  FE_DEVICE hw::SharedPlace box(uint32_t set) const { return boxes_ + set * hw::kMailboxBytes; }

  // Every block of the cluster that has a part in the row gets every partial.
  FE_DEVICE void publish(uint32_t index, float value) const {
    hw::SharedPlace place = partials(set()) + index * sizeof(float);
    uint32_t lane = hw::thread_index() % kWarpLanes;
    if (hw::cluster_size() == 1) {
      if (lane == 0) hw::store_shared(place, value);
    } else if (lane < problem_.sharing_blocks) {
      hw::post(box(set()), place, lane, value);
    }
  }

  // Waits for all partials of the round, and gives them. Goes on to the next round.
  FE_DEVICE hw::SharedPlace collect(uint32_t count) {
    hw::SharedPlace list = partials(set());
    if (hw::cluster_size() == 1) {
      hw::sync_block();
    } else {
      if (hw::thread_index() == 0) hw::expect(box(set()), count);
      hw::wait(box(set()), round_ / kSets % 2);
    }
    ++round_;
    return list;
  }

  static constexpr uint32_t kSets = kPartialSets;
  // With one segment a thread, its part of the weight stays in registers.
  static constexpr bool kKeepsScale = kWhole;

  const Problem& problem_;
  const RowShare<kWhole>& share_;
  hw::SharedPlace boxes_;
  hw::SharedPlace partials_;
  uint32_t round_ = 0;
  uint32_t token_ = 0;
  uint64_t output_ = 0;
  uint64_t residual_in_ = 0;
  uint64_t residual_out_ = 0;
  float epsilon_ = 0.0f;
  float inverse_hidden_ = 0.0f;
  Scale<T> scale_{};
};

// Shared memory a block needs, in bytes.
FE_SHARED constexpr uint32_t row_tail_shared_bytes(uint32_t hidden) {
  return kPartialSets * static_cast<uint32_t>(hw::kMailboxBytes +
                                              padded_partials(partials_of(hidden)) * sizeof(float));
}

}  // namespace flashinfer_elastic

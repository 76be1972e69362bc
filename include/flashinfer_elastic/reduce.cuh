// The sum over ranks, in rank order, of one word of which every rank has a copy on its way here.
#pragma once

#include "numerics.cuh"
#include "platform.cuh"
#include "transport.cuh"
#include "wait.cuh"

namespace flashinfer_elastic {

// Ranks whose words are loaded before the first is waited for, where the count is not known.
inline constexpr uint32_t kGenericBatch = 8;

// `first` is the offset of rank 0's word, `stride` the distance to the next rank's. This rank's own
// word is `mine`; its slot is not used.
template <typename T, uint32_t kRanks, typename Link>
FE_DEVICE Word4 reduce_word(const Group& group, const Link& link, uint64_t first, uint64_t stride,
                            Word4 mine, uint32_t token) {
  constexpr uint32_t kBatch = kRanks != 0 ? kRanks : kGenericBatch;
  uint32_t ranks = rank_count<kRanks>(group);
  Floats<T> sum;
#pragma unroll
  for (uint32_t i = 0; i < T::kPerWord; ++i) sum.v[i] = 0.0f;
  for (uint32_t base = 0; base < ranks; base += kBatch) {
    Word4 seen[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      uint32_t source = base + i;
      seen[i] = mine;
      if (source < ranks && source != group.rank) {
        seen[i] = hw::load_shared_by_ranks(link.mine(first + source * stride));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      uint32_t source = base + i;
      if (source >= ranks) break;
      if (source != group.rank) {
        Word4* slot = link.mine(first + source * stride);
        seen[i] = wait_for_word(group, slot, seen[i], {source, token, "the contribution"});
        hw::reset_shared_by_ranks(slot);
      }
      accumulate<T>(sum, seen[i]);
    }
  }
  return finish_sum<T>(sum);
}

}  // namespace flashinfer_elastic

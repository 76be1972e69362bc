// The sum over ranks, in rank order, of one word of which every rank has a copy on its way here.
#pragma once

#include "numerics.cuh"
#include "platform.cuh"
#include "transport.cuh"
#include "wait.cuh"

namespace flashinfer_elastic {

// Ranks whose words are loaded before the first of them is waited for: as many as fit in registers.
FE_SHARED constexpr uint32_t batch_of(uint32_t ranks) {
  return ranks == 0 ? 4 : ranks <= 4 ? ranks : (ranks + 1) / 2;
}

// `first` is the offset of rank 0's word, `stride` the distance to the next rank's. This rank's own
// word is `mine`; its slot is not used, or has an echo of it to be taken in (`kEchoed`).
template <typename T, uint32_t kRanks, bool kEchoed, typename Link>
FE_DEVICE Word4 reduce_word(const Group& group, const Link& link, uint64_t first, uint64_t stride,
                            Word4 mine, uint32_t token) {
  if constexpr (kRanks == 2 && !kEchoed) {
    // The sum of two is the same in either order.
    uint32_t peer = 1 - group.rank;
    Word4* slot = link.mine(first + peer * stride);
    Word4 theirs = wait_for_word<Link::kMayGiveUp>(group, slot, hw::load_shared_by_ranks(slot),
                                                   {peer, token, "the contribution"});
    hw::reset_shared_by_ranks(slot);
    return add_rounded<T>(mine, theirs);
  }
  constexpr uint32_t kBatch = batch_of(kRanks);
  uint32_t ranks = rank_count<kRanks>(group);
  Floats<T> sum;
#pragma unroll
  for (uint32_t base = 0; base < ranks; base += kBatch) {
    Word4 seen[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      uint32_t source = base + i;
      seen[i] = mine;
      if (source < ranks && (kEchoed || source != group.rank)) {
        seen[i] = hw::load_shared_by_ranks(link.mine(first + source * stride));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      uint32_t source = base + i;
      if (source >= ranks) break;
      if (kEchoed || source != group.rank) {
        Word4* slot = link.mine(first + source * stride);
        seen[i] = wait_for_word<Link::kMayGiveUp>(group, slot, seen[i],
                                                  {source, token, "the contribution"});
        hw::reset_shared_by_ranks(slot);
      }
      if (source == 0) {
        sum = unpack<T>(seen[i]);
      } else {
        accumulate<T>(sum, seen[i]);
      }
    }
  }
  return pack<T>(sum);
}

}  // namespace flashinfer_elastic

// How a word reaches the other ranks. A transport is a type with the same few verbs, and the
// algorithms never ask which one they have.
//
//   to_peers(offset, word)     store to every rank but this one
//   to(step, offset, word)     store to one other rank, `step` places on around the ring
//   mine(offset)               this rank's own copy
//   kEchoes                    whether to_peers stores to this rank too: then the word has to be
//                              taken in like any other, or it would be found there two calls later
//   kMayGiveUp                 whether a wait may time out without a trap (wait.cuh), as the trial
//                              of a transport needs that may not work on this machine
//
// `offset` is in bytes from the start of a rank's buffers and the same on all ranks. Stores are
// relaxed: the word is its own flag (wait.cuh) and nothing else is ordered by it.
#pragma once

#include "arguments.h"
#include "platform.cuh"
#include "words.h"

namespace flashinfer_elastic {

// `kRanks` is the group's size, or 0 for one known only at run time.
template <uint32_t kRanks>
FE_DEVICE uint32_t rank_count(const Group& group) {
  return kRanks != 0 ? kRanks : group.ranks;
}

// The rank `step` places on around the ring; `step` is at most `ranks`.
FE_DEVICE uint32_t rank_after(uint32_t rank, uint32_t step, uint32_t ranks) {
  return rank + step < ranks ? rank + step : rank + step - ranks;
}

// Peers' memory mapped one by one; works wherever they can reach each other.
template <uint32_t kRanks>
class Unicast {
 public:
  static constexpr bool kEchoes = false;
  static constexpr bool kMayGiveUp = false;

  FE_DEVICE explicit Unicast(const Group& group) : group_(group) {}

  // Starts with the next rank, so that the ranks do not all store to the same one at once.
  FE_DEVICE void to_peers(uint64_t offset, Word4 word) const {
    uint32_t ranks = rank_count<kRanks>(group_);
#pragma unroll
    for (uint32_t step = 1; step < ranks; ++step) to(step, offset, word);
  }

  FE_DEVICE void to(uint32_t step, uint64_t offset, Word4 word) const {
    hw::store_shared_by_ranks(reinterpret_cast<Word4*>(group_.memory[step] + offset), word);
  }

  FE_DEVICE Word4* mine(uint64_t offset) const {
    return reinterpret_cast<Word4*>(group_.memory[0] + offset);
  }

 private:
  const Group& group_;
};

// One store that NVLink's switches copy to all ranks. What goes to a single rank takes the same way
// as above: an ordinary store to a multicast address is not defined.
template <uint32_t kRanks>
class Multicast {
 public:
  static constexpr bool kEchoes = true;
  static constexpr bool kMayGiveUp = true;

  FE_DEVICE explicit Multicast(const Group& group) : group_(group), unicast_(group) {}

  FE_DEVICE void to_peers(uint64_t offset, Word4 word) const {
    hw::store_to_all_ranks(group_.multicast + offset, word);
  }

  FE_DEVICE void to(uint32_t step, uint64_t offset, Word4 word) const {
    unicast_.to(step, offset, word);
  }

  FE_DEVICE Word4* mine(uint64_t offset) const { return unicast_.mine(offset); }

 private:
  const Group& group_;
  Unicast<kRanks> unicast_;
};

}  // namespace flashinfer_elastic

// Two-shot: each token has an owner that sums it and sends the sum to all. Twice the steps, for
// 2 * (ranks - 1) / ranks times the bytes. The epilogue runs on every rank, as in one-shot.
#pragma once

#include "layout.cuh"
#include "reduce.cuh"
#include "rotation.cuh"
#include "row_tail.cuh"
#include "rows.cuh"
#include "transport.cuh"
#include "wait.cuh"

namespace flashinfer_elastic {

template <typename T, uint32_t kRanks, typename Link, bool kWhole, bool kQuantized>
class TwoShot {
 public:
  // The whole kernel: a cluster of blocks works on a *team* of consecutive tokens, one per owner.
  FE_DEVICE static void run(const Arguments& arguments) {
    const Problem& problem = arguments.problem;
    const Group& group = arguments.group;
    RowShare<kWhole> share(problem);
    RowTail<T, kWhole, kQuantized> tail(problem, share);
    TwoShot op(arguments, share);
    hw::wait_for_predecessor();
    hw::allow_successor();
    op.turn_.begin();
    uint32_t ranks = rank_count<kRanks>(group);
    uint32_t teams = ceil_div(problem.tokens, ranks);
    uint32_t team = hw::cluster_index();
    Segment<T> own = op.send(team);
    op.turn_.pass_on();
    tail.prepare();
    if (tail.is_idle()) return;
    while (team < teams) {
      // As in one-shot: sent ahead, and in the same order everywhere.
      uint32_t next = team + hw::cluster_count();
      Segment<T> next_own{};
      if (next < teams) next_own = op.send(next);
      Segment<T> own_sum = op.sum_own(team, own);
      for (uint32_t step = 0; step < ranks; ++step) {
        uint32_t owner = rank_after(group.rank, step, ranks);
        uint32_t token = team * ranks + owner;
        if (token >= problem.tokens) continue;
        tail.aim(token);
        tail.finish([&](uint32_t segment) {
          return step == 0 && keeps_own_sum(share) ? own_sum : op.sum(token, owner, segment);
        });
      }
      team = next;
      own = next_own;
    }
  }

 private:
  FE_DEVICE TwoShot(const Arguments& arguments, const RowShare<kWhole>& share)
      : group_(arguments.group),
        problem_(arguments.problem),
        share_(share),
        link_(arguments.group),
        turn_(arguments.group) {}

  FE_DEVICE uint64_t offset(uint64_t slot, uint32_t segment, uint32_t word) const {
    return turn_.buffer() + word_offset<T>(problem_.hidden, slot, segment, word);
  }

  // Sends this thread's part of a team's rows to their owners; gives the last segment of the row
  // that this rank owns.
  FE_DEVICE Segment<T> send(uint32_t team) const {
    uint32_t ranks = rank_count<kRanks>(group_);
    Segment<T> own{};
    share_.for_each([&](uint32_t s) {
      if (!share_.has(s)) return;
#pragma unroll
      for (uint32_t step = 1; step <= ranks; ++step) {
        uint32_t owner = rank_after(group_.rank, step, ranks);
        uint32_t token = team * ranks + owner;
        if (token >= problem_.tokens) continue;
        own = load_contribution<T, kWhole>(problem_, row_address<T>(problem_.input, token), s);
        if (step == ranks) break;
        uint64_t slot = contribution_slot(token, group_.rank, ranks);
#pragma unroll
        for (uint32_t i = 0; i < T::kWords; ++i) link_.to(step, offset(slot, s, i), own.word[i]);
      }
    });
    return own;
  }

  // Sums the team's token that this rank owns and sends it to all; gives the last segment.
  FE_DEVICE Segment<T> sum_own(uint32_t team, const Segment<T>& own) const {
    uint32_t ranks = rank_count<kRanks>(group_);
    uint32_t token = team * ranks + group_.rank;
    Segment<T> sum{};
    if (token >= problem_.tokens) return sum;
    share_.for_each([&](uint32_t s) {
      if (!share_.has(s)) return;
      Segment<T> mine = own;
      if (!share_.single()) {
        mine = load_contribution<T, kWhole>(problem_, row_address<T>(problem_.input, token), s);
      }
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) {
        sum.word[i] = reduce_word<T, kRanks, false>(
            group_, link_, offset(contribution_slot(token, 0, ranks), s, i),
            slot_bytes<T>(problem_.hidden), mine.word[i], token);
        uint64_t result = offset(sum_slot(token, problem_.tokens, ranks), s, i);
        link_.to_peers(result, sum.word[i]);
        if (!keeps_own_sum(share_) && !Link::kEchoes) {
          hw::store_shared_by_ranks(link_.mine(result), sum.word[i]);
        }
      }
    });
    return sum;
  }

  // Whether the sum of this rank's own token stays in registers. With several segments a thread, or
  // where it echoes, this rank reads it back like anyone's.
  FE_DEVICE static bool keeps_own_sum(const RowShare<kWhole>& share) {
    return share.single() && !Link::kEchoes;
  }

  FE_DEVICE Segment<T> sum(uint32_t token, uint32_t owner, uint32_t segment) const {
    uint64_t slot = sum_slot(token, problem_.tokens, rank_count<kRanks>(group_));
    Segment<T> sum{};
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      sum.word[i] = hw::load_shared_by_ranks(link_.mine(offset(slot, segment, i)));
    }
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      Word4* place = link_.mine(offset(slot, segment, i));
      sum.word[i] =
          wait_for_word<Link::kMayGiveUp>(group_, place, sum.word[i], {owner, token, "the sum"});
      hw::reset_shared_by_ranks(place);
    }
    return sum;
  }

  const Group& group_;
  const Problem& problem_;
  const RowShare<kWhole>& share_;
  Link link_;
  Turn turn_;
};

}  // namespace flashinfer_elastic

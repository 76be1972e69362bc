// One-shot: every rank sends its rows to all others, and each sums all rows itself.
// The fewest steps, for (ranks - 1) times the bytes.
#pragma once

#include "layout.cuh"
#include "reduce.cuh"
#include "rotation.cuh"
#include "row_tail.cuh"
#include "rows.cuh"
#include "transport.cuh"

namespace flashinfer_elastic {

template <typename T, uint32_t kRanks, typename Link, bool kWhole, bool kQuantized>
class OneShot {
 public:
  // The whole kernel: a cluster of blocks works on one row at a time.
  FE_DEVICE static void run(const Arguments& arguments) {
    const Problem& problem = arguments.problem;
    RowShare<kWhole> share(problem.hidden);
    RowTail<T, kWhole, kQuantized> tail(problem, share);
    hw::wait_for_predecessor();
    hw::allow_successor();
    OneShot op(arguments, share);
    uint32_t token = hw::cluster_index();
    Segment<T> own = op.send(token);
    op.turn_.pass_on();
    tail.prepare();
    if (tail.is_idle()) return;
    while (token < problem.tokens) {
      // The next row is on its way before this one is waited for, which keeps the links busy; and
      // rows are sent in the same order everywhere before anything is waited for, so no two ranks
      // can wait for each other.
      uint32_t next = token + hw::cluster_count();
      Segment<T> next_own{};
      if (next < problem.tokens) next_own = op.send(next);
      tail.finish(token, [&](uint32_t segment) {
        return op.reduce(
            token, segment,
            share.single() ? own : load_contribution<T, kWhole>(problem, token, segment));
      });
      token = next;
      own = next_own;
    }
  }

 private:
  FE_DEVICE OneShot(const Arguments& arguments, const RowShare<kWhole>& share)
      : group_(arguments.group),
        problem_(arguments.problem),
        share_(share),
        link_(arguments.group),
        turn_(arguments.group) {}

  FE_DEVICE uint64_t offset(uint32_t token, uint32_t source, uint32_t segment,
                            uint32_t word) const {
    uint64_t slot = one_shot_slot(token, source, rank_count<kRanks>(group_));
    return turn_.buffer() + word_offset<T>(problem_.hidden, slot, segment, word);
  }

  // Sends this thread's part of a row; gives the last segment sent.
  FE_DEVICE Segment<T> send(uint32_t token) const {
    Segment<T> own{};
    for (uint32_t s = share_.first(); share_.contains(s); s = share_.next(s)) {
      if (!share_.has(s)) continue;
      own = load_contribution<T, kWhole>(problem_, token, s);
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) {
        link_.to_peers(offset(token, group_.rank, s, i), own.word[i]);
      }
    }
    return own;
  }

  FE_DEVICE Segment<T> reduce(uint32_t token, uint32_t segment, const Segment<T>& own) const {
    Segment<T> sum{};
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      sum.word[i] =
          reduce_word<T, kRanks, Link::kEchoes>(group_, link_, offset(token, 0, segment, i),
                                                slot_bytes<T>(problem_.hidden), own.word[i], token);
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

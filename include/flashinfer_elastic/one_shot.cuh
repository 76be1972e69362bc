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
    RowShare<kWhole> share(problem);
    RowTail<T, kWhole, kQuantized> tail(problem, share);
    OneShot op(arguments, share);
    Row row = op.row(hw::cluster_index());
    tail.aim(row.token);
    hw::wait_for_predecessor();
    hw::allow_successor();
    op.turn_.begin();
    Segment<T> own = op.send(row);
    op.turn_.pass_on();
    tail.prepare();
    if (tail.is_idle()) return;
    while (row.token < problem.tokens) {
      // The next row is on its way before this one is waited for, which keeps the links busy; and
      // rows are sent in the same order everywhere before anything is waited for, so no two ranks
      // can wait for each other.
      Row next = op.row(row.token + hw::cluster_count());
      Segment<T> next_own{};
      if (next.token < problem.tokens) next_own = op.send(next);
      tail.finish([&](uint32_t segment) {
        return op.reduce(
            row, segment,
            share.single() ? own : load_contribution<T, kWhole>(problem, row.input, segment));
      });
      row = next;
      own = next_own;
      tail.aim(row.token);
    }
  }

 private:
  // Where a token's row is: in the input, and from where on in a buffer.
  struct Row {
    uint32_t token;
    uint64_t input;
    uint64_t slots;
  };

  FE_DEVICE OneShot(const Arguments& arguments, const RowShare<kWhole>& share)
      : group_(arguments.group),
        problem_(arguments.problem),
        share_(share),
        link_(arguments.group),
        turn_(arguments.group) {}

  FE_DEVICE Row row(uint32_t token) const {
    uint64_t slot = one_shot_slot(token, 0, rank_count<kRanks>(group_));
    Row row{token, row_address<T>(problem_.input, token),
            word_offset<T>(problem_.hidden, slot, 0, 0)};
    hw::settle(row.input, row.slots);
    return row;
  }

  FE_DEVICE uint64_t offset(const Row& row, uint32_t source, uint32_t segment,
                            uint32_t word) const {
    return turn_.buffer() + row.slots + word_offset<T>(problem_.hidden, source, segment, word);
  }

  // Sends this thread's part of a row; gives the last segment sent.
  FE_DEVICE Segment<T> send(const Row& row) const {
    Segment<T> own{};
    share_.for_each([&](uint32_t s) {
      if (!share_.has(s)) return;
      own = load_contribution<T, kWhole>(problem_, row.input, s);
#pragma unroll
      for (uint32_t i = 0; i < T::kWords; ++i) {
        link_.to_peers(offset(row, group_.rank, s, i), own.word[i]);
      }
    });
    return own;
  }

  FE_DEVICE Segment<T> reduce(const Row& row, uint32_t segment, const Segment<T>& own) const {
    Segment<T> sum{};
#pragma unroll
    for (uint32_t i = 0; i < T::kWords; ++i) {
      sum.word[i] = reduce_word<T, kRanks, Link::kEchoes>(group_, link_, offset(row, 0, segment, i),
                                                          slot_bytes<T>(problem_.hidden),
                                                          own.word[i], row.token);
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

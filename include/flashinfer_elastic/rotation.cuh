// Which of the two Lamport buffers a call uses, and why two are enough.
//
// The thread that reads a word of its own rank's buffer makes it empty again at once (it alone
// reads that word). Let rank r be in call k, which uses buffer k % 2.
//
//  * A peer finishes call k only with r's contribution to it, so while r is in call k no peer is
//    past call k+1: peers store to buffer k % 2 (call k) and to the other one (call k+1).
//  * The other buffer was last used in call k-1. Every word sent to r in call k-1 was read, and
//    emptied, by r's kernel of call k-1, which had finished when r's kernel of call k began to
//    send. A peer is in call k+1 only after it received what r sent in call k. So it finds the
//    other buffer empty, and nothing r still has to empty lies in it.
//
// Emptying therefore never erases what a faster peer has sent, whatever the sizes of the calls,
// and no record of what is dirty is needed. Both steps rest on a kernel sending nothing before its
// predecessor on this workspace has finished (hw::wait_for_predecessor says what that asks of the
// kernels in between).
//
// The turn is counted in device memory, by the device, so eager calls and replays of captured
// graphs may follow each other in any order. Each block of a call adds its part of a turn once it
// has read the counter; all parts together are one turn, so as long as a block has not read the
// counter, it shows the turn in which the call began, whatever the others have added.
#pragma once

#include "arguments.h"
#include "platform.cuh"

namespace flashinfer_elastic {

class Turn {
 public:
  FE_DEVICE explicit Turn(const Group& group)
      : rotation_(reinterpret_cast<uint64_t>(group.rotation)), buffer_bytes_(group.buffer_bytes) {
    hw::settle(rotation_, buffer_bytes_);
  }

  // After wait_for_predecessor, and before the buffer is used.
  FE_DEVICE void begin() { odd_ = hw::load_state(&rotation()->turns) / kTurn % 2 != 0; }

  // Offset in bytes of the buffer in use.
  FE_DEVICE uint64_t buffer() const { return odd_ ? buffer_bytes_ : 0; }

  // Adds this block's part. All threads of the block call it once, after they have sent: the
  // address of what a thread sends depends on the turn, so it has been read by then.
  FE_DEVICE void pass_on() const {
    hw::sync_block();
    if (hw::thread_index() != 0) return;
    uint32_t blocks = hw::block_count();
    uint32_t part = kTurn / blocks;
    bool first = hw::block_in_cluster() == 0 && hw::cluster_index() == 0;
    hw::raise_state(&rotation()->turns, first ? part + kTurn % blocks : part);
  }

 private:
  FE_DEVICE Rotation* rotation() const { return reinterpret_cast<Rotation*>(rotation_); }

  uint64_t rotation_;
  uint64_t buffer_bytes_;
  bool odd_ = false;
};

}  // namespace flashinfer_elastic

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
// graphs may follow each other in any order.
#pragma once

#include "arguments.h"
#include "platform.cuh"

namespace flashinfer_elastic {

class Turn {
 public:
  FE_DEVICE explicit Turn(const Group& group)
      : rotation_(group.rotation), epoch_(hw::load_state(&group.rotation->epoch)) {
    buffer_ = (epoch_ & 1) * group.buffer_bytes;
  }

  // Offset in bytes of the buffer in use.
  FE_DEVICE uint64_t buffer() const { return buffer_; }

  // Hands the turn to the next call once every block has read the epoch. All threads of the block
  // call it once, after they have sent (the address of what a thread sends depends on the epoch, so
  // it has been read by then) and before they wait, so that the atomic's latency passes while data
  // is on its way.
  FE_DEVICE void pass_on() const {
    hw::sync_block();
    if (hw::thread_index() != 0) return;
    if (hw::add_state(&rotation_->arrived, 1) + 1 == hw::block_count()) {
      hw::store_state(&rotation_->arrived, 0);
      hw::store_state(&rotation_->epoch, epoch_ + 1);
    }
  }

 private:
  Rotation* rotation_;
  uint32_t epoch_;
  uint64_t buffer_;
};

}  // namespace flashinfer_elastic

// Every wait for another rank. Data is its own flag: a word has arrived once none of its four
// parts is the sentinel, whatever order the parts arrive in.
#pragma once

#include "arguments.h"
#include "platform.cuh"
#include "words.h"

namespace flashinfer_elastic {

// The clock is read once in so many turns, so that a wait that ends soon never reads it.
inline constexpr uint32_t kTurnsPerClockRead = 4096;
// In a trial more often: when one wait has timed out, those after it are to end soon.
inline constexpr uint32_t kTurnsPerClockReadOfTrial = 32;

FE_DEVICE bool has_arrived(Word4 w) {
  return w.x != kSentinel && w.y != kSentinel && w.z != kSentinel && w.w != kSentinel;
}

// What is waited for, for the message when it does not come.
struct Awaited {
  uint32_t peer;
  uint32_t token;
  const char* phase;
};

// `seen` is what a first load of `slot` gave; callers issue several before they wait for any.
//
// Where `kMayGiveUp` and the group says so, a wait that times out returns what is there, and so do
// all waits after it, soon; `Rotation::expired` then tells that the results are worth nothing.
template <bool kMayGiveUp>
FE_DEVICE Word4 wait_for_word(const Group& group, const Word4* slot, Word4 seen, Awaited what) {
  uint32_t turns = 0;
  uint64_t since = 0;
  while (!has_arrived(seen)) {
    hw::pause();
    seen = hw::load_shared_by_ranks(slot);
    bool gives_up = kMayGiveUp && group.gives_up;
    if (++turns < (gives_up ? kTurnsPerClockReadOfTrial : kTurnsPerClockRead)) continue;
    turns = 0;
    if (group.timeout_ns == 0) continue;
    if (gives_up && hw::load_state(&group.rotation->expired) != 0) return seen;
    uint64_t now = hw::nanoseconds();
    if (since == 0) {
      since = now;
    } else if (now - since > group.timeout_ns) {
      bool first = hw::add_state(&group.rotation->expired, 1) == 0;
      if (gives_up) return seen;
      hw::fail_wait(first, group.rank, what.peer, what.phase, what.token, now - since);
    }
  }
  return seen;
}

}  // namespace flashinfer_elastic

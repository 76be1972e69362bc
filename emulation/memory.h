// Accesses to the ranks' Lamport buffers, each checked against the protocol: a word is sent only
// where there is none, made empty only once it is there, and read or emptied by its own rank alone.
//
// A vector of four words moves as four relaxed accesses. With random delays they come in random
// order and with other ranks' accesses between them, because no device promises more.
#pragma once

#include <cstdint>

#include "flashinfer_elastic/words.h"

namespace flashinfer_elastic::emulation {

Word4 load_word(const Word4* address);
void send_word(Word4* address, Word4 value);
// `address` is the fabric's multicast one. The ranks get the word one after the other.
void send_word_to_all(uint64_t address, Word4 value);
void reset_word(Word4* address);

}  // namespace flashinfer_elastic::emulation

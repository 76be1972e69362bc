// Every inline-assembly line and every intrinsic the kernels use, and nothing else.
#pragma once

#include <cstdint>
#include <cstdio>

#include "words.h"

#define FE_DEVICE __device__ __forceinline__
#define FE_COLD inline __device__ __noinline__
#define FE_SHARED __host__ __device__  // arithmetic that the host needs too

namespace flashinfer_elastic::hw {

// ---- who am I ----

FE_DEVICE uint32_t thread_index() { return threadIdx.x; }
FE_DEVICE uint32_t thread_count() { return blockDim.x; }
// A grid has a row of blocks for each cluster.
FE_DEVICE uint32_t cluster_size() { return gridDim.x; }
FE_DEVICE uint32_t block_in_cluster() { return blockIdx.x; }
FE_DEVICE uint32_t cluster_index() { return blockIdx.y; }
FE_DEVICE uint32_t cluster_count() { return gridDim.y; }
FE_DEVICE uint32_t block_count() { return gridDim.x * gridDim.y; }

// Has values ready from here on. The compiler computes an address or reads an argument where it is
// used; on the way from the data's arrival to the result that costs time, before it there is
// plenty. What makes it is a branch that is never taken: no address and no size has all bits set.
FE_DEVICE void settle(uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.eq.u64 p, %0, -1;\n"
      "@p trap;\n"
      "}" ::"l"(a | b | c));
}

// ---- barriers and shuffles ----

FE_DEVICE void sync_block() { __syncthreads(); }

// Split barrier of all threads of a cluster: after `wait`, every block has started and has opened
// its mailboxes. It orders no other memory: a fence here would wait for stores to other ranks.
FE_DEVICE void cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
FE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Orders what the lanes of a warp did to memory, which a shuffle does not. All 32 take part.
FE_DEVICE void sync_warp() { __syncwarp(); }

// All 32 lanes take part.
FE_DEVICE float shuffle_xor(float value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// ---- shared memory ----

using SharedPlace = uint32_t;  // in bytes, of this block's shared memory

// 16-byte aligned. In a cluster the compiler would work the address out anew for every access; it
// does not see through a shuffle.
FE_DEVICE SharedPlace shared_memory() {
  extern __shared__ uint4 storage[];
  return __shfl_sync(0xffffffffu, static_cast<uint32_t>(__cvta_generic_to_shared(storage)), 0);
}

// At a multiple of 16 bytes.
FE_DEVICE Float4 load_shared(SharedPlace place) {
  Float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place)
               : "memory");
  return v;
}
FE_DEVICE void store_shared(SharedPlace place, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(value) : "memory");
}

// A mailbox counts the floats that the blocks of a cluster drop into this block's shared memory, in
// phases. The floats of a phase are visible to who has waited for it. A float carries its own
// signal, so nothing waits for other stores that its sender has under way.
inline constexpr uint32_t kMailboxBytes = 8;

// By one thread, before cluster_arrive.
FE_DEVICE void open(SharedPlace box) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(box) : "memory");
}

// By one thread of the receiving block, once for each phase; floats may come before it.
FE_DEVICE void expect(SharedPlace box, uint32_t floats) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(box),
               "r"(floats * 4)
               : "memory");
}

// Drops a float at the same place of block `block`, into its mailbox at the same place.
FE_DEVICE void post(SharedPlace box, SharedPlace place, uint32_t block, float value) {
  uint32_t remote_place, remote_box;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_place) : "r"(place), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_box) : "r"(box), "r"(block));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          remote_place),
      "r"(__float_as_uint(value)), "r"(remote_box)
      : "memory");
}

// `parity` is 0 for a mailbox's first phase, 1 for its second, and so on.
FE_DEVICE void wait(SharedPlace box, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(box), "r"(parity)
        : "memory");
  } while (done == 0);
}

// ---- programmatic dependent launch ----

// Returns once every earlier kernel of the stream has finished and its writes are visible;
// provided that those launched as dependent kernels wait for their predecessors too, others' as
// well as ours.
FE_DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel be scheduled. Says nothing about this kernel's results.
FE_DEVICE void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- memory that ranks share: never cached in L1, no ordering beyond the word itself ----

FE_DEVICE Word4 load_shared_by_ranks(const Word4* address) {
  Word4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

FE_DEVICE void store_shared_by_ranks(Word4* address, Word4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// `address` is a multicast one, for which only multimem instructions are defined.
FE_DEVICE void store_to_all_ranks(uint64_t address, Word4 v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
               "f"(__uint_as_float(v.w))
               : "memory");
}

// Makes a word that was just read empty again. Same thread and address as the load before it,
// which is all the order it needs.
FE_DEVICE void reset_shared_by_ranks(Word4* address) {
  store_shared_by_ranks(address, Word4{kSentinel, kSentinel, kSentinel, kSentinel});
}

// ---- this rank's own device memory ----

FE_DEVICE uint32_t load_state(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Orders nothing: a fence would wait for stores to other ranks.
FE_DEVICE void raise_state(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// The same, and waits for the value before.
FE_DEVICE uint32_t add_state(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// Brings a line near; a value that is needed only after a wait then costs no register meanwhile.
FE_DEVICE void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

FE_DEVICE Word4 load_global(const Word4* address) {
  Word4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

FE_DEVICE void store_global(Word4* address, Word4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

FE_DEVICE uint32_t load_global(const uint32_t* address) { return *address; }
FE_DEVICE void store_global(uint32_t* address, uint32_t value) { *address = value; }
FE_DEVICE uint16_t load_global(const uint16_t* address) { return *address; }
FE_DEVICE void store_global(uint16_t* address, uint16_t value) { *address = value; }
FE_DEVICE void store_global(uint64_t* address, uint64_t value) { *address = value; }
FE_DEVICE void store_global(uint8_t* address, uint8_t value) { *address = value; }

// ---- arithmetic: IEEE round to nearest even, never contracted ----

FE_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
FE_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
FE_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FE_DEVICE float reciprocal_sqrt(float a) { return __frsqrt_rn(a); }
FE_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
// The number where the other is NaN.
FE_DEVICE float minimum(float a, float b) { return fminf(a, b); }
FE_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }

FE_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
FE_DEVICE uint32_t bits_of_float(float value) { return __float_as_uint(value); }

FE_DEVICE float float_of_half(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Sums of pairs, each rounded once to its 16 bits; subnormals included. NaNs become 0x7fff.
FE_DEVICE uint32_t half2_add(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

FE_DEVICE uint32_t bfloat2_add(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// Two floats rounded and packed, the first in the low half.
FE_DEVICE uint32_t half2_of_floats(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

FE_DEVICE uint32_t bfloat2_of_floats(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// e4m3 saturates to the largest number, infinities too; NaN stays NaN. The first in the low byte.
FE_DEVICE uint32_t e4m3x2_of_floats(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

FE_DEVICE float float_of_e4m3(uint32_t byte) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(byte)));
  return float_of_half(static_cast<uint16_t>(halves));
}

// ---- time and failure ----

FE_DEVICE uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Called in every turn of a spinning wait.
FE_DEVICE void pause() {}

// Ends the kernel. Thousands of threads may wait in vain at the same time; only the `first` says
// so, and the others leave it the time to.
[[noreturn]] FE_COLD void fail_wait(bool first, uint32_t rank, uint32_t peer, const char* phase,
                                    uint32_t token, uint64_t waited_ns) {
  if (first) {
    printf(
        "flashinfer.elastic: rank %u waited %llu ms for %s of rank %u, token %u: that rank has "
        "died, hangs, or made a different sequence of calls on this workspace\n",
        rank, static_cast<unsigned long long>(waited_ns / 1000000u), phase, peer, token);
  } else {
    constexpr uint64_t kGraceNs = 100000000u;
    for (uint64_t since = nanoseconds(); nanoseconds() - since < kGraceNs;) __nanosleep(1000000);
  }
  __trap();
  __builtin_unreachable();
}

}  // namespace flashinfer_elastic::hw

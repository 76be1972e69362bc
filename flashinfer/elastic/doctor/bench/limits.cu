// What the hardware allows: kernels that only move bytes, only pass a flag, or do nothing.
//
// Compiled at run time with NVRTC, hence without headers.

namespace {

__device__ __forceinline__ void StoreToPeer(uint4* address, uint4 word) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word.x),
               "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ __forceinline__ void StoreFlag(unsigned* address, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned LoadFlag(const unsigned* address) {
  unsigned value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ unsigned long long Nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Lets the next launch of a chain be scheduled, then waits until the one before has finished. Both
// do nothing in a launch that is not a dependent one.
__device__ __forceinline__ void EnterChain() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

constexpr int kInFlight = 4;

// Calls visit(index, word) for every word of the source, with several loads in flight.
template <typename Visit>
__device__ __forceinline__ void ForEachWord(const uint4* source, long long words, Visit visit) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long start = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (long long first = start; first < words; first += kInFlight * stride) {
    uint4 loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * stride < words) loaded[k] = source[first + k * stride];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * stride < words) visit(first + k * stride, loaded[k]);
    }
  }
}

}  // namespace

// Every peer receives every word: what one-shot sends.
extern "C" __global__ void push_to_all(uint4* const* destinations, int peers, const uint4* source,
                                       long long words) {
  EnterChain();
  ForEachWord(source, words, [&](long long index, uint4 word) {
    for (int peer = 0; peer < peers; ++peer) StoreToPeer(destinations[peer] + index, word);
  });
}

// Every word goes to one peer, each of which receives an equal share: what a stage of two-shot
// sends.
extern "C" __global__ void push_shares(uint4* const* destinations, int peers, const uint4* source,
                                       long long words) {
  EnterChain();
  const long long share = (words + peers - 1) / peers;
  ForEachWord(source, words, [&](long long index, uint4 word) {
    StoreToPeer(destinations[index / share] + index, word);
  });
}

// An empty launch of a chain.
extern "C" __global__ void do_nothing() { EnterChain(); }

// Two GPUs pass a flag to and fro. elapsed_ns receives the time of the turns that follow the
// warm-up, or 0 when the other GPU kept this one waiting for longer than timeout_ns.
extern "C" __global__ void pass_flag(unsigned* mine, unsigned* theirs, int serves, unsigned warm_up,
                                     unsigned turns, unsigned long long timeout_ns,
                                     unsigned long long* elapsed_ns) {
  const unsigned long long entered = Nanoseconds();
  unsigned long long start = entered;
  for (unsigned turn = 1; turn <= warm_up + turns; ++turn) {
    if (turn == warm_up + 1) start = Nanoseconds();
    if (serves) StoreFlag(theirs, turn);
    while (LoadFlag(mine) < turn) {
      if (Nanoseconds() - entered > timeout_ns) {
        *elapsed_ns = 0;
        return;
      }
    }
    if (!serves) StoreFlag(theirs, turn);
  }
  *elapsed_ns = Nanoseconds() - start;
}

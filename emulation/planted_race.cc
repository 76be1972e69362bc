#include "flashinfer_elastic/platform.cuh"
#include "kernels.h"

namespace flashinfer_elastic::emulation {
namespace {

template <bool kBarrier>
void pass_a_number(const Arguments& arguments) {
  hw::SharedPlace place = hw::shared_memory();
  if (hw::thread_index() == 0) hw::store_shared(place, 1.0f);
  if (kBarrier) hw::sync_block();
  if (hw::thread_index() == 1) {
    auto* output = reinterpret_cast<uint32_t*>(arguments.problem.output.address);
    hw::store_global(output, hw::bits_of_float(hw::load_shared(place).x));
  }
}

}  // namespace

Kernel planted_race_kernel(bool with_barrier) {
  return with_barrier ? pass_a_number<true> : pass_a_number<false>;
}

}  // namespace flashinfer_elastic::emulation

#include "launch.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "flashinfer_elastic/launch_shape.h"
#include "flashinfer_elastic/layout.cuh"
#include "flashinfer_elastic/row_tail.cuh"
#include "kernels.h"

namespace flashinfer_elastic {
namespace {

// What every block may use without asking; beyond it a kernel needs an attribute set.
constexpr uint32_t kPlainSharedBytes = 48 * 1024;

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("flashinfer.elastic: ") + what + ": " +
                             cudaGetErrorString(status));
  }
}

// Puts the caller's device back on leaving.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

Kernel find_kernel(Strategy strategy, ElementType type, uint32_t ranks, Variant variant) {
  bool one_shot = strategy == Strategy::kOneShot;
  switch (type) {
    case ElementType::kFloat16:
      return one_shot ? one_shot_float16(ranks, variant) : two_shot_float16(ranks, variant);
    case ElementType::kBFloat16:
      return one_shot ? one_shot_bfloat16(ranks, variant) : two_shot_bfloat16(ranks, variant);
    case ElementType::kFloat32:
      return one_shot ? one_shot_float32(ranks, variant) : two_shot_float32(ranks, variant);
  }
  throw std::invalid_argument("unknown element type");
}

bool is_quantized(const Problem& problem) { return problem.quantization.recipe != Recipe::kNone; }

// Kernels load when they are first used, which may wait for kernels that run, and those may wait
// for a rank that is loading. So a group's kernels are loaded when it is made.
void load_kernels(uint32_t ranks, bool multicast) {
  for (Strategy strategy : {Strategy::kOneShot, Strategy::kTwoShot}) {
    for (ElementType type :
         {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32}) {
      for (bool whole : {false, true}) {
        for (bool quantized : {false, true}) {
          cudaFuncAttributes attributes;
          Kernel kernel = find_kernel(strategy, type, ranks, {whole, quantized, multicast});
          check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
                "loading a kernel");
        }
      }
    }
  }
}

bool rows_are_whole(const Problem& problem) {
  bool whole =
      problem.hidden % kSegmentElements == 0 && problem.input.vectors && problem.output.vectors;
  if (!problem.normalize) return whole;
  return whole && problem.residual_in.vectors && problem.residual_out.vectors &&
         problem.gamma_vectors && (!is_quantized(problem) || problem.quantization.vectors);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

bool SizeClasses::contain(Strategy strategy, uint64_t payload_bytes) const {
  uint64_t classes = strategy == Strategy::kOneShot ? one_shot : two_shot;
  if (classes == 0 || payload_bytes == 0) return false;
  int digits = 64 - __builtin_clzll(payload_bytes);
  return (classes >> digits & 1) != 0;
}

Context::Context(const Group& group, uint32_t multiprocessors, int device)
    : group_(group), multiprocessors_(multiprocessors), device_(device) {
  DeviceGuard guard(device);
  load_kernels(group.ranks, false);
  if (group.multicast != 0) load_kernels(group.ranks, true);
  check(cudaEventCreateWithFlags(&order_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

Context::~Context() {
  // At exit the driver may be gone already; there is nothing left to release then.
  if (order_ != nullptr) cudaEventDestroy(order_);
}

void Context::choose_multicast(SizeClasses classes) {
  if (group_.multicast == 0 && (classes.one_shot | classes.two_shot) != 0) {
    throw std::invalid_argument("the group has no multicast address");
  }
  multicast_ = classes;
}

uint32_t Context::expired_waits() const {
  DeviceGuard guard(device_);
  uint32_t count = 0;
  check(cudaMemcpy(&count, &group_.rotation->expired, sizeof(count), cudaMemcpyDeviceToHost),
        "reading how many waits timed out");
  return count;
}

// Calls on one workspace must not overlap. Within a stream they never do; when the stream changes
// the new one waits for the last. Captured calls are ordered by their graph alone.
void Context::follow_last_stream(cudaStream_t stream) {
  if (used_ && stream == last_stream_) return;
  if (is_capturing(stream)) return;
  if (used_ && !is_capturing(last_stream_)) {
    check(cudaEventRecord(order_, last_stream_), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, order_, 0), "cudaStreamWaitEvent");
  }
  last_stream_ = stream;
  used_ = true;
}

void Context::launch(Strategy strategy, ElementType type, const Problem& problem,
                     bool dependent_launch, cudaStream_t stream) {
  if (problem.tokens == 0 || problem.hidden == 0) return;
  uint64_t needed = required_bytes(strategy, type, problem.tokens, problem.hidden, group_.ranks);
  if (needed > group_.buffer_bytes) {
    throw std::invalid_argument("the call needs " + std::to_string(needed) +
                                " bytes of a buffer of " + std::to_string(group_.buffer_bytes));
  }
  DeviceGuard guard(device_);
  // Ranks whose tensors are aligned differently take different kernels in grids of the same shape.
  LaunchShape shape =
      launch_shape(strategy, problem.tokens, problem.hidden, group_.ranks, multiprocessors_);
  bool whole = rows_are_whole(problem) && one_segment_a_thread(shape, problem.hidden);
  uint64_t payload = static_cast<uint64_t>(problem.tokens) * problem.hidden * element_bytes(type);
  Variant variant{whole, is_quantized(problem), multicast_.contain(strategy, payload)};
  Kernel kernel = find_kernel(strategy, type, group_.ranks, variant);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.cluster, shape.clusters);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = problem.normalize ? row_tail_shared_bytes(problem.hidden) : 0;
  config.stream = stream;
  if (config.dynamicSmemBytes > kPlainSharedBytes) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.dynamicSmemBytes)),
          "the hidden size is too large for shared memory");
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = shape.cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = dependent_launch ? 2 : 1;

  follow_last_stream(stream);
  Arguments arguments{group_, problem};
  arguments.problem.block_segments = block_segments(shape, problem.hidden);
  arguments.problem.sharing_blocks = sharing_blocks(shape, problem.hidden);
  check(cudaLaunchKernelEx(&config, kernel, arguments), "launch");
}

}  // namespace flashinfer_elastic

// What Python sees, through tvm-ffi. Tensors are checked here, before anything is launched, in one
// place for all entry points; every check depends on what all ranks share, or raises on the one
// rank whose tensor is wrong before it takes its turn.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "flashinfer_elastic/arguments.h"
#include "flashinfer_elastic/quantize.cuh"
#include "launch.h"

namespace flashinfer_elastic {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

std::string name_of(DLDataType type) {
  switch (type.code) {
    case kDLFloat:
      return "float" + std::to_string(type.bits);
    case kDLBfloat:
      return "bfloat" + std::to_string(type.bits);
    case kDLInt:
      return "int" + std::to_string(type.bits);
    case kDLUInt:
      return "uint" + std::to_string(type.bits);
    default:
      return "type code " + std::to_string(type.code) + " of " + std::to_string(type.bits) +
             " bits";
  }
}

std::string name_of(DLDevice device) {
  std::string kind = device.device_type == kDLCUDA  ? "cuda"
                     : device.device_type == kDLCPU ? "cpu"
                                                    : std::to_string(device.device_type);
  return kind + ":" + std::to_string(device.device_id);
}

bool is(DLDataType type, uint8_t code, uint8_t bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}

ElementType element_type(const TensorView& input) {
  DLDataType type = input.dtype();
  if (is(type, kDLFloat, 16)) return ElementType::kFloat16;
  if (is(type, kDLBfloat, 16)) return ElementType::kBFloat16;
  if (is(type, kDLFloat, 32)) return ElementType::kFloat32;
  TVM_FFI_THROW(ValueError) << "input has dtype " << name_of(type)
                            << "; float16, bfloat16 and float32 are supported";
  TVM_FFI_UNREACHABLE();
}

void check_device(const char* name, const TensorView& tensor, int device) {
  DLDevice got = tensor.device();
  if (got.device_type != kDLCUDA || got.device_id != device) {
    TVM_FFI_THROW(ValueError) << name << " must be on cuda:" << device
                              << ", the workspace's device, got " << name_of(got) << ".";
  }
}

void check_dtype(const char* name, const TensorView& tensor, DLDataType expected) {
  DLDataType got = tensor.dtype();
  if (!is(got, expected.code, expected.bits)) {
    TVM_FFI_THROW(ValueError) << name << " has dtype " << name_of(got) << ", expected "
                              << name_of(expected) << ", that of input";
  }
}

uint64_t address_of(const TensorView& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data_ptr()) + tensor.byte_offset();
}

bool on_vector(uint64_t value) { return value % 16 == 0; }

// Checks a matrix against the shape, dtype and device of the input, and describes it.
Rows rows_of(const char* name, const TensorView& tensor, const TensorView& input, int device,
             bool written) {
  if (tensor.ndim() != 2 || tensor.size(0) != input.size(0) || tensor.size(1) != input.size(1)) {
    std::ostringstream got;
    for (int i = 0; i < tensor.ndim(); ++i) got << (i != 0 ? ", " : "") << tensor.size(i);
    TVM_FFI_THROW(ValueError) << name << " shape mismatch: expected (" << input.size(0) << ", "
                              << input.size(1) << ") but got (" << got.str() << ")";
  }
  check_dtype(name, tensor, input.dtype());
  check_device(name, tensor, device);
  int64_t tokens = tensor.size(0), hidden = tensor.size(1);
  int64_t stride = tokens > 1 ? tensor.stride(0) : hidden;
  if (hidden > 1 && tensor.stride(1) != 1) {
    TVM_FFI_THROW(ValueError) << name << " must have dense rows, got a stride of "
                              << tensor.stride(1) << " elements within a row";
  }
  if (written && stride < hidden) {
    TVM_FFI_THROW(ValueError) << name
                              << " is written, so its rows must not overlap; got a stride of "
                              << stride << " elements between rows of " << hidden;
  }
  uint64_t address = address_of(tensor);
  int64_t bytes = (tensor.dtype().bits + 7) / 8;
  bool vectors = on_vector(address) && (tokens <= 1 || on_vector(stride * bytes));
  return {address, stride, vectors};
}

Rows skip_rows(Rows rows, int64_t first, uint32_t element_bytes) {
  rows.address += first * rows.stride * element_bytes;
  return rows;
}

// `multicast` is where a store reaches the buffers of all ranks, or 0. A context that `gives_up` is
// for a trial of multicast: its waits over it end at the time-out without a trap.
int64_t context_create(int64_t rank, Array<int64_t> memory, int64_t multicast, int64_t buffer_bytes,
                       int64_t rotation, double timeout_s, bool gives_up, int64_t multiprocessors,
                       int64_t device) {
  Group group = {};
  group.rank = static_cast<uint32_t>(rank);
  group.ranks = static_cast<uint32_t>(memory.size());
  if (memory.size() < 1 || memory.size() > kMaxRanks || rank < 0 || group.rank >= group.ranks) {
    TVM_FFI_THROW(ValueError) << "rank " << rank << " of " << memory.size() << ": groups of 1 to "
                              << kMaxRanks << " ranks are supported";
  }
  if (!on_vector(static_cast<uint64_t>(multicast))) {
    TVM_FFI_THROW(ValueError) << "the multicast address " << multicast
                              << " is not a multiple of 16";
  }
  group.multicast = static_cast<uint64_t>(multicast);
  group.gives_up = gives_up;
  group.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  group.buffer_bytes = static_cast<uint64_t>(buffer_bytes);
  group.rotation = reinterpret_cast<Rotation*>(rotation);
  for (uint32_t i = 0; i < group.ranks; ++i) {
    group.memory[i] = static_cast<uint64_t>(memory[(group.rank + i) % group.ranks]);
  }
  auto context = std::make_unique<Context>(group, static_cast<uint32_t>(multiprocessors),
                                           static_cast<int>(device));
  return reinterpret_cast<int64_t>(context.release());
}

void context_destroy(int64_t context) { delete reinterpret_cast<Context*>(context); }

// Bit c of a mask stands for launches of 2^(c-1) to 2^c - 1 bytes of rows on each rank, which go by
// multicast from now on.
void context_choose_multicast(int64_t context, int64_t one_shot, int64_t two_shot) {
  try {
    reinterpret_cast<Context*>(context)->choose_multicast(
        {static_cast<uint64_t>(one_shot), static_cast<uint64_t>(two_shot)});
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
}

int64_t context_expired_waits(int64_t context) {
  try {
    return reinterpret_cast<Context*>(context)->expired_waits();
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
  TVM_FFI_UNREACHABLE();
}

// What all calls say of tokens [first, first + count), but for `output`.
Problem problem_of(const Context& context, int64_t first, int64_t count, const TensorView& input,
                   const Optional<TensorView>& residual_in,
                   const Optional<TensorView>& residual_out, const Optional<TensorView>& gamma,
                   double epsilon, double weight_bias) {
  int device = context.device();
  uint32_t bytes = element_bytes(element_type(input));
  int64_t hidden = input.size(1);
  Problem problem = {};
  problem.tokens = static_cast<uint32_t>(count);
  problem.hidden = static_cast<uint32_t>(hidden);
  problem.input = skip_rows(rows_of("input", input, input, device, false), first, bytes);
  problem.normalize = gamma.has_value();
  if (!problem.normalize) return problem;
  if (!residual_in.has_value() || !residual_out.has_value()) {
    TVM_FFI_THROW(ValueError) << "residual_in and residual_out must be provided with gamma";
  }
  Rows before = rows_of("residual_in", residual_in.value(), input, device, false);
  Rows after = rows_of("residual_out", residual_out.value(), input, device, true);
  TensorView weight = gamma.value();
  if (weight.numel() != hidden || !weight.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "gamma must be dense and have the same shape as token dimension ("
                              << hidden << ") but got (" << weight.numel() << ")";
  }
  problem.gamma_float32 = is(weight.dtype(), kDLFloat, 32);
  if (!problem.gamma_float32) check_dtype("gamma", weight, input.dtype());
  check_device("gamma", weight, device);
  problem.residual_in = skip_rows(before, first, bytes);
  problem.residual_out = skip_rows(after, first, bytes);
  problem.gamma = address_of(weight);
  problem.gamma_vectors = on_vector(problem.gamma);
  problem.inverse_hidden = 1.0f / static_cast<float>(hidden);
  problem.epsilon = static_cast<float>(epsilon);
  problem.weight_bias = static_cast<float>(weight_bias);
  return problem;
}

// Describes where the sum or the norm's output goes.
void set_output(Problem& problem, int64_t first, const TensorView& output, const TensorView& input,
                int device) {
  Rows rows = rows_of("output", output, input, device, true);
  problem.output = skip_rows(rows, first, element_bytes(element_type(input)));
  if (problem.normalize && problem.output.address == problem.residual_out.address &&
      problem.tokens > 0) {
    TVM_FFI_THROW(ValueError) << "output and residual_out must be different tensors";
  }
}

void launch(Context& context, int64_t strategy, const TensorView& input, const Problem& problem,
            bool dependent_launch) {
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, context.device()));
  try {
    context.launch(static_cast<Strategy>(strategy), element_type(input), problem, dependent_launch,
                   stream);
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (const std::runtime_error& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

// Tokens [first, first + count) of one call. Without gamma: all-reduce into `output`. With it:
// residual_out = sum + residual_in, output = RMSNorm(residual_out).
void allreduce(int64_t handle, int64_t strategy, int64_t first, int64_t count,
               bool dependent_launch, TensorView input, TensorView output,
               Optional<TensorView> residual_in, Optional<TensorView> residual_out,
               Optional<TensorView> gamma, double epsilon, double weight_bias) {
  Context& context = *reinterpret_cast<Context*>(handle);
  Problem problem = problem_of(context, first, count, input, residual_in, residual_out, gamma,
                               epsilon, weight_bias);
  set_output(problem, first, output, input, context.device());
  launch(context, strategy, input, problem, dependent_launch);
}

// Codes of one byte each: e4m3, or pairs of e2m1, whatever the dtype calls them.
void set_values(Quantization& quantization, int64_t first, const TensorView& values,
                const TensorView& input, int device) {
  int64_t tokens = input.size(0);
  int64_t width = input.size(1) / (quantization.recipe == Recipe::kNvFloat4 ? 2 : 1);
  if (values.ndim() != 2 || values.size(0) != tokens || values.size(1) != width) {
    TVM_FFI_THROW(ValueError) << "quant_out must have the shape (" << tokens << ", " << width
                              << ")";
  }
  if (values.dtype().bits * values.dtype().lanes != 8) {
    TVM_FFI_THROW(ValueError) << "quant_out must have elements of one byte, got "
                              << name_of(values.dtype());
  }
  check_device("quant_out", values, device);
  int64_t stride = tokens > 1 ? values.stride(0) : width;
  if ((width > 1 && values.stride(1) != 1) || stride < width) {
    TVM_FFI_THROW(ValueError) << "quant_out must have dense rows that do not overlap, got strides ("
                              << values.stride(0) << ", " << values.stride(1) << ")";
  }
  quantization.stride = stride;
  quantization.vectors = address_of(values) % 8 == 0 && stride % 8 == 0;
  quantization.values = address_of(values) + static_cast<uint64_t>(first * stride);
}

// One float a row, or one byte a block.
void set_scales(Quantization& quantization, const Optional<TensorView>& scales,
                const TensorView& input, int device) {
  if (quantization.recipe == Recipe::kFloat8) return;
  if (!scales.has_value()) TVM_FFI_THROW(ValueError) << "scale_out must be provided";
  TensorView tensor = scales.value();
  int64_t tokens = input.size(0), hidden = input.size(1);
  int64_t needed = tokens, bits = 32;
  if (uint32_t block = scale_block(quantization.recipe); block != 0) {
    bits = 8;
    if (hidden % block != 0) {
      TVM_FFI_THROW(ValueError) << "the hidden dimension must be divisible by " << block << ", got "
                                << hidden;
    }
    int64_t blocks = hidden / block;
    needed = quantization.layout == ScaleLayout::kLinear
                 ? tokens * blocks
                 : (tokens + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
  }
  if (tensor.numel() < needed || tensor.dtype().bits * tensor.dtype().lanes != bits ||
      !tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "scale_out must be contiguous and have " << needed
                              << " elements of " << bits << " bits or more, got " << tensor.numel()
                              << " of " << name_of(tensor.dtype());
  }
  check_device("scale_out", tensor, device);
  quantization.scales = address_of(tensor);
}

// As `allreduce` with gamma, and `values` and `scales` are a quantised copy of the norm's output,
// which itself need not be wanted. The recipe's scale is `scale_tensor`'s first element, or
// `scale`.
void allreduce_quantized(int64_t handle, int64_t strategy, int64_t first, int64_t count,
                         bool dependent_launch, TensorView input, Optional<TensorView> output,
                         TensorView residual_in, TensorView residual_out, TensorView gamma,
                         double epsilon, double weight_bias, int64_t recipe, int64_t layout,
                         TensorView values, Optional<TensorView> scales, double scale,
                         Optional<TensorView> scale_tensor) {
  Context& context = *reinterpret_cast<Context*>(handle);
  int device = context.device();
  Problem problem = problem_of(context, first, count, input, residual_in, residual_out, gamma,
                               epsilon, weight_bias);
  if (output.has_value()) {
    set_output(problem, first, output.value(), input, device);
  } else {
    problem.output.vectors = true;
  }
  if (recipe < static_cast<int64_t>(Recipe::kFloat8) ||
      recipe > static_cast<int64_t>(Recipe::kMxFloat8)) {
    TVM_FFI_THROW(ValueError) << "unknown quantisation " << recipe;
  }
  Quantization& quantization = problem.quantization;
  quantization.recipe = static_cast<Recipe>(recipe);
  quantization.layout = static_cast<ScaleLayout>(layout);
  if (quantization.layout != ScaleLayout::kLinear &&
      quantization.layout != ScaleLayout::kSwizzled128x4) {
    TVM_FFI_THROW(ValueError) << "unknown scale layout " << layout;
  }
  quantization.first_row = static_cast<uint32_t>(first);
  set_values(quantization, first, values, input, device);
  set_scales(quantization, scales, input, device);
  quantization.scale = static_cast<float>(scale);
  if (scale_tensor.has_value()) {
    TensorView tensor = scale_tensor.value();
    check_device("output_scale", tensor, device);
    if (!is(tensor.dtype(), kDLFloat, 32) || tensor.numel() < 1) {
      TVM_FFI_THROW(ValueError) << "output_scale must have a float32 element, got "
                                << tensor.numel() << " of " << name_of(tensor.dtype());
    }
    quantization.scale_address = address_of(tensor);
  }
  launch(context, strategy, input, problem, dependent_launch);
}

// {"archs": [90, 100], "cuda": "13.0"}: what this library was compiled for, and with.
tvm::ffi::String build_info() {
  std::ostringstream text;
  text << "{\"archs\": [" << FLASHINFER_ELASTIC_ARCHS << "], \"cuda\": \"" << CUDART_VERSION / 1000
       << "." << CUDART_VERSION % 1000 / 10 << "\"}";
  return text.str();
}

}  // namespace
}  // namespace flashinfer_elastic

TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_context_create, flashinfer_elastic::context_create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_context_destroy, flashinfer_elastic::context_destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_context_choose_multicast,
                              flashinfer_elastic::context_choose_multicast);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_context_expired_waits,
                              flashinfer_elastic::context_expired_waits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_allreduce, flashinfer_elastic::allreduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_allreduce_quantized, flashinfer_elastic::allreduce_quantized);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(elastic_build_info, flashinfer_elastic::build_info);

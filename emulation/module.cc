// The Python module. Arrays are numpy's: float32 as uint32 or float32, the 16-bit types as uint16
// bits. Arrays are used where they lie, so their strides and alignment are what a kernel sees.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "flashinfer_elastic/layout.cuh"
#include "flashinfer_elastic/platform.cuh"
#include "flashinfer_elastic/quantize.cuh"
#include "group.h"

namespace py = pybind11;

namespace flashinfer_elastic::emulation {
namespace {

using Arrays = std::vector<py::array>;

// A call and the arrays it works on.
struct BoundCall {
  Call call;
  std::vector<Arrays> keep_alive;
};

bool is_vector_aligned(uint64_t address) { return address % sizeof(Word4) == 0; }

Rows rows_of(const py::array& array, ElementType type, py::ssize_t tokens, py::ssize_t hidden,
             bool written) {
  py::ssize_t bytes = element_bytes(type);
  if (array.ndim() != 2 || array.itemsize() != bytes || array.shape(0) != tokens ||
      array.shape(1) != hidden) {
    throw std::invalid_argument("an array has the wrong shape or element size");
  }
  if (hidden > 1 && array.strides(1) != bytes) {
    throw std::invalid_argument("rows must be dense");
  }
  if (array.strides(0) % bytes != 0) throw std::invalid_argument("rows start between elements");
  if (written && !array.writeable()) throw std::invalid_argument("an output is read-only");
  auto address = reinterpret_cast<uint64_t>(array.data());
  bool vectors = is_vector_aligned(address) &&
                 (tokens <= 1 || is_vector_aligned(static_cast<uint64_t>(array.strides(0))));
  return {address, static_cast<int64_t>(array.strides(0) / bytes), vectors};
}

// One rank's quantised copy: how, into what arrays, and what its scale is.
struct Quantize {
  Recipe recipe;
  ScaleLayout layout;
  uint32_t first_row;
  Arrays values;
  std::optional<Arrays> scales;  // whole, whatever the chunk
  float scale;
  std::optional<py::array> scale_array;
};

Quantization quantization_of(const Quantize& q, size_t rank, py::ssize_t tokens,
                             py::ssize_t hidden) {
  Quantization result{};
  const py::array& values = q.values.at(rank);
  py::ssize_t width = q.recipe == Recipe::kNvFloat4 ? hidden / 2 : hidden;
  uint32_t block = scale_block(q.recipe);
  if (values.ndim() != 2 || values.itemsize() != 1 || values.shape(0) != tokens ||
      values.shape(1) != width || (width > 1 && values.strides(1) != 1) ||
      (block != 0 && hidden % block != 0) ||
      (q.recipe != Recipe::kFloat8 && !q.scales.has_value())) {
    throw std::invalid_argument("quantised arrays have the wrong shape");
  }
  auto address = reinterpret_cast<uint64_t>(values.data());
  result.recipe = q.recipe;
  result.layout = q.layout;
  result.first_row = q.first_row;
  result.scale = q.scale;
  if (q.scale_array) result.scale_address = reinterpret_cast<uint64_t>(q.scale_array->data());
  result.values = address;
  result.stride = values.strides(0);
  result.vectors = address % 8 == 0 && (tokens <= 1 || values.strides(0) % 8 == 0);
  if (q.scales) result.scales = reinterpret_cast<uint64_t>(q.scales->at(rank).data());
  return result;
}

Hold hold_named(const std::string& name) {
  if (name == "none") return Hold::kNone;
  if (name == "at_launch") return Hold::kAtLaunch;
  if (name == "before_reading") return Hold::kBeforeReading;
  throw std::invalid_argument("no such hold: " + name);
}

std::unique_ptr<BoundCall> make_call(
    Strategy strategy, ElementType type, const Arrays& input, const std::optional<Arrays>& output,
    const std::optional<Arrays>& residual_in, const std::optional<Arrays>& residual_out,
    const std::optional<Arrays>& gamma, float epsilon, float weight_bias,
    std::optional<std::array<uint32_t, 3>> shape, bool specialised, bool whole, bool multicast,
    const std::string& hold, uint32_t held_rank, const std::optional<Quantize>& quantize) {
  auto bound = std::make_unique<BoundCall>();
  Call& call = bound->call;
  call.strategy = strategy;
  call.type = type;
  call.specialised = specialised;
  call.whole = whole;
  call.multicast = multicast;
  if (shape) call.shape = LaunchShape{(*shape)[0], (*shape)[1], (*shape)[2]};
  call.hold = hold_named(hold);
  call.held_rank = held_rank;
  size_t ranks = input.size();
  bool normalize = gamma.has_value();
  if (ranks == 0 || (output.has_value() ? output->size() != ranks : !quantize.has_value()) ||
      (quantize.has_value() && !normalize) || residual_in.has_value() != normalize ||
      residual_out.has_value() != normalize ||
      (normalize &&
       (gamma->size() != ranks || residual_in->size() != ranks || residual_out->size() != ranks)) ||
      input[0].ndim() != 2) {
    throw std::invalid_argument("each rank needs each of the call's arrays");
  }
  py::ssize_t tokens = input[0].shape(0), hidden = input[0].shape(1);
  if (hidden == 0) throw std::invalid_argument("rows are empty");
  for (size_t rank = 0; rank < ranks; ++rank) {
    Problem problem{};
    problem.tokens = static_cast<uint32_t>(tokens);
    problem.hidden = static_cast<uint32_t>(hidden);
    problem.input = rows_of(input[rank], type, tokens, hidden, false);
    if (output) {
      problem.output = rows_of((*output)[rank], type, tokens, hidden, true);
    } else {
      problem.output.vectors = true;
    }
    if (quantize) problem.quantization = quantization_of(*quantize, rank, tokens, hidden);
    problem.normalize = normalize;
    problem.inverse_hidden = 1.0f / static_cast<float>(hidden);
    problem.epsilon = epsilon;
    problem.weight_bias = weight_bias;
    if (normalize) {
      const py::array& scale = (*gamma)[rank];
      problem.residual_in = rows_of((*residual_in)[rank], type, tokens, hidden, false);
      problem.residual_out = rows_of((*residual_out)[rank], type, tokens, hidden, true);
      problem.gamma_float32 = scale.itemsize() == 4;
      if (scale.ndim() != 1 || scale.shape(0) != hidden ||
          (hidden > 1 && scale.strides(0) != scale.itemsize()) ||
          (!problem.gamma_float32 && scale.itemsize() != element_bytes(type))) {
        throw std::invalid_argument("gamma has the wrong shape or element size");
      }
      problem.gamma = reinterpret_cast<uint64_t>(scale.data());
      problem.gamma_vectors = is_vector_aligned(problem.gamma);
    }
    call.problem.push_back(problem);
  }
  bound->keep_alive = {input};
  for (const auto* arrays : {&output, &residual_in, &residual_out, &gamma}) {
    if (*arrays) bound->keep_alive.push_back(**arrays);
  }
  if (quantize) {
    bound->keep_alive.push_back(quantize->values);
    if (quantize->scales) bound->keep_alive.push_back(*quantize->scales);
    if (quantize->scale_array) bound->keep_alive.push_back({*quantize->scale_array});
  }
  return bound;
}

void run(Group& group, const std::vector<const BoundCall*>& calls,
         const std::map<uint32_t, size_t>& absent, const std::map<uint32_t, double>& late) {
  std::vector<Call> plain;
  plain.reserve(calls.size());
  for (const BoundCall* call : calls) plain.push_back(call->call);
  Attendance attendance;
  attendance.calls.assign(group.ranks(), plain.size());
  attendance.late_s.assign(group.ranks(), 0.0);
  for (auto [rank, after] : absent) attendance.calls.at(rank) = after;
  for (auto [rank, seconds] : late) attendance.late_s.at(rank) = seconds;
  py::gil_scoped_release release;
  group.run(plain, attendance);
}

uint32_t run_planted_race(Group& group, bool with_barrier) {
  auto output = std::make_unique<uint32_t>(0);
  py::gil_scoped_release release;
  group.run_planted_race(with_barrier, output.get());
  return *output;
}

}  // namespace

PYBIND11_MODULE(flashinfer_elastic_emulation, m) {
  m.doc() = "The all-reduce kernels on an emulated machine of several ranks.";

  static py::exception<RunError> run_error(m, "RunError", PyExc_RuntimeError);
  static py::exception<RunError> timeout(m, "WaitTimeout", run_error.ptr());
  static py::exception<RunError> protocol(m, "ProtocolViolation", run_error.ptr());
  static py::exception<RunError> machine(m, "MachineMisuse", run_error.ptr());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const RunError& error) {
      switch (error.kind) {
        case FailureKind::kTimeout:
          py::set_error(timeout, error.what());
          break;
        case FailureKind::kProtocol:
          py::set_error(protocol, error.what());
          break;
        case FailureKind::kMachine:
          py::set_error(machine, error.what());
          break;
      }
    }
  });

  py::enum_<Strategy>(m, "Strategy")
      .value("ONESHOT", Strategy::kOneShot)
      .value("TWOSHOT", Strategy::kTwoShot);
  py::enum_<ElementType>(m, "ElementType")
      .value("FLOAT16", ElementType::kFloat16)
      .value("BFLOAT16", ElementType::kBFloat16)
      .value("FLOAT32", ElementType::kFloat32);

  py::enum_<Recipe>(m, "Recipe")
      .value("FLOAT8", Recipe::kFloat8)
      .value("NV_FLOAT4", Recipe::kNvFloat4)
      .value("DYNAMIC_FLOAT8", Recipe::kDynamicFloat8)
      .value("MX_FLOAT8", Recipe::kMxFloat8);
  py::enum_<ScaleLayout>(m, "ScaleLayout")
      .value("SWIZZLED_128X4", ScaleLayout::kSwizzled128x4)
      .value("LINEAR", ScaleLayout::kLinear);
  py::class_<Quantize>(m, "Quantize")
      .def(py::init([](Recipe recipe, ScaleLayout layout, uint32_t first_row, Arrays values,
                       std::optional<Arrays> scales, float scale,
                       std::optional<py::array> scale_array) {
             return Quantize{recipe,
                             layout,
                             first_row,
                             std::move(values),
                             std::move(scales),
                             scale,
                             std::move(scale_array)};
           }),
           py::arg("recipe"), py::arg("layout"), py::kw_only(), py::arg("first_row") = 0,
           py::arg("values"), py::arg("scales") = py::none(), py::arg("scale") = 1.0f,
           py::arg("scale_array") = py::none());

  py::class_<BoundCall>(m, "Call").def(
      py::init(&make_call), py::arg("strategy"), py::arg("type"), py::kw_only(), py::arg("input"),
      py::arg("output"), py::arg("residual_in") = py::none(), py::arg("residual_out") = py::none(),
      py::arg("gamma") = py::none(), py::arg("epsilon") = 0.0f, py::arg("weight_bias") = 0.0f,
      py::arg("shape") = py::none(), py::arg("specialised") = true, py::arg("whole") = true,
      py::arg("multicast") = false, py::arg("hold") = "none", py::arg("held_rank") = 0,
      py::arg("quantize") = py::none());

  py::class_<Group>(m, "Group")
      .def(py::init([](uint32_t ranks, uint64_t buffer_bytes, double timeout_s, uint64_t seed,
                       uint32_t max_delay_us, uint32_t multiprocessors, uint32_t first_epoch,
                       bool single_buffer, bool gives_up) {
             return std::make_unique<Group>(Settings{ranks, buffer_bytes, timeout_s,
                                                     Jitter{seed, max_delay_us}, multiprocessors,
                                                     first_epoch, single_buffer, gives_up});
           }),
           py::arg("ranks"), py::arg("buffer_bytes"), py::kw_only(), py::arg("timeout_s") = 60.0,
           py::arg("seed") = 0, py::arg("max_delay_us") = 0, py::arg("multiprocessors") = 1,
           py::arg("first_epoch") = 0, py::arg("single_buffer") = false,
           py::arg("gives_up") = false)
      .def("run", &run, py::arg("calls"), py::kw_only(),
           py::arg("absent") = std::map<uint32_t, size_t>{},
           py::arg("late") = std::map<uint32_t, double>{},
           "Run the calls on all ranks. A rank in `absent` stops after so many of them; one in "
           "`late` starts so many seconds after the others.")
      .def("run_planted_race", &run_planted_race, py::kw_only(), py::arg("with_barrier"))
      .def("epoch", &Group::epoch, py::arg("rank"))
      .def("expired", &Group::expired, py::arg("rank"))
      .def("set_epoch", &Group::set_epoch, py::arg("rank"), py::arg("epoch"))
      .def("set_word", &Group::set_word, py::arg("rank"), py::arg("offset"), py::arg("word"))
      .def_property_readonly("holds_reached", &Group::holds_reached);

  m.def("required_bytes", &required_bytes, py::arg("strategy"), py::arg("type"), py::arg("tokens"),
        py::arg("hidden"), py::arg("ranks"));
  m.def(
      "launch_shape",
      [](Strategy strategy, uint32_t tokens, uint32_t hidden, uint32_t ranks,
         uint32_t multiprocessors) {
        LaunchShape s = launch_shape(strategy, tokens, hidden, ranks, multiprocessors);
        return py::make_tuple(s.cluster, s.clusters, s.threads);
      },
      py::arg("strategy"), py::arg("tokens"), py::arg("hidden"), py::arg("ranks"),
      py::arg("multiprocessors"));

  m.def("e4m3_of_float", py::vectorize(hw::e4m3_of_float));
  m.def("float_of_e4m3", py::vectorize(hw::float_of_e4m3));
  m.def("e2m1_of_float", py::vectorize(e2m1_of_float));
  m.def("half_of_float", py::vectorize(hw::half_of_float));
  m.def("float_of_half", py::vectorize(hw::float_of_half));
  m.def("bfloat_of_float", py::vectorize(hw::bfloat_of_float));
  m.def("reciprocal_sqrt", py::vectorize(hw::reciprocal_sqrt));
}

}  // namespace flashinfer_elastic::emulation

#include "group.h"

#include <sys/prctl.h>

#include <cfenv>
#include <chrono>
#include <string>
#include <utility>

#include "flashinfer_elastic/layout.cuh"
#include "flashinfer_elastic/row_tail.cuh"
#include "kernels.h"
#include "sanitizer.h"

namespace flashinfer_elastic::emulation {
namespace {

const Settings& checked(const Settings& s) {
  if (s.ranks < 1 || s.ranks > kMaxRanks) throw std::invalid_argument("ranks must be 1 to 64");
  if (s.multiprocessors < 1) throw std::invalid_argument("multiprocessors must be 1 or more");
  if (s.buffer_bytes == 0 || s.buffer_bytes % 256 != 0) {
    throw std::invalid_argument("buffer_bytes must be a multiple of 256");
  }
  return s;
}

void check_shape(const LaunchShape& shape, const Call& call, uint32_t ranks) {
  uint32_t tokens = call.problem[0].tokens;
  uint32_t units = call.strategy == Strategy::kOneShot ? tokens : ceil_div(tokens, ranks);
  if (shape.cluster < 1 || shape.cluster > kMaxCluster || shape.clusters < 1 ||
      shape.clusters > units || shape.threads < 32 || shape.threads > 1024 ||
      shape.threads % 32 != 0) {
    throw std::invalid_argument("no such launch shape");
  }
}

// What `kWhole` promises (row_tail.cuh).
bool has_whole_rows(const Problem& p, const LaunchShape& shape) {
  bool vectors = p.input.vectors && p.output.vectors;
  if (p.normalize) {
    vectors = vectors && p.residual_in.vectors && p.residual_out.vectors && p.gamma_vectors;
    vectors = vectors && (p.quantization.recipe == Recipe::kNone || p.quantization.vectors);
  }
  return vectors && p.hidden % kSegmentElements == 0 && one_segment_a_thread(shape, p.hidden);
}

}  // namespace

Group::Group(const Settings& settings)
    : settings_(checked(settings)),
      fabric_(settings.ranks, settings.buffer_bytes),
      rotations_(settings.ranks, Rotation{settings.first_epoch * kTurn, 0}),
      epochs_(settings.ranks, settings.first_epoch) {
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    for (uint32_t i = 0; i < settings_.multiprocessors; ++i) {
      multiprocessors_.push_back(
          std::make_unique<Multiprocessor>(fabric_, rank, i, settings_.jitter));
      threads_.emplace_back(&Group::work, this, rank, std::ref(*multiprocessors_.back()));
    }
  }
}

Group::~Group() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Group::set_word(uint32_t rank, uint64_t offset, uint32_t word) {
  if (rank >= settings_.ranks || offset % sizeof(word) != 0 ||
      offset >= Fabric::kBuffers * settings_.buffer_bytes) {
    throw std::out_of_range("no such word");
  }
  *reinterpret_cast<uint32_t*>(fabric_.memory(rank) + offset) = word;
}

uint64_t Group::holds_reached() const {
  uint64_t sum = 0;
  for (const auto& m : multiprocessors_) sum += m->holds_reached();
  return sum;
}

Launch Group::launch(const Call& call, uint32_t rank) {
  const Problem& problem = call.problem.at(rank);
  uint32_t ranks = settings_.ranks;
  uint64_t required =
      required_bytes(call.strategy, call.type, problem.tokens, problem.hidden, ranks);
  if (required > settings_.buffer_bytes) {
    throw std::invalid_argument("the call needs " + std::to_string(required) +
                                " bytes and the buffer has " +
                                std::to_string(settings_.buffer_bytes));
  }
  LaunchShape shape = call.shape ? *call.shape
                                 : launch_shape(call.strategy, problem.tokens, problem.hidden,
                                                ranks, settings_.multiprocessors);
  check_shape(shape, call, ranks);
  Arguments arguments{};
  arguments.group.rank = rank;
  arguments.group.ranks = ranks;
  arguments.group.timeout_ns = static_cast<uint64_t>(settings_.timeout_s * 1e9);
  arguments.group.buffer_bytes = settings_.single_buffer ? 0 : settings_.buffer_bytes;
  arguments.group.rotation = &rotations_[rank];
  for (uint32_t i = 0; i < ranks; ++i) {
    arguments.group.memory[i] = reinterpret_cast<uint64_t>(fabric_.memory((rank + i) % ranks));
  }
  arguments.group.gives_up = settings_.gives_up;
  arguments.group.multicast = fabric_.multicast();
  arguments.problem = problem;
  arguments.problem.block_segments = block_segments(shape, problem.hidden);
  arguments.problem.sharing_blocks = sharing_blocks(shape, problem.hidden);
  auto kernel = call.strategy == Strategy::kOneShot ? one_shot_kernel : two_shot_kernel;
  bool whole = call.whole && has_whole_rows(problem, shape);
  bool quantized = problem.quantization.recipe != Recipe::kNone;
  return {kernel({call.type, ranks, call.specialised, whole, quantized, call.multicast}), arguments,
          shape, row_tail_shared_bytes(problem.hidden),
          call.held_rank == rank ? call.hold : Hold::kNone};
}

void Group::run(const std::vector<Call>& calls, const Attendance& attendance) {
  Job job;
  job.launches.resize(settings_.ranks);
  job.late_s = attendance.late_s;
  for (size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    if (call.problem.size() != settings_.ranks) {
      throw std::invalid_argument("a call needs a problem for each rank");
    }
    if (call.problem[0].tokens == 0) continue;
    for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
      Launch made = launch(call, rank);
      if (i < attendance.calls.at(rank)) job.launches[rank].push_back(made);
    }
  }
  run(job);
  check(job);
}

void Group::run_planted_race(bool with_barrier, uint32_t* output) {
  Launch launch{planted_race_kernel(with_barrier), {}, {1, 1, 32}, sizeof(float), Hold::kNone};
  launch.arguments.problem.output.address = reinterpret_cast<uint64_t>(output);
  Job job;
  job.launches.resize(settings_.ranks);
  job.launches[0].push_back(launch);
  job.late_s.assign(settings_.ranks, 0.0);
  run(job);
}

void Group::run(Job& job) {
  if (fabric_.failed()) throw_failure();
  for (const auto& launches : job.launches) {
    job.progress.push_back(std::make_unique<Progress[]>(launches.size()));
  }
  fabric_.begin_run();
  sanitizer::release(&jobs_);
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = &job;
  busy_ = threads_.size();
  ++jobs_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return busy_ == 0; });
  job_ = nullptr;
  lock.unlock();
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    for (size_t i = 0; i < job.launches[rank].size(); ++i) {
      sanitizer::acquire(&job.progress[rank][i]);
    }
  }
  if (fabric_.failed()) throw_failure();
}

// What must hold once all ranks are done, whatever came before.
void Group::check(const Job& job) {
  for (const Rotation& rotation : rotations_) {
    if (settings_.gives_up && rotation.expired != 0) return;  // what a trial leaves is anything
  }
  for (uint32_t rank = 0; rank < settings_.ranks; ++rank) {
    std::string who = "rank " + std::to_string(rank) + ": ";
    uint64_t unread = fabric_.unread(rank);
    if (unread != 0) {
      fabric_.fail(rank, FailureKind::kProtocol,
                   who + std::to_string(unread) + " words were never read");
    }
    epochs_[rank] += static_cast<uint32_t>(job.launches[rank].size());
    if (rotations_[rank].turns != epochs_[rank] * kTurn) {
      fabric_.fail(rank, FailureKind::kProtocol,
                   who + "the turn counter is at " + std::to_string(rotations_[rank].turns) +
                       " instead of " + std::to_string(epochs_[rank] * kTurn));
    }
  }
  if (fabric_.failed()) throw_failure();
}

void Group::throw_failure() const {
  std::vector<Failure> failures = fabric_.failures();
  std::string text;
  for (const Failure& failure : failures) {
    if (!text.empty()) text += '\n';
    text += failure.message;
  }
  throw RunError(failures.front().kind, text);
}

void Group::work(uint32_t rank, Multiprocessor& multiprocessor) {
  // Other code of the process may have asked for subnormals to be flushed.
  std::fesetenv(FE_DFL_ENV);
  prctl(PR_SET_TIMERSLACK, 1);
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || jobs_ != seen; });
    if (closing_) return;
    seen = jobs_;
    lock.unlock();
    try {
      run_on(rank, multiprocessor, *job_);
    } catch (const std::exception& error) {
      fabric_.fail(rank, FailureKind::kMachine, error.what());
    }
    lock.lock();
    if (--busy_ == 0) changed_.notify_all();
  }
}

void Group::run_on(uint32_t rank, Multiprocessor& multiprocessor, Job& job) {
  multiprocessor.begin_run(&jobs_);
  std::this_thread::sleep_for(std::chrono::duration<double>(job.late_s.at(rank)));
  const std::vector<Launch>& launches = job.launches[rank];
  Progress* progress = job.progress[rank].get();
  for (size_t i = 0; i < launches.size(); ++i) {
    multiprocessor.begin_call(launches[i], i, i == 0 ? nullptr : &progress[i - 1], &progress[i]);
    for (;;) {
      if (fabric_.stopped(rank)) return;
      uint32_t cluster = progress[i].taken.fetch_add(1, std::memory_order_relaxed);
      if (cluster >= launches[i].shape.clusters) break;
      multiprocessor.run_cluster(cluster);
      progress[i].finished.fetch_add(1, std::memory_order_acq_rel);
    }
  }
}

}  // namespace flashinfer_elastic::emulation

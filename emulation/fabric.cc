#include "fabric.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "flashinfer_elastic/words.h"

namespace flashinfer_elastic::emulation {

Fabric::Fabric(uint32_t ranks, uint64_t buffer_bytes)
    : ranks_(ranks),
      buffer_bytes_(buffer_bytes),
      rank_bytes_(kBuffers * buffer_bytes),
      begun_(new std::atomic<uint64_t>[ranks]),
      stopped_(new std::atomic<bool>[ranks]) {
  void* memory = mmap(nullptr, ranks_ * rank_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  multicast_ = mmap(nullptr, rank_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (multicast_ == MAP_FAILED) {
    munmap(memory_, ranks_ * rank_bytes_);
    throw std::bad_alloc();
  }
  auto* words = reinterpret_cast<uint32_t*>(memory_);
  std::fill(words, words + ranks_ * rank_bytes_ / sizeof(uint32_t), kSentinel);
  for (uint32_t i = 0; i < ranks_; ++i) stopped_[i].store(false, std::memory_order_relaxed);
  begin_run();
}

Fabric::~Fabric() {
  munmap(multicast_, rank_bytes_);
  munmap(memory_, ranks_ * rank_bytes_);
}

Fabric::Place Fabric::locate(const void* address) const {
  auto place = reinterpret_cast<uintptr_t>(address);
  auto base = reinterpret_cast<uintptr_t>(memory_);
  if (place < base || place >= base + ranks_ * rank_bytes_ || place % sizeof(Word4) != 0) {
    return {false, 0, 0};
  }
  uint64_t offset = place - base;
  return {true, static_cast<uint32_t>(offset / rank_bytes_), offset % rank_bytes_};
}

std::optional<uint64_t> Fabric::multicast_offset(uint64_t address) const {
  uint64_t offset = address - multicast();
  if (offset >= rank_bytes_ || offset % sizeof(Word4) != 0) return std::nullopt;
  return offset;
}

uint64_t Fabric::unread(uint32_t rank) const {
  auto* words = reinterpret_cast<const uint32_t*>(memory(rank));
  uint64_t count = rank_bytes_ / sizeof(uint32_t);
  return count - static_cast<uint64_t>(std::count(words, words + count, kSentinel));
}

void Fabric::fail(uint32_t rank, FailureKind kind, std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool is_first = std::none_of(failures_.begin(), failures_.end(),
                               [&](const Failure& failure) { return failure.rank == rank; });
  if (is_first) failures_.push_back({rank, kind, std::move(message)});
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (i == rank || kind != FailureKind::kTimeout) {
      stopped_[i].store(true, std::memory_order_relaxed);
    }
  }
}

bool Fabric::failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !failures_.empty();
}

std::vector<Failure> Fabric::failures() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

void Fabric::begin_run() {
  for (uint32_t i = 0; i < ranks_; ++i) begun_[i].store(0, std::memory_order_relaxed);
}

void Fabric::begin_call(uint32_t rank, uint64_t call) {
  uint64_t begun = begun_[rank].load(std::memory_order_relaxed);
  while (begun < call + 1 &&
         !begun_[rank].compare_exchange_weak(begun, call + 1, std::memory_order_relaxed)) {
  }
}

bool Fabric::peers_have_begun(uint32_t rank, uint64_t call) const {
  for (uint32_t i = 0; i < ranks_; ++i) {
    if (i != rank && begun_[i].load(std::memory_order_relaxed) < call + 1) return false;
  }
  return true;
}

}  // namespace flashinfer_elastic::emulation

#include "jaxdp/work.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace jaxdp {
namespace {

// Bytes of one input that a task covers: W inputs and W outputs of it fit in a second-level cache.
constexpr std::size_t kTaskBytes = 64 << 10;

const char* at(const void* base, std::size_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }

}  // namespace

Work::Work(std::vector<Call> calls) : calls_(std::move(calls)) {
  for (std::size_t lane = 0; lane < calls_[0].lanes.size(); ++lane) plan(lane);
  left_.store(tasks_.size());
}

void Work::plan(std::size_t lane) {
  const Lane& shape = calls_[0].lanes[lane];
  const int world = static_cast<int>(calls_.size());
  const Operation operation = calls_[0].operation;
  const int blocks = operation == Operation::kAllReduce ? 1 : world;
  const std::size_t elements = operation == Operation::kReduceScatter ? shape.elements / world : shape.elements;
  const std::size_t step = std::max<std::size_t>(1, kTaskBytes / std::max<std::size_t>(1, shape.width));
  for (int block = 0; block < blocks; ++block) {
    for (std::size_t begin = 0; begin < elements; begin += step) {
      tasks_.push_back({lane, begin, std::min(step, elements - begin), block});
    }
  }
}

void Work::execute(const Task& task) const {
  const int world = static_cast<int>(calls_.size());
  const Lane& shape = calls_[0].lanes[task.lane];
  const void* inputs[kMaximumWorld];
  void* outputs[kMaximumWorld];
  for (int rank = 0; rank < world; ++rank) {
    inputs[rank] = calls_[rank].lanes[task.lane].input;
    outputs[rank] = calls_[rank].lanes[task.lane].output;
  }
  switch (calls_[0].operation) {
    case Operation::kAllReduce:
      return tree_reduce(shape.dtype, world, inputs, task.begin, task.count, outputs, world, task.begin);
    case Operation::kReduceScatter: {
      const std::size_t block_begin = task.block * (shape.elements / world) + task.begin;
      return tree_reduce(shape.dtype, world, inputs, block_begin, task.count, outputs + task.block, 1, task.begin);
    }
    case Operation::kAllGather:
      for (int rank = 0; rank < world; ++rank) {
        std::memcpy(at(outputs[rank], (task.block * shape.elements + task.begin) * shape.width),
                    at(inputs[task.block], task.begin * shape.width), task.count * shape.width);
      }
      return;
    case Operation::kBarrier: return;
  }
}

void Work::run() {
  for (std::size_t i = next_.fetch_add(1); i < tasks_.size(); i = next_.fetch_add(1)) {
    execute(tasks_[i]);
    left_.fetch_sub(1, std::memory_order_release);
  }
}

void Work::wait() const {
  while (left_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
}

std::size_t Work::helpers(int threads) const {
  // Waking a thread costs about what a few tasks do.
  constexpr std::size_t kTasksToShare = 8;
  if (tasks_.size() < kTasksToShare || threads < 2) return 0;
  return std::min<std::size_t>(tasks_.size(), static_cast<std::size_t>(threads)) - 1;
}

}  // namespace jaxdp

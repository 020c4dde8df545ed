// What the native test programs share: segments in one process, blocking calls, inputs with known sums.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "jaxdp/ipc_group.h"

namespace jaxdp::test {

constexpr std::size_t kStagingBytes = 4096;

// Ends the program with exit code 1, which a sanitizer's own code is not.
[[noreturn]] inline void fail(const std::string& why) {
  std::fprintf(stderr, "wrong: %s\n", why.c_str());
  std::fflush(stderr);
  _exit(1);
}

inline void expect(bool right, const std::string& why) {
  if (!right) fail(why);
}

// One mapping a segment, shared by all threads, so that ThreadSanitizer sees who touches it.
inline std::vector<std::shared_ptr<Segment>> make_segments(int world) {
  std::vector<std::shared_ptr<Segment>> segments;
  for (int rank = 0; rank < world; ++rank) {
    const int file = memfd_create("segment", MFD_CLOEXEC);
    expect(file >= 0 && ftruncate(file, Segment::file_bytes(kStagingBytes)) == 0, "no memory");
    std::string error;
    segments.push_back(Segment::map(file, kStagingBytes, &error));
    expect(segments.back() != nullptr, error);
    segments.back()->initialize(7, rank, world);
    close(file);
  }
  return segments;
}

class Inline final : public Executor {
 public:
  int threads() const override { return 1; }
  void schedule(std::function<void()>) override {}
};

inline std::future<Status> submit(Group& group, int rank, Call call) {
  auto result = std::make_shared<std::promise<Status>>();
  Inline executor;
  group.submit(rank, std::move(call), [result](const Status& status) { result->set_value(status); }, executor);
  return result->get_future();
}

// Rank r, element i is 2^24 when (r + i) mod W == 0, else 1. The balanced tree gives one constant.
inline std::vector<float> canary(int world, int rank, std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = (rank + i) % world == 0 ? 0x1p24f : 1.0f;
  return x;
}

inline float canary_sum(int world) { return world == 2 ? 0x1p24f : world == 4 ? 0x1p24f + 2 : 0x1p24f + 6; }

// One reduction or gather of a rank over `count` elements a block, checked when it is done.
class Exchange {
 public:
  Exchange(Operation operation, int world, int rank, std::size_t count)
      : operation_(operation),
        world_(world),
        count_(count),
        input_(canary(world, rank, operation == Operation::kReduceScatter ? world * count : count)),
        output_(operation == Operation::kAllGather ? world * count : count, -1.0f) {}

  Call call() {
    Call call{operation_, {}, std::to_string(static_cast<int>(operation_)) + " " + std::to_string(count_)};
    if (operation_ != Operation::kBarrier) {
      call.lanes.push_back({input_.data(), output_.data(), input_.size(), sizeof(float), DType::kFloat32});
    }
    return call;
  }

  bool right() const {
    if (operation_ == Operation::kBarrier) return true;
    for (std::size_t i = 0; i < output_.size(); ++i) {
      const std::size_t source = i / std::max<std::size_t>(1, count_), element = i % std::max<std::size_t>(1, count_);
      const float gathered = (source + element) % world_ == 0 ? 0x1p24f : 1.0f;
      if (output_[i] != (operation_ == Operation::kAllGather ? gathered : canary_sum(world_))) return false;
    }
    return true;
  }

 private:
  const Operation operation_;
  const int world_;
  const std::size_t count_;
  const std::vector<float> input_;
  std::vector<float> output_;
};

}  // namespace jaxdp::test

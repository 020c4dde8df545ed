// The arithmetic of one call whose W inputs are all at hand, cut into tasks that any thread may take.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "jaxdp/collective.h"

namespace jaxdp {

class Work {
 public:
  // calls[r] is rank r's part; all have one signature.
  explicit Work(std::vector<Call> calls);

  // Takes tasks until none is left.
  void run();

  // Returns once every task has ended: at most the time of one task after run(). Acquires what all
  // of them wrote.
  void wait() const;

  // Whether the call moves so many bytes that waking a thread does not count.
  bool is_long() const { return tasks_.size() >= kLongTasks; }

  // How many threads besides the caller's are worth waking, of a pool of `threads`.
  std::size_t helpers(int threads) const;

 private:
  static constexpr std::size_t kLongTasks = 32;  // 2 MiB; Xeon with 2 cores, bench/collectives.py

  // Elements [begin, begin + count) of one lane; `block` is the reduce_scatter block or the
  // all_gather source rank.
  struct Task {
    std::size_t lane, begin, count;
    int block;
  };

  void plan(std::size_t lane);
  void execute(const Task& task) const;

  std::vector<Call> calls_;
  std::vector<Task> tasks_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> left_{0};
};

}  // namespace jaxdp

// The arithmetic of one call whose W inputs are all at hand, cut into tasks that any thread may take.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "jaxdp/collective.h"

namespace jaxdp {

class Work {
 public:
  // calls[r] is rank r's part; all have one signature. `finished` is called once, by the thread
  // that ends the last task (or at once by run() when there is none).
  Work(std::vector<Call> calls, std::function<void()> finished);

  // Takes tasks until none is left.
  void run();

  std::size_t tasks() const { return tasks_.size(); }

 private:
  // Elements [begin, begin + count) of one lane; `block` is the reduce_scatter block or the
  // all_gather source rank.
  struct Task {
    std::size_t lane, begin, count;
    int block;
  };

  void plan(std::size_t lane);
  void execute(const Task& task) const;

  std::vector<Call> calls_;
  std::function<void()> finished_;
  std::vector<Task> tasks_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> left_{0};
};

}  // namespace jaxdp

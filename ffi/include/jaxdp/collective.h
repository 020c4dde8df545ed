// One rank's part in one collective call, as the handlers hand it to a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "jaxdp/kernels.h"
#include "jaxdp/status.h"

namespace jaxdp {

enum class Operation : std::int32_t { kAllReduce = 0, kAllGather = 1, kReduceScatter = 2, kBarrier = 3 };

// One array of a call. `elements` counts the input. Reductions read `dtype`; all_gather moves bytes
// and has dtype unset and `width` alone.
struct Lane {
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t elements = 0;
  std::size_t width = 0;
  DType dtype = DType::kFloat32;
};

struct Call {
  Operation operation = Operation::kBarrier;
  std::vector<Lane> lanes;
  std::string signature;  // operation, dtypes and shapes as the caller wrote them: equal on all ranks
};

using Completion = std::function<void(const Status&)>;

// Runs tasks on other threads, in time.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int threads() const = 0;
  virtual void schedule(std::function<void()> task) = 0;
};

}  // namespace jaxdp

// The FFI targets that a backend registers.
#pragma once

#include <vector>

namespace jaxdp {

struct HandlerEntry {
  const char* name;
  void* function;
};

const std::vector<HandlerEntry>& cpu_handlers();
const std::vector<HandlerEntry>& gpu_handlers();

}  // namespace jaxdp

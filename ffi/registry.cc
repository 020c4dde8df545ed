#include "jaxdp/registry.h"

#include "jaxdp/group.h"

namespace jaxdp {

std::int64_t register_group(std::shared_ptr<Group> group) { return Registry<Group>::instance().add(std::move(group)); }
std::shared_ptr<Group> find_group(std::int64_t handle) { return Registry<Group>::instance().find(handle); }
void forget_group(std::int64_t handle) { Registry<Group>::instance().forget(handle); }

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace jaxdp

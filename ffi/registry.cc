#include <map>

#include "jaxdp/group.h"

namespace jaxdp {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::int64_t, std::shared_ptr<Group>> groups;
  std::int64_t next = 1;
};

// Never destroyed: programs may still run while the process ends.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

std::int64_t register_group(std::shared_ptr<Group> group) {
  std::lock_guard lock(registry().mutex);
  registry().groups[registry().next] = std::move(group);
  return registry().next++;
}

std::shared_ptr<Group> find_group(std::int64_t handle) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(handle);
  return found == registry().groups.end() ? nullptr : found->second;
}

void forget_group(std::int64_t handle) {
  std::shared_ptr<Group> last;  // destroyed after the lock is released
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(handle);
  if (found == registry().groups.end()) return;
  last = std::move(found->second);
  registry().groups.erase(found);
}

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace jaxdp

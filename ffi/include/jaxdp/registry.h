// Handles travel through compiled programs as integers; this finds the group of a number.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxdp {

template <class Group>
class Registry {
 public:
  // Never destroyed: programs may still run while the process ends.
  static Registry& instance() {
    static auto* registry = new Registry;
    return *registry;
  }

  std::int64_t add(std::shared_ptr<Group> group) {
    std::lock_guard lock(mutex_);
    groups_[next_] = std::move(group);
    return next_++;
  }

  // Null if there is none of this number any more.
  std::shared_ptr<Group> find(std::int64_t handle) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(handle);
    return found == groups_.end() ? nullptr : found->second;
  }

  void forget(std::int64_t handle) {
    std::shared_ptr<Group> last;  // destroyed after the lock is released
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(handle);
    if (found == groups_.end()) return;
    last = std::move(found->second);
    groups_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<Group>> groups_;
  std::int64_t next_ = 1;
};

}  // namespace jaxdp

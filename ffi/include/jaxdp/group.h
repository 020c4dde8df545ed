// A communicator as the handlers see it: ranks submit calls, each is completed once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "jaxdp/collective.h"

namespace jaxdp {

class Group {
 public:
  virtual ~Group() = default;

  // Takes rank's next call. `done` is called exactly once, with the lock of no group held, in this
  // call or later from another thread; buffers stay valid until then.
  virtual void submit(int rank, Call call, Completion done, Executor& executor) = 0;

  // Ends the group: waits for its calls in flight and, between processes, for every peer's
  // acknowledgement, each under the deadline. Idempotent; later calls fail with CommunicatorClosed.
  virtual Status close() = 0;

  // The failure that poisoned the group, or Ok.
  virtual Status failure() const = 0;

  // Calls that `rank` has submitted.
  virtual std::uint64_t calls(int rank) const = 0;

  // The rank of the XLA device with this ordinal, -1 if it is not a member.
  virtual int rank_of(int device_ordinal) const = 0;
};

// What the name of a missing or waiting rank list looks like: "1, 3".
std::string join_ranks(const std::vector<int>& ranks);

// Handles travel through compiled programs as integers, so a group is found by number.
std::int64_t register_group(std::shared_ptr<Group> group);
std::shared_ptr<Group> find_group(std::int64_t handle);
void forget_group(std::int64_t handle);

struct LocalOptions {
  std::vector<int> device_ordinals;  // rank order
  double timeout_s = 30.0;
  std::uint64_t first_sequence = 1;
};

// Ranks are devices of one process; peers' input buffers are read in place.
std::shared_ptr<Group> make_local_group(const LocalOptions& options);

}  // namespace jaxdp

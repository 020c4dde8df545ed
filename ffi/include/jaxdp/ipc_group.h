// Ranks of one node, one process each, that meet in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "jaxdp/group.h"
#include "jaxdp/segment.h"

namespace jaxdp {

struct IpcOptions {
  int rank = 0;
  int device_ordinal = 0;
  std::vector<std::shared_ptr<Segment>> segments;  // rank order, the own one included
  std::vector<int> pidfds;                         // rank order, -1: not watched; the group owns them
  double timeout_s = 30.0;
  std::uint64_t first_sequence = 1;
  std::size_t one_shot_bytes = 0;  // an all_reduce of more bytes than this goes two-shot
};

// The least `staging_bytes`: a cache line of every dtype for each of the blocks of the largest world.
inline constexpr std::size_t kMinimumStagingBytes = 4096;

// Returns once every rank has mapped every segment, so that their files may be closed. Null, and why
// in `status`, if a rank does not come before the deadline or fails.
std::shared_ptr<Group> make_ipc_group(IpcOptions options, Status* status);

// Where a rank may be lost. Test builds call the hook there; others compile it away.
enum class Phase { kBeforePublish, kAfterPublish, kMidReduce, kBeforeDone, kInClose };

#if defined(JAXDP_TEST_HOOKS)
extern void (*phase_hook)(int rank, std::uint64_t sequence, Phase phase);
inline void pass(int rank, std::uint64_t sequence, Phase phase) {
  if (phase_hook) phase_hook(rank, sequence, phase);
}
#else
inline void pass(int, std::uint64_t, Phase) {}
#endif

}  // namespace jaxdp

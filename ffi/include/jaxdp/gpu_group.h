// A communicator on GPUs: rings, words and counters of its ranks, and their failure.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jaxdp/collective.h"
#include "jaxdp/gpu_kernels.h"

namespace jaxdp {

// Device memory that is freed with its owner.
class DeviceMemory {
 public:
  enum class Kind { kPlain, kWords, kPinned, kImported };
  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceMemory();

  static DeviceMemory allocate(Kind kind, int device, std::size_t bytes);
  static DeviceMemory import(int device, const gpu::IpcHandle& handle);

  void* get() const { return pointer_; }

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(kind_, other.kind_);
    std::swap(device_, other.device_);
    std::swap(pointer_, other.pointer_);
  }
  Kind kind_ = Kind::kPlain;
  int device_ = 0;
  void* pointer_ = nullptr;
};

// The memory of one rank that lives in this process.
struct GpuRank {
  int rank = 0, device = 0;
  DeviceMemory rings, words, state, status;
};

// What a rank of another process needs to reach this one's memory.
struct GpuAddress {
  gpu::IpcHandle rings, words;
};

class GpuGroup {
 public:
  // Allocates the memory of `rank` on `device`; throws std::runtime_error naming device and bytes.
  GpuGroup(int world, double timeout_s, int maximum_blocks);
  ~GpuGroup();

  void add_rank(int rank, int device);
  GpuAddress address(int rank) const;
  // Maps a rank of another process into every local rank's device.
  void connect(int rank, const GpuAddress& address);
  // Gives local ranks access to each other; call once when all are added.
  void connect_local();

  // Enqueues one rank's part of a call on its stream. Does not wait.
  Status enqueue(int rank, const Call& call, const float* divisor, gpu::Stream stream);

  Status failure() const;
  Status close();
  int rank_of(int device) const;
  std::uint64_t calls(int rank) const;
  int world() const { return world_; }

 private:
  const GpuRank* local(int rank) const;
  Peers peers(const GpuRank& own) const;
  Status enqueue_lanes(const GpuRank& own, const Call& call, std::size_t first, std::size_t count,
                       const float* divisor, gpu::Stream stream) const;

  const int world_;
  const double timeout_s_;
  int maximum_blocks_;  // all of a rank's blocks are resident together
  std::vector<GpuRank> ranks_;
  std::vector<std::pair<int, DeviceMemory>> imported_;
  char* rings_[kMaximumRanks] = {};
  RingWords* words_[kMaximumRanks] = {};
  bool closed_ = false;
};

std::int64_t register_gpu_group(std::shared_ptr<GpuGroup> group);
std::shared_ptr<GpuGroup> find_gpu_group(std::int64_t handle);
void forget_gpu_group(std::int64_t handle);

}  // namespace jaxdp

#include "jaxdp/gpu_group.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "jaxdp/registry.h"

namespace jaxdp {
namespace {

void check(gpu::Error error, const std::string& what) {
  if (error != gpu::kSuccess) throw std::runtime_error(what + ": " + gpu::message(error) + ".");
}

// Restores the current device: XLA's threads expect theirs.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(gpu::get_device(&before_), "the current GPU is not known");
    check(gpu::set_device(device), "GPU " + std::to_string(device) + " cannot be used");
  }
  ~OnDevice() { gpu::set_device(before_); }

 private:
  int before_ = 0;
};

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001B3u;
  return hash;
}

// The texts of signatures seen in this process, so that a hash left by a kernel can be named.
std::string remember_signature(std::uint64_t hash, const std::string* text) {
  static auto* mutex = new std::mutex;
  static auto* texts = new std::map<std::uint64_t, std::string>;
  std::lock_guard lock(*mutex);
  if (text != nullptr) texts->emplace(hash, *text);
  const auto found = texts->find(hash);
  return found == texts->end() ? "a call that this process never made" : found->second;
}

std::string ranks_of(std::uint64_t mask) {
  std::string text;
  for (int rank = 0; rank < kMaximumRanks; ++rank) {
    if (mask >> rank & 1) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

std::size_t vectors_of(std::size_t bytes) { return (bytes + kVectorBytes - 1) / kVectorBytes; }

}  // namespace

DeviceMemory DeviceMemory::allocate(Kind kind, int device, std::size_t bytes) {
  const OnDevice on(device);
  DeviceMemory memory;
  memory.kind_ = kind;
  memory.device_ = device;
  const std::string what = std::to_string(bytes) + " bytes on GPU " + std::to_string(device);
  check(kind == Kind::kPinned  ? gpu::allocate_pinned(&memory.pointer_, bytes)
        : kind == Kind::kWords ? gpu::allocate_words(&memory.pointer_, bytes)
                               : gpu::allocate(&memory.pointer_, bytes), "cannot allocate " + what);
  check(gpu::zero(memory.pointer_, bytes), "cannot clear " + what);
  check(gpu::synchronize(), "cannot clear " + what);
  return memory;
}

DeviceMemory DeviceMemory::import(int device, const gpu::IpcHandle& handle) {
  const OnDevice on(device);
  DeviceMemory memory;
  memory.kind_ = Kind::kImported;
  memory.device_ = device;
  check(gpu::open_handle(&memory.pointer_, handle), "cannot map a peer's memory on GPU " + std::to_string(device));
  return memory;
}

DeviceMemory::~DeviceMemory() {
  if (pointer_ == nullptr) return;
  // Errors are past mending here: the process is ending or the device is lost.
  int before = 0;
  gpu::get_device(&before);
  gpu::set_device(device_);
  if (kind_ == Kind::kPinned) gpu::release_pinned(pointer_);
  else if (kind_ == Kind::kImported) gpu::close_handle(pointer_);
  else gpu::release(pointer_);
  gpu::set_device(before);
}

GpuGroup::GpuGroup(int world, double timeout_s, int maximum_blocks)
    : world_(world), timeout_s_(timeout_s), maximum_blocks_(maximum_blocks) {}

GpuGroup::~GpuGroup() { close(); }

void GpuGroup::add_rank(int rank, int device) {
  {
    const OnDevice on(device);
    check(load_kernels(), "cannot load the kernels on GPU " + std::to_string(device));
    int multiprocessors = 0;
    check(gpu::count_multiprocessors(&multiprocessors, device), "GPU " + std::to_string(device) + " cannot be asked");
    maximum_blocks_ = std::min(maximum_blocks_, multiprocessors * resident_blocks_per_multiprocessor(world_));
  }
  GpuRank own{rank, device,
              DeviceMemory::allocate(DeviceMemory::Kind::kPlain, device, ring_bytes(world_)),
              DeviceMemory::allocate(DeviceMemory::Kind::kWords, device, sizeof(RingWords)),
              DeviceMemory::allocate(DeviceMemory::Kind::kPlain, device, sizeof(RankState)),
              DeviceMemory::allocate(DeviceMemory::Kind::kPinned, device, sizeof(DeviceStatus))};
  rings_[rank] = static_cast<char*>(own.rings.get());
  words_[rank] = static_cast<RingWords*>(own.words.get());
  ranks_.push_back(std::move(own));
}

GpuAddress GpuGroup::address(int rank) const {
  const GpuRank* own = local(rank);
  const OnDevice on(own->device);
  GpuAddress address{};
  check(gpu::export_handle(&address.rings, own->rings.get()), "cannot share GPU memory with other processes");
  check(gpu::export_handle(&address.words, own->words.get()), "cannot share GPU memory with other processes");
  return address;
}

void GpuGroup::connect(int rank, const GpuAddress& address) {
  const int device = ranks_.front().device;  // a ranked process drives one device
  imported_.emplace_back(rank, DeviceMemory::import(device, address.rings));
  rings_[rank] = static_cast<char*>(imported_.back().second.get());
  imported_.emplace_back(rank, DeviceMemory::import(device, address.words));
  words_[rank] = static_cast<RingWords*>(imported_.back().second.get());
}

void GpuGroup::connect_local() {
  for (const GpuRank& own : ranks_) {
    const OnDevice on(own.device);
    for (const GpuRank& peer : ranks_) {
      if (peer.device == own.device) continue;
      int allowed = 0;
      check(gpu::can_access(&allowed, own.device, peer.device), "peer access cannot be asked for");
      if (!allowed) {
        throw std::runtime_error("GPU " + std::to_string(own.device) + " cannot reach the memory of GPU " +
                                 std::to_string(peer.device) + ". Use transport='xla', or GPUs that are linked.");
      }
      check(gpu::enable_peer(peer.device), "peer access is refused");
    }
  }
}

const GpuRank* GpuGroup::local(int rank) const {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const GpuRank& own) { return own.rank == rank; });
  return found == ranks_.end() ? nullptr : &*found;
}

int GpuGroup::rank_of(int device) const {
  const auto found =
      std::find_if(ranks_.begin(), ranks_.end(), [&](const GpuRank& own) { return own.device == device; });
  return found == ranks_.end() ? -1 : found->rank;
}

Peers GpuGroup::peers(const GpuRank& own) const {
  Peers view{};
  view.rank = own.rank;
  std::copy_n(rings_, kMaximumRanks, view.rings);
  std::copy_n(words_, kMaximumRanks, view.words);
  view.state = static_cast<RankState*>(own.state.get());
  view.status = static_cast<DeviceStatus*>(own.status.get());
  view.timeout_ns = static_cast<std::uint64_t>(timeout_s_ * 1e9);
  return view;
}

Status GpuGroup::enqueue(int rank, const Call& call, const float* divisor, gpu::Stream stream) {
  const Status before = failure();
  if (!before.ok()) return before;
  const GpuRank& own = *local(rank);
  std::size_t first = 0;
  do {
    const std::size_t count = std::min<std::size_t>(kMaximumLanes, call.lanes.size() - first);
    const Status status = enqueue_lanes(own, call, first, count, divisor, stream);
    if (!status.ok()) return status;
    first += count;
  } while (first < call.lanes.size());
  return {};
}

Status GpuGroup::enqueue_lanes(const GpuRank& own, const Call& call, std::size_t first, std::size_t count,
                               const float* divisor, gpu::Stream stream) const {
  LaneTable table{};
  table.count = static_cast<int>(count);
  table.divisor = divisor;
  table.signature = hash_of(call.signature + (divisor ? " divided, " : ", ") + std::to_string(maximum_blocks_) + " blocks");
  remember_signature(table.signature, &call.signature);
  const bool gather = call.operation == Operation::kAllGather;
  for (std::size_t i = 0; i < count; ++i) {
    const Lane& lane = call.lanes[first + i];
    const std::size_t elements =
        call.operation == Operation::kReduceScatter ? lane.elements / static_cast<std::size_t>(world_) : lane.elements;
    table.inputs[i] = lane.input;
    table.outputs[i] = lane.output;
    table.elements[i] = gather ? elements * lane.width : elements;
    table.first_vector[i + 1] = table.first_vector[i] + vectors_of(elements * lane.width);
  }
  const DType dtype = count ? call.lanes[first].dtype : DType::kFloat32;
  gpu::Error error = gpu::kSuccess;
  if (world_ == 1) {
    for (std::size_t i = first; i < first + count && error == gpu::kSuccess; ++i) {
      const Lane& lane = call.lanes[i];
      if (lane.elements) error = gpu::copy_async(lane.output, lane.input, lane.elements * lane.width, stream);
    }
  } else {
    error = launch_collective(call.operation, world_, dtype, peers(own), table, maximum_blocks_, stream);
  }
  if (error == gpu::kSuccess) return {};
  return {StatusKind::kPeerFailure, call.signature + " could not be launched: " + gpu::message(error) + "."};
}

Status GpuGroup::failure() const {
  if (closed_) return {StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."};
  for (const GpuRank& own : ranks_) {
    const auto* status = static_cast<const DeviceStatus*>(own.status.get());
    const auto kind = static_cast<StatusKind>(load_acquire_system(&status->kind));
    if (kind == StatusKind::kOk) continue;
    const std::string call = "call " + std::to_string(status->sequence + 1);
    const std::string who = "rank " + std::to_string(own.rank);
    if (kind == StatusKind::kRankMismatch) {
      return {kind, call + ": rank " + ranks_of(status->missing) + " has " + remember_signature(status->signature, nullptr) +
                        ", not the call of " + who + ". All ranks must make the same calls in the same order."};
    }
    return {kind, call + ": " + who + " waited " + std::to_string(timeout_s_) + " s for rank " +
                      ranks_of(status->missing) + "."};
  }
  return {};
}

std::uint64_t GpuGroup::calls(int rank) const {
  const GpuRank* own = local(rank);
  if (own == nullptr) return 0;
  RankState state{};
  check(gpu::copy(&state, own->state.get(), sizeof(state)), "the call counter cannot be read");
  return state.calls;
}

// Work in flight ends first, under its own deadline; then every peer of another process says that it
// touches this memory no more.
Status GpuGroup::close() {
  if (closed_) return {};
  closed_ = true;
  for (const GpuRank& own : ranks_) {
    const OnDevice on(own.device);
    gpu::synchronize();
  }
  if (imported_.empty()) return {};
  const GpuRank& own = ranks_.front();
  const OnDevice on(own.device);
  const std::uint64_t one = 1;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != own.rank) gpu::copy(&words_[peer]->closed[own.rank].value, &one, sizeof(one));
  }
  std::uint64_t missing = 0;
  const std::uint64_t deadline = clock_ns() + static_cast<std::uint64_t>(timeout_s_ * 1e9);
  do {
    missing = 0;
    for (int peer = 0; peer < world_; ++peer) {
      std::uint64_t seen = 0;
      gpu::copy(&seen, &words_[own.rank]->closed[peer].value, sizeof(seen));
      if (peer != own.rank && seen == 0) missing |= 1ull << peer;
    }
    if (missing) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (missing && clock_ns() < deadline);
  if (!missing) return {};
  return {StatusKind::kCollectiveTimeout, "close: rank " + std::to_string(own.rank) + " waited " +
                                              std::to_string(timeout_s_) + " s for rank " + ranks_of(missing) + "."};
}

std::int64_t register_gpu_group(std::shared_ptr<GpuGroup> group) {
  return Registry<GpuGroup>::instance().add(std::move(group));
}
std::shared_ptr<GpuGroup> find_gpu_group(std::int64_t handle) { return Registry<GpuGroup>::instance().find(handle); }
void forget_gpu_group(std::int64_t handle) { Registry<GpuGroup>::instance().forget(handle); }

}  // namespace jaxdp

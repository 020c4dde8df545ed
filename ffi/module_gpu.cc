// The Python face of the GPU code, one module a platform: registrations, groups, and a way to run a
// group whose ranks share GPUs (loopback), which is how worlds 4 and 8 are tested on one GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "jaxdp/gpu_group.h"
#include "jaxdp/handlers.h"

namespace nb = nanobind;

namespace jaxdp {
namespace {

std::string text_of(const Status& status) { return status.ok() ? std::string() : status.text(); }

std::shared_ptr<GpuGroup> require(std::int64_t handle) {
  auto group = find_gpu_group(handle);
  if (!group) throw std::runtime_error("the communicator was closed; create a new one.");
  return group;
}

std::int64_t create_local(const std::vector<int>& devices, double timeout_s, int maximum_blocks) {
  auto group = std::make_shared<GpuGroup>(static_cast<int>(devices.size()), timeout_s, maximum_blocks);
  for (std::size_t rank = 0; rank < devices.size(); ++rank) group->add_rank(static_cast<int>(rank), devices[rank]);
  group->connect_local();
  return register_gpu_group(std::move(group));
}

std::int64_t create_rank(int rank, int world, int device, double timeout_s, int maximum_blocks) {
  auto group = std::make_shared<GpuGroup>(world, timeout_s, maximum_blocks);
  group->add_rank(rank, device);
  return register_gpu_group(std::move(group));
}

nb::bytes export_rank(std::int64_t handle, int rank) {
  const GpuAddress address = require(handle)->address(rank);
  return nb::bytes(reinterpret_cast<const char*>(&address), sizeof(address));
}

void connect_rank(std::int64_t handle, int rank, nb::bytes bytes) {
  GpuAddress address;
  if (bytes.size() != sizeof(address)) throw std::runtime_error("a peer's address has another size.");
  std::memcpy(&address, bytes.c_str(), sizeof(address));
  require(handle)->connect(rank, address);
}

std::string close_group(std::int64_t handle) {
  const auto group = find_gpu_group(handle);
  if (!group) return {};
  nb::gil_scoped_release release;
  const std::string text = text_of(group->close());
  forget_gpu_group(handle);
  return text;
}

std::string group_failure(std::int64_t handle) {
  const auto group = find_gpu_group(handle);
  return group ? text_of(group->failure()) : std::string();
}

void check(gpu::Error error) {
  if (error != gpu::kSuccess) throw std::runtime_error(gpu::message(error));
}

// Device copies of one rank's lanes and a stream of its own.
struct LoopbackRank {
  gpu::Stream stream{};
  Call call;
  std::vector<DeviceMemory> buffers;
  std::vector<std::size_t> output_bytes;
  float* divisor = nullptr;
};

std::size_t result_bytes(Operation operation, std::size_t bytes, int world) {
  const auto ranks = static_cast<std::size_t>(world);
  return operation == Operation::kAllGather ? bytes * ranks : operation == Operation::kReduceScatter ? bytes / ranks : bytes;
}

void* device_copy(LoopbackRank& rank, int device, const void* bytes, std::size_t size) {
  rank.buffers.push_back(DeviceMemory::allocate(DeviceMemory::Kind::kPlain, device, size + kVectorBytes));
  if (bytes) check(gpu::copy(rank.buffers.back().get(), bytes, size));
  return rank.buffers.back().get();
}

LoopbackRank prepare(Operation operation, DType dtype, int world, int device, nb::list lanes,
                     const std::string& signature, std::optional<float> divisor, std::size_t misalignment) {
  LoopbackRank rank;
  check(gpu::set_device(device));
  check(gpu::create_stream(&rank.stream));
  rank.call = {operation, {}, signature};
  const std::size_t width = operation == Operation::kAllGather ? 1 : byte_width(dtype);
  for (nb::handle item : lanes) {
    const nb::bytes bytes = nb::cast<nb::bytes>(item);
    const std::size_t size = bytes.size(), output = result_bytes(operation, size, world);
    std::string padded(misalignment, '\0');
    padded.append(bytes.c_str(), size);
    char* input = static_cast<char*>(device_copy(rank, device, padded.data(), padded.size())) + misalignment;
    rank.call.lanes.push_back({input, device_copy(rank, device, nullptr, output), size / width, width, dtype});
    rank.output_bytes.push_back(output);
  }
  if (divisor) rank.divisor = static_cast<float*>(device_copy(rank, device, &*divisor, sizeof(float)));
  return rank;
}

// Runs one call `repeats` times on every rank, each on its own stream, and returns the results'
// bytes by rank. lanes[r] holds rank r's inputs.
nb::list loopback_call(std::int64_t handle, const std::vector<int>& devices, int operation, int dtype, nb::list lanes,
                       const std::vector<std::string>& signatures, std::optional<float> divisor,
                       std::size_t misalignment, int repeats) {
  const auto group = require(handle);
  std::vector<LoopbackRank> ranks;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    ranks.push_back(prepare(static_cast<Operation>(operation), static_cast<DType>(dtype), group->world(), devices[rank],
                            nb::cast<nb::list>(lanes[rank]), signatures[rank], divisor, misalignment));
  }
  Status first;
  {
    nb::gil_scoped_release release;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        check(gpu::set_device(devices[rank]));
        const Status status =
            group->enqueue(static_cast<int>(rank), ranks[rank].call, ranks[rank].divisor, ranks[rank].stream);
        if (first.ok()) first = status;
      }
    }
    for (LoopbackRank& rank : ranks) {
      check(gpu::synchronize(rank.stream));
      check(gpu::destroy_stream(rank.stream));
    }
  }
  if (first.ok()) first = group->failure();
  if (!first.ok()) throw std::runtime_error(first.text());
  nb::list results;
  for (LoopbackRank& rank : ranks) {
    nb::list outputs;
    for (std::size_t i = 0; i < rank.output_bytes.size(); ++i) {
      std::string host(rank.output_bytes[i], '\0');
      if (!host.empty()) check(gpu::copy(host.data(), rank.call.lanes[i].output, host.size()));
      outputs.append(nb::bytes(host.data(), host.size()));
    }
    results.append(outputs);
  }
  return results;
}

int device_count() {
  int count = 0;
  return gpu::count_devices(&count) == gpu::kSuccess ? count : 0;
}

}  // namespace
}  // namespace jaxdp

NB_MODULE(JAXDP_MODULE, m) {
  using namespace nb::literals;
  m.attr("platform") = jaxdp::gpu::kPlatform;
  m.def("handlers", [] {
    nb::dict result;
    for (const auto& handler : jaxdp::gpu_handlers()) result[handler.name] = nb::capsule(handler.function);
    return result;
  });
  m.def("device_count", &jaxdp::device_count);
  m.def("create_local_group", &jaxdp::create_local, "devices"_a, "timeout_s"_a, "maximum_blocks"_a);
  m.def("create_rank", &jaxdp::create_rank, "rank"_a, "world"_a, "device"_a, "timeout_s"_a, "maximum_blocks"_a);
  m.def("export_rank", &jaxdp::export_rank, "handle"_a, "rank"_a);
  m.def("connect_rank", &jaxdp::connect_rank, "handle"_a, "rank"_a, "address"_a);
  m.def("close_group", &jaxdp::close_group, "handle"_a);
  m.def("group_failure", &jaxdp::group_failure, "handle"_a);
  m.def("group_calls", [](std::int64_t handle, int rank) {
    const auto group = jaxdp::find_gpu_group(handle);
    return group ? group->calls(rank) : 0;
  }, "handle"_a, "rank"_a);
  m.def("loopback_call", &jaxdp::loopback_call, "handle"_a, "devices"_a, "operation"_a, "dtype"_a, "lanes"_a,
        "signatures"_a, "divisor"_a.none(), "misalignment"_a, "repeats"_a);
}

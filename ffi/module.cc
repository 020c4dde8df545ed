// The Python face of the native code: FFI registrations and communicator handles.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <future>
#include <memory>
#include <stdexcept>

#include "jaxdp/group.h"
#include "jaxdp/handlers.h"
#include "jaxdp/ipc_group.h"

namespace nb = nanobind;

namespace jaxdp {
namespace {

nb::dict registrations(const std::vector<HandlerEntry>& handlers) {
  nb::dict result;
  for (const auto& handler : handlers) result[handler.name] = nb::capsule(handler.function);
  return result;
}

// The status as the text that Python turns into a named exception; empty when Ok.
std::string text_of(const Status& status) { return status.ok() ? std::string() : status.text(); }

std::int64_t create_local_group(const std::vector<int>& device_ordinals, double timeout_s,
                                std::uint64_t first_sequence) {
  return register_group(make_local_group({device_ordinals, timeout_s, first_sequence}));
}

// Writes the header of this rank's own, still zero, segment. Raises RuntimeError if it cannot be mapped.
void initialize_segment(int descriptor, std::size_t staging_bytes, std::uint64_t nonce, int rank, int world) {
  if (staging_bytes < kMinimumStagingBytes || staging_bytes % kMinimumStagingBytes != 0) {
    throw std::invalid_argument("staging_bytes must be a multiple of " + std::to_string(kMinimumStagingBytes) +
                                "; got " + std::to_string(staging_bytes) + ".");
  }
  std::string error;
  const auto segment = Segment::map(descriptor, staging_bytes, &error);
  if (!segment) throw std::runtime_error(error);
  segment->initialize(nonce, rank, world);
}

// Maps the ranks' segments; the descriptors stay the caller's. A handle, or 0 and the failure's text.
std::pair<std::int64_t, std::string> create_ipc_group(const std::vector<int>& descriptors, std::vector<int> pidfds,
                                                      std::size_t staging_bytes, std::uint64_t nonce, int rank,
                                                      int device_ordinal, double timeout_s,
                                                      std::uint64_t first_sequence, std::size_t one_shot_bytes) {
  nb::gil_scoped_release release;
  IpcOptions options{rank, device_ordinal, {}, std::move(pidfds), timeout_s, first_sequence, one_shot_bytes};
  for (int peer = 0; peer < static_cast<int>(descriptors.size()); ++peer) {
    std::string error;
    auto segment = Segment::map(descriptors[peer], staging_bytes, &error);
    if (segment) error = segment->mismatch(nonce, peer, static_cast<int>(descriptors.size()));
    if (!error.empty()) {
      const ProcessWatch unused(std::move(options.pidfds));  // closes them
      const Status failure{StatusKind::kPeerFailure, "the segment of rank " + std::to_string(peer) + ": " + error + "."};
      return {0, text_of(failure)};
    }
    options.segments.push_back(std::move(segment));
  }
  Status status;
  auto group = make_ipc_group(std::move(options), &status);
  if (!group) return {0, text_of(status)};
  return {register_group(std::move(group)), {}};
}

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

// One call of one rank without XLA, waited for: the failure's text, empty when Ok.
std::string call_group(std::int64_t handle, int rank, int operation, std::vector<int> dtypes,
                       std::vector<Array> inputs, std::vector<Array> outputs, std::string signature) {
  const auto group = find_group(handle);
  if (!group) return Status{StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."}.text();
  Call call{static_cast<Operation>(operation), {}, std::move(signature)};
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    call.lanes.push_back({inputs[i].data(), outputs.at(i).data(), inputs[i].size(), inputs[i].itemsize(),
                          static_cast<DType>(dtypes.at(i))});
  }
  nb::gil_scoped_release release;
  const auto result = std::make_shared<std::promise<Status>>();
  class Inline final : public Executor {
    int threads() const override { return 1; }
    void schedule(std::function<void()>) override {}
  } executor;
  group->submit(rank, std::move(call), [result](const Status& status) { result->set_value(status); }, executor);
  return text_of(result->get_future().get());
}

std::string close_group(std::int64_t handle) {
  const auto group = find_group(handle);
  if (!group) return {};
  std::string text;
  {
    nb::gil_scoped_release release;
    text = text_of(group->close());
    forget_group(handle);
  }
  return text;
}

std::string group_failure(std::int64_t handle) {
  const auto group = find_group(handle);
  return group ? text_of(group->failure()) : std::string();
}

std::uint64_t group_calls(std::int64_t handle, int rank) {
  const auto group = find_group(handle);
  return group ? group->calls(rank) : 0;
}

}  // namespace
}  // namespace jaxdp

NB_MODULE(_native, m) {
  using namespace nb::literals;
  m.def("cpu_handlers", [] { return jaxdp::registrations(jaxdp::cpu_handlers()); });
  m.def("create_local_group", &jaxdp::create_local_group, "device_ordinals"_a, "timeout_s"_a,
        "first_sequence"_a = 1);
  m.def("segment_file_bytes", &jaxdp::Segment::file_bytes, "staging_bytes"_a);
  m.def("initialize_segment", &jaxdp::initialize_segment, "descriptor"_a, "staging_bytes"_a, "nonce"_a, "rank"_a,
        "world"_a);
  m.def("create_ipc_group", &jaxdp::create_ipc_group, "descriptors"_a, "pidfds"_a, "staging_bytes"_a, "nonce"_a,
        "rank"_a, "device_ordinal"_a, "timeout_s"_a, "first_sequence"_a, "one_shot_bytes"_a);
  m.def("call_group", &jaxdp::call_group, "handle"_a, "rank"_a, "operation"_a, "dtypes"_a, "inputs"_a, "outputs"_a,
        "signature"_a);
  m.def("close_group", &jaxdp::close_group, "handle"_a);
  m.def("group_failure", &jaxdp::group_failure, "handle"_a);
  m.def("group_calls", &jaxdp::group_calls, "handle"_a, "rank"_a);
}

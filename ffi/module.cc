// The Python face of the native code: FFI registrations and communicator handles.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "jaxdp/group.h"
#include "jaxdp/handlers.h"

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
  m.def("close_group", &jaxdp::close_group, "handle"_a);
  m.def("group_failure", &jaxdp::group_failure, "handle"_a);
  m.def("group_calls", &jaxdp::group_calls, "handle"_a, "rank"_a);
}

// XLA FFI handlers of the GPU backends: check the buffers, build the call, enqueue it. Sequence and
// counters live in device memory, so XLA may capture the calls into graphs.
#include <string_view>

#include "jaxdp/gpu_group.h"
#include "jaxdp/handlers.h"
#include "jaxdp/lanes.h"

namespace jaxdp {
namespace {

ffi::Error error_of(const Status& status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kAborted, status.text());
}

ffi::Error error_of(gpu::Error error) {
  return error == gpu::kSuccess ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, gpu::message(error));
}

// `divided`: the operand before the lanes is the float32 that the root is divided by.
ffi::Error Collective(gpu::Stream stream, std::int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      std::int64_t group_handle, std::int32_t operation, std::int32_t world, std::int32_t lanes,
                      std::string_view signature, bool divided) {
  const auto group = find_gpu_group(group_handle);
  if (!group) return error_of(Status{StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."});
  const int rank = group->rank_of(ordinal);
  if (rank < 0) return error_of(not_a_member(ordinal));
  Call call{static_cast<Operation>(operation), {}, std::string(signature)};
  const ffi::Error error = read_lanes(call.operation, world, lanes, args, rets, &call.lanes);
  if (error.failure()) return error;
  const float* divisor = nullptr;
  if (divided) {
    const std::size_t place = args.size() - static_cast<std::size_t>(lanes) - 1;
    const auto operand = args.size() > static_cast<std::size_t>(lanes) ? args.get<ffi::BufferR0<ffi::F32>>(place)
                                                                       : args.get<ffi::BufferR0<ffi::F32>>(args.size());
    if (!operand.has_value()) return invalid("the divisor is not a float32 scalar");
    divisor = operand->typed_data();
  }
  return error_of(group->enqueue(rank, call, divisor, stream));
}

ffi::Error TreeSum(gpu::Stream stream, ffi::AnyBuffer input, ffi::Result<ffi::AnyBuffer> output) {
  const std::size_t elements = output->element_count();
  const auto dtype = reduction_dtype(input.element_type());
  const ffi::Error error = read_leading(input, elements, dtype);
  if (error.failure()) return error;
  const int world = static_cast<int>(input.dimensions()[0]);
  const void* inputs[kMaximumWorld];
  for (int rank = 0; rank < world; ++rank) {
    inputs[rank] = static_cast<const char*>(input.untyped_data()) + rank * elements * byte_width(*dtype);
  }
  return error_of(launch_tree_sum(*dtype, world, inputs, output->untyped_data(), elements, stream));
}

ffi::Error TreeSumMany(gpu::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets, std::int32_t world) {
  for (std::size_t lane = 0; lane < rets.size(); ++lane) {
    const void* inputs[kMaximumWorld];
    Lane sum;
    const ffi::Error error = read_siblings(args, rets, lane, world, inputs, &sum);
    if (error.failure()) return error;
    const gpu::Error launched = launch_tree_sum(sum.dtype, world, inputs, sum.output, sum.elements, stream);
    if (launched != gpu::kSuccess) return error_of(launched);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kCollective, Collective,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<gpu::Stream>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int64_t>("group")
                           .Attr<std::int32_t>("operation")
                           .Attr<std::int32_t>("world")
                           .Attr<std::int32_t>("lanes")
                           .Attr<std::string_view>("signature")
                           .Attr<bool>("divided"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kTreeSum, TreeSum,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<gpu::Stream>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kTreeSumMany, TreeSumMany,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<gpu::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int32_t>("world"),
                       {ffi::Traits::kCmdBufferCompatible});

const std::vector<HandlerEntry>& gpu_handlers() {
  static const std::vector<HandlerEntry> entries = {
      {"jaxdp_collective", reinterpret_cast<void*>(kCollective)},
      {"jaxdp_tree_sum", reinterpret_cast<void*>(kTreeSum)},
      {"jaxdp_tree_sum_many", reinterpret_cast<void*>(kTreeSumMany)},
  };
  return entries;
}

}  // namespace jaxdp

// XLA FFI handlers of the CPU backend: check the buffers, build the call, hand it to the group.
#include "jaxdp/handlers.h"

#include <memory>
#include <string_view>

#include "jaxdp/group.h"
#include "jaxdp/lanes.h"

namespace jaxdp {
namespace {

class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(ffi::ThreadPool& pool) : pool_(pool) {}
  int threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Calls that are ordered by data pass a uint32[1] before the lanes and return it.
void return_order(std::size_t lanes, ffi::RemainingRets rets) {
  if (rets.size() == lanes) return;
  auto order = rets.get<ffi::AnyBuffer>(0);
  if (order.has_value() && (*order)->element_type() == ffi::DataType::U32) {
    *static_cast<std::uint32_t*>((*order)->untyped_data()) = 0;
  }
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

ffi::Future Collective(std::int32_t ordinal, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       std::int64_t group_handle, std::int32_t operation, std::int32_t world, std::int32_t lanes,
                       std::string_view signature, bool divided) {
  if (divided) return failed(invalid("the CPU backend leaves the division to XLA"));
  const auto group = find_group(group_handle);
  if (!group) {
    const Status closed{StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."};
    return failed(ffi::Error(ffi::ErrorCode::kFailedPrecondition, closed.text()));
  }
  const int rank = group->rank_of(ordinal);
  if (rank < 0) return failed(ffi::Error(ffi::ErrorCode::kAborted, not_a_member(ordinal).text()));
  Call call{static_cast<Operation>(operation), {}, std::string(signature)};
  const ffi::Error error = read_lanes(call.operation, world, lanes, args, rets, &call.lanes);
  if (error.failure()) return failed(error);
  return_order(static_cast<std::size_t>(lanes), rets);

  ffi::Promise promise;
  ffi::Future future(promise);
  PoolExecutor executor(pool);
  const auto complete = [promise](const Status& status) mutable {
    if (status.ok()) return promise.SetAvailable();
    promise.SetError(ffi::Error(ffi::ErrorCode::kAborted, status.text()));
  };
  group->submit(rank, std::move(call), complete, executor);
  return future;
}

// The tree over the leading axis of one operand: what the rank-major route uses.
ffi::Error TreeSum(ffi::AnyBuffer input, ffi::Result<ffi::AnyBuffer> output) {
  const std::size_t elements = output->element_count();
  const auto dtype = reduction_dtype(input.element_type());
  const ffi::Error error = read_leading(input, elements, dtype);
  if (error.failure()) return error;
  const int world = static_cast<int>(input.dimensions()[0]);
  const void* inputs[kMaximumWorld];
  for (int rank = 0; rank < world; ++rank) {
    inputs[rank] = static_cast<const char*>(input.untyped_data()) + rank * elements * byte_width(*dtype);
  }
  void* result = output->untyped_data();
  tree_reduce(*dtype, world, inputs, 0, elements, &result, 1, 0);
  return ffi::Error::Success();
}

// Sibling subtrees held as separate arrays: what shards of one rank use.
ffi::Error TreeSumMany(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int32_t world) {
  for (std::size_t lane = 0; lane < rets.size(); ++lane) {
    const void* inputs[kMaximumWorld];
    Lane sum;
    const ffi::Error error = read_siblings(args, rets, lane, world, inputs, &sum);
    if (error.failure()) return error;
    tree_reduce(sum.dtype, world, inputs, 0, sum.elements, &sum.output, 1, 0);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kCollective, Collective,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::int64_t>("group")
                           .Attr<std::int32_t>("operation")
                           .Attr<std::int32_t>("world")
                           .Attr<std::int32_t>("lanes")
                           .Attr<std::string_view>("signature")
                           .Attr<bool>("divided"));
XLA_FFI_DEFINE_HANDLER(kTreeSum, TreeSum, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kTreeSumMany, TreeSumMany,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::int32_t>("world"));

const std::vector<HandlerEntry>& cpu_handlers() {
  static const std::vector<HandlerEntry> entries = {
      {"jaxdp_collective", reinterpret_cast<void*>(kCollective)},
      {"jaxdp_tree_sum", reinterpret_cast<void*>(kTreeSum)},
      {"jaxdp_tree_sum_many", reinterpret_cast<void*>(kTreeSumMany)},
  };
  return entries;
}

}  // namespace jaxdp

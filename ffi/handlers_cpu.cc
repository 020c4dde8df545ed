// XLA FFI handlers of the CPU backend: check the buffers, build the call, hand it to the group.
#include "jaxdp/handlers.h"

#include <memory>
#include <optional>
#include <string_view>

#include "jaxdp/group.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdp {
namespace ffi = xla::ffi;
namespace {

std::optional<DType> reduction_dtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return DType::kFloat32;
    case ffi::DataType::F16: return DType::kFloat16;
    case ffi::DataType::BF16: return DType::kBFloat16;
    default: return std::nullopt;
  }
}

ffi::Error invalid(std::string message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message)); }

class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(ffi::ThreadPool& pool) : pool_(pool) {}
  int threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Lanes are the last `lanes` operands and results; what orders the calls may stand before them. Each lane's
// result must hold what the operation gives, so that no kernel writes past a buffer.
ffi::Error read_lanes(Operation operation, int world, int lanes, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      std::vector<Lane>* out) {
  if (lanes < 0 || args.size() < static_cast<std::size_t>(lanes) || rets.size() < static_cast<std::size_t>(lanes)) {
    return invalid("lanes exceed the operands");
  }
  for (int i = 0; i < lanes; ++i) {
    const auto input = args.get<ffi::AnyBuffer>(args.size() - lanes + i);
    auto output = rets.get<ffi::AnyBuffer>(rets.size() - lanes + i);
    if (!input.has_value() || !output.has_value()) return invalid("a lane is not a buffer");
    const std::size_t elements = input->element_count(), results = (*output)->element_count();
    const bool fits = operation == Operation::kAllReduce       ? results == elements
                      : operation == Operation::kAllGather     ? results == elements * world
                      : operation == Operation::kReduceScatter ? results * world == elements
                                                               : false;
    if (!fits || input->element_type() != (*output)->element_type()) return invalid("a lane's result has another size");
    Lane lane{input->untyped_data(), (*output)->untyped_data(), elements, ffi::ByteWidth(input->element_type()), {}};
    if (operation != Operation::kAllGather) {
      const auto dtype = reduction_dtype(input->element_type());
      if (!dtype) return invalid("reductions take float32, float16 and bfloat16");
      lane.dtype = *dtype;
    }
    out->push_back(lane);
  }
  return ffi::Error::Success();
}

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
                       std::string_view signature) {
  const auto group = find_group(group_handle);
  if (!group) {
    const Status closed{StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."};
    return failed(ffi::Error(ffi::ErrorCode::kFailedPrecondition, closed.text()));
  }
  const int rank = group->rank_of(ordinal);
  if (rank < 0) return failed(invalid("device ordinal " + std::to_string(ordinal) + " is not in the communicator"));
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

// The tree over the leading axis of one operand: what the rank-major route and the local siblings
// of a shard tree use.
ffi::Error TreeSum(ffi::AnyBuffer input, ffi::Result<ffi::AnyBuffer> output) {
  const auto dtype = reduction_dtype(input.element_type());
  const std::size_t elements = output->element_count();
  const std::int64_t world = input.dimensions().size() ? input.dimensions()[0] : 0;
  if (!dtype || (world != 1 && world != 2 && world != 4 && world != 8) ||
      input.element_count() != elements * static_cast<std::size_t>(world)) {
    return invalid("tree_sum takes float32, float16 or bfloat16 with 1, 2, 4 or 8 rows");
  }
  const void* inputs[kMaximumWorld];
  for (std::int64_t rank = 0; rank < world; ++rank) {
    inputs[rank] = static_cast<const char*>(input.untyped_data()) + rank * elements * byte_width(*dtype);
  }
  void* result = output->untyped_data();
  tree_reduce(*dtype, static_cast<int>(world), inputs, 0, elements, &result, 1, 0);
  return ffi::Error::Success();
}

// Sibling subtrees held as separate arrays: operands are `world` runs of `lanes` arrays each.
ffi::Error TreeSumMany(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int32_t world) {
  const std::size_t lanes = rets.size();
  if ((world != 2 && world != 4 && world != 8) || args.size() != lanes * world) return invalid("siblings do not match");
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    auto output = rets.get<ffi::AnyBuffer>(lane);
    if (!output.has_value()) return invalid("a lane is not a buffer");
    const auto dtype = reduction_dtype((*output)->element_type());
    if (!dtype) return invalid("reductions take float32, float16 and bfloat16");
    const void* inputs[kMaximumWorld];
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const auto input = args.get<ffi::AnyBuffer>(rank * lanes + lane);
      if (!input.has_value() || input->element_type() != (*output)->element_type() ||
          input->element_count() != (*output)->element_count()) {
        return invalid("siblings do not match");
      }
      inputs[rank] = input->untyped_data();
    }
    void* result = (*output)->untyped_data();
    tree_reduce(*dtype, world, inputs, 0, (*output)->element_count(), &result, 1, 0);
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
                           .Attr<std::string_view>("signature"));
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

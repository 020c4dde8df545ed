// What every backend's handlers check in the buffers that XLA hands them.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "jaxdp/collective.h"
#include "xla/ffi/api/ffi.h"

namespace jaxdp {
namespace ffi = xla::ffi;

inline std::optional<DType> reduction_dtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32: return DType::kFloat32;
    case ffi::DataType::F16: return DType::kFloat16;
    case ffi::DataType::BF16: return DType::kBFloat16;
    default: return std::nullopt;
  }
}

inline ffi::Error invalid(std::string message) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message)); }

// Lanes are the last `lanes` operands and results; what orders the calls may stand before them. Each lane's
// result must hold what the operation gives, so that no kernel writes past a buffer.
inline ffi::Error read_lanes(Operation operation, int world, int lanes, ffi::RemainingArgs args, ffi::RemainingRets rets,
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

// What the handler of one operand with a leading axis of ranks checks.
inline ffi::Error read_leading(const ffi::AnyBuffer& input, std::size_t elements, std::optional<DType> dtype) {
  const std::int64_t world = input.dimensions().size() ? input.dimensions()[0] : 0;
  if (!dtype || (world != 1 && world != 2 && world != 4 && world != 8) ||
      input.element_count() != elements * static_cast<std::size_t>(world)) {
    return invalid("tree_sum takes float32, float16 or bfloat16 with 1, 2, 4 or 8 rows");
  }
  return ffi::Error::Success();
}

// One lane of siblings held as separate arrays: operands are `world` runs of `lanes` arrays each.
inline ffi::Error read_siblings(ffi::RemainingArgs args, ffi::RemainingRets rets, std::size_t lane, std::int32_t world,
                                const void** inputs, Lane* out) {
  const std::size_t lanes = rets.size();
  if ((world != 2 && world != 4 && world != 8) || args.size() != lanes * static_cast<std::size_t>(world)) {
    return invalid("siblings do not match");
  }
  auto output = rets.get<ffi::AnyBuffer>(lane);
  if (!output.has_value()) return invalid("a lane is not a buffer");
  const auto dtype = reduction_dtype((*output)->element_type());
  if (!dtype) return invalid("reductions take float32, float16 and bfloat16");
  for (std::int32_t rank = 0; rank < world; ++rank) {
    const auto input = args.get<ffi::AnyBuffer>(static_cast<std::size_t>(rank) * lanes + lane);
    if (!input.has_value() || input->element_type() != (*output)->element_type() ||
        input->element_count() != (*output)->element_count()) {
      return invalid("siblings do not match");
    }
    inputs[rank] = input->untyped_data();
  }
  *out = {nullptr, (*output)->untyped_data(), (*output)->element_count(), byte_width(*dtype), *dtype};
  return ffi::Error::Success();
}

}  // namespace jaxdp

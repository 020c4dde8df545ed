// Launchers of the device kernels: no XLA type and no group here.
#pragma once

#include "jaxdp/collective.h"
#include "jaxdp/ring.h"
#include "jaxdp/vendor_runtime.h"

namespace jaxdp {

// Enqueues one collective of a rank. Lanes are in `table`, where the launcher sets how the call is cut;
// `dtype` is read by reductions alone.
gpu::Error launch_collective(Operation operation, int world, DType dtype, const Peers& peers, LaneTable& table,
                             int maximum_blocks, gpu::Stream stream);

// Enqueues T over `siblings` arrays of `elements` each.
gpu::Error launch_tree_sum(DType dtype, int siblings, const void* const* inputs, void* output, std::size_t elements,
                           gpu::Stream stream);

// Loads every kernel on the current device: a load while a peer spins would deadlock.
gpu::Error load_kernels();

}  // namespace jaxdp

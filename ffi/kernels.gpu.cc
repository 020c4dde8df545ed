// Device code of the collectives, one source for HIP (gfx942) and CUDA (sm_90).
//
// A rank pushes its chunks straight from the input array into its peers' rings and adds what has
// arrived in its own: the pack is the push, and nothing is staged, concatenated or copied besides.
#include "jaxdp/gpu_kernels.h"

#include <type_traits>

#include "jaxdp/tree.h"

namespace jaxdp {
namespace {

// 16 bytes of a lane, as the operation sees them.
template <class T>
struct Vector {
  static constexpr int kElements = kVectorBytes / sizeof(T);
  T values[kElements];
};

struct Byte {
  std::uint8_t bits;
};

template <int W, class T>
__device__ __forceinline__ Vector<T> tree_sum_vector(const Vector<T>* x) {
  Vector<T> result;
#pragma unroll
  for (int i = 0; i < Vector<T>::kElements; ++i) {
    T column[W];
#pragma unroll
    for (int rank = 0; rank < W; ++rank) column[rank] = x[rank].values[i];
    result.values[i] = tree_sum<W>(column);
  }
  return result;
}

// Float16 two at a time. The packed add gives the same bits as the scalar one but for NaNs, which
// are made canonical at the root.
template <int W>
__device__ __forceinline__ std::uint32_t packed_subtree(const std::uint32_t* x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    return add_packed_float16(packed_subtree<W / 2>(x), packed_subtree<W / 2>(x + W / 2));
  }
}

__device__ __forceinline__ std::uint32_t canonical_pair(std::uint32_t pair) {
  const std::uint32_t low = (pair & 0x7FFFu) > 0x7C00u ? 0x7E00u : pair & 0xFFFFu;
  const std::uint32_t high = ((pair >> 16) & 0x7FFFu) > 0x7C00u ? 0x7E00u : pair >> 16;
  return low | (high << 16);
}

template <int W>
__device__ __forceinline__ Vector<Float16> tree_sum_packed(const Vector<Float16>* x) {
  struct Pairs {
    std::uint32_t values[4];
  };
  Pairs result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t column[W];
#pragma unroll
    for (int rank = 0; rank < W; ++rank) column[rank] = bit_cast<Pairs>(x[rank]).values[i];
    result.values[i] = canonical_pair(packed_subtree<W>(column));
  }
  return bit_cast<Vector<Float16>>(result);
}

__device__ __forceinline__ float divide(float x, float divisor) { return x / divisor; }
__device__ __forceinline__ Float16 divide(Float16 x, float divisor) {
  return Narrow<Float16>::round(widen(x) / divisor);
}
__device__ __forceinline__ BFloat16 divide(BFloat16 x, float divisor) {
  return Narrow<BFloat16>::round(widen(x) / divisor);
}

// Elements [first, first + kElements) of an array of `size`, zeros beyond its end. Sixteen bytes at
// once where the place allows it; the choice cannot change a bit.
template <class T>
__device__ __forceinline__ Vector<T> load_elements(const T* array, std::uint64_t first, std::uint64_t size) {
  const T* place = array + first;
  if (first + Vector<T>::kElements <= size && reinterpret_cast<std::uintptr_t>(place) % kVectorBytes == 0) {
    return bit_cast<Vector<T>>(*reinterpret_cast<const uint4*>(place));
  }
  Vector<T> result;
#pragma unroll
  for (int i = 0; i < Vector<T>::kElements; ++i) result.values[i] = first + i < size ? place[i] : T{};
  return result;
}

template <class T>
__device__ __forceinline__ void store_elements(T* array, std::uint64_t first, std::uint64_t size, Vector<T> vector) {
  T* place = array + first;
  if (first + Vector<T>::kElements <= size && reinterpret_cast<std::uintptr_t>(place) % kVectorBytes == 0) {
    *reinterpret_cast<uint4*>(place) = bit_cast<uint4>(vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < Vector<T>::kElements; ++i) {
    if (first + i < size) place[i] = vector.values[i];
  }
}

// The lane of a vector of the call's space.
__device__ __forceinline__ int find_lane(const LaneTable& table, std::uint64_t vector) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_vector[middle] <= vector) low = middle; else high = middle - 1;
  }
  return low;
}

// One block's part of one call.
template <Operation operation, int W, class T>
class Block {
 public:
  __device__ Block(const Peers& peers, const LaneTable& table)
      : peers_(peers), table_(table), first_(peers.state->chunks[blockIdx.x]), sequence_(peers.state->calls) {}

  __device__ void run() {
    const std::uint64_t vectors = table_.first_vector[table_.count];
    const std::uint64_t chunks = (vectors + chunk_vectors() - 1) / chunk_vectors();
    const std::uint64_t mine = chunks > blockIdx.x ? (chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
    // A call without elements is still a meeting: its one chunk is empty.
    const std::uint64_t turns = mine == 0 && blockIdx.x == 0 ? 1 : mine;
    for (std::uint64_t turn = 0; turn <= turns; ++turn) {
      if (turn < turns && !push(turn)) return;
      if (turn > 0 && !consume(turn - 1)) return;
    }
    finish(turns);
  }

 private:
  __device__ std::uint64_t chunk_vectors() const {
    return static_cast<std::uint64_t>(kThreads) * table_.vectors_per_thread;
  }
  __device__ std::uint64_t vector_of(std::uint64_t turn, int u) const {
    return (blockIdx.x + turn * gridDim.x) * chunk_vectors() + u * kThreads + threadIdx.x;
  }

  __device__ bool push(std::uint64_t turn) {
    const std::uint64_t chunk = first_ + turn;
    if (chunk + 1 > kRingDepth && !wait_all(&RingWords::done, chunk + 1 - kRingDepth)) return false;
    if (turn == 0) announce(chunk);
#pragma unroll
    for (int u = 0; u < kVectorsPerThread; ++u) {
      const std::uint64_t vector = vector_of(turn, u);
      if (u >= table_.vectors_per_thread || vector >= table_.first_vector[table_.count]) break;
      const int lane = find_lane(table_, vector);
      const std::uint64_t element = (vector - table_.first_vector[lane]) * Vector<T>::kElements;
      push_vector(lane, element, chunk, u);
    }
    settle_stores();
    __syncthreads();
    tell(&RingWords::ready, chunk + 1);
    return true;
  }

  // Stands beside the first chunk's slot, whose release covers it.
  __device__ void announce(std::uint64_t chunk) const {
    if (threadIdx.x < W && static_cast<int>(threadIdx.x) != peers_.rank) {
      peers_.words[threadIdx.x]->signature[peers_.rank][blockIdx.x][chunk % kRingDepth] = table_.signature;
    }
  }

  __device__ void push_vector(int lane, std::uint64_t element, std::uint64_t chunk, int u) const {
    const std::uint64_t size = table_.elements[lane];
    const T* input = static_cast<const T*>(table_.inputs[lane]);
    Vector<T> own;
    if constexpr (operation != Operation::kReduceScatter) own = load_elements(input, element, size);
#pragma unroll
    for (int step = 1; step < W; ++step) {
      const int peer = (peers_.rank + step) % W;  // rotated, so that every link is busy
      if constexpr (operation == Operation::kReduceScatter) own = load_elements(input + peer * size, element, size);
      *slot(peers_.rings[peer], peers_.rank, chunk, u) = bit_cast<uint4>(own);
    }
  }

  __device__ bool consume(std::uint64_t turn) {
    const std::uint64_t chunk = first_ + turn;
    if (!wait_all(&RingWords::ready, chunk + 1)) return false;
    if (turn == 0 && !signatures_agree(chunk)) return false;
#pragma unroll(W == 8 ? 1 : kVectorsPerThread)
    for (int u = 0; u < kVectorsPerThread; ++u) {
      const std::uint64_t vector = vector_of(turn, u);
      if (u >= table_.vectors_per_thread || vector >= table_.first_vector[table_.count]) break;
      const int lane = find_lane(table_, vector);
      const std::uint64_t element = (vector - table_.first_vector[lane]) * Vector<T>::kElements;
      consume_vector(lane, element, chunk, u);
    }
    __syncthreads();
    tell(&RingWords::done, chunk + 1);
    return true;
  }

  __device__ void consume_vector(int lane, std::uint64_t element, std::uint64_t chunk, int u) const {
    const std::uint64_t size = table_.elements[lane];
    const T* input = static_cast<const T*>(table_.inputs[lane]);
    const int block = operation == Operation::kReduceScatter ? peers_.rank : 0;
    Vector<T> values[W];
#pragma unroll
    for (int rank = 0; rank < W; ++rank) {
      values[rank] = rank == peers_.rank
                         ? load_elements(input + block * size, element, size)
                         : bit_cast<Vector<T>>(load_from_peers(slot(peers_.rings[peers_.rank], rank, chunk, u)));
    }
    T* output = static_cast<T*>(table_.outputs[lane]);
    if constexpr (operation == Operation::kAllGather) {
#pragma unroll
      for (int rank = 0; rank < W; ++rank) store_elements(output + rank * size, element, size, values[rank]);
    } else if constexpr (operation != Operation::kBarrier) {
      Vector<T> sum = sum_of(values);
      if (operation == Operation::kAllReduce && table_.divisor != nullptr) {
        const float divisor = *table_.divisor;
#pragma unroll
        for (int i = 0; i < Vector<T>::kElements; ++i) sum.values[i] = divide(sum.values[i], divisor);
      }
      store_elements(output, element, size, sum);
    }
  }

  __device__ static Vector<T> sum_of(const Vector<T>* values) {
    if constexpr (std::is_same_v<T, Float16> && W > 1) {
      return tree_sum_packed<W>(values);
    } else {
      return tree_sum_vector<W, T>(values);
    }
  }

  __device__ static uint4* slot(char* rings, int sender, std::uint64_t chunk, int u) {
    char* base = rings + slot_offset(sender, static_cast<int>(blockIdx.x), chunk);
    return reinterpret_cast<uint4*>(base) + u * kThreads + threadIdx.x;
  }

  // Publishes `count` in every peer's word that belongs to this rank and block.
  __device__ void tell(Word (RingWords::*words)[kMaximumRanks][kMaximumBlocks], std::uint64_t count) const {
    if (threadIdx.x < W && static_cast<int>(threadIdx.x) != peers_.rank) {
      publish((peers_.words[threadIdx.x]->*words)[peers_.rank][blockIdx.x], count);
    }
  }

  // Waits until every peer's word here has reached `count`; one thread a peer. False after the
  // deadline or once any block of this rank has failed.
  __device__ bool wait_all(Word (RingWords::*words)[kMaximumRanks][kMaximumBlocks], std::uint64_t count) const {
    bool arrived = true;
    if (threadIdx.x < W && static_cast<int>(threadIdx.x) != peers_.rank) {
      const Word& word = (peers_.words[peers_.rank]->*words)[threadIdx.x][blockIdx.x];
      const std::uint64_t deadline = clock_ns() + peers_.timeout_ns;
      unsigned looks = 0;
      arrived = await(word, count, [&] {
        return (++looks & 1023u) != 0 || (clock_ns() < deadline && load_acquire_system(&peers_.state->failed) == 0);
      });
      if (!arrived) fail(StatusKind::kCollectiveTimeout, 1ull << threadIdx.x, 0);
    }
    return __syncthreads_and(arrived) != 0;
  }

  __device__ bool signatures_agree(std::uint64_t chunk) const {
    bool same = true;
    if (threadIdx.x < W && static_cast<int>(threadIdx.x) != peers_.rank) {
      const std::uint64_t other = peers_.words[peers_.rank]->signature[threadIdx.x][blockIdx.x][chunk % kRingDepth];
      same = other == table_.signature;
      if (!same) fail(StatusKind::kRankMismatch, 1ull << threadIdx.x, other);
    }
    return __syncthreads_and(same) != 0;
  }

  // The first cause stays; later ones only add the ranks that they missed.
  __device__ void fail(StatusKind kind, std::uint64_t missing, std::uint64_t signature) const {
    auto* state = reinterpret_cast<unsigned long long*>(&peers_.state->failed);
    if (atomicCAS(state, 0ull, 1ull) == 0ull) {
      peers_.status->sequence = sequence_;
      peers_.status->signature = signature;
      peers_.status->missing = missing;
      store_release_system(&peers_.status->kind, static_cast<std::uint64_t>(kind));
    }
  }

  __device__ void finish(std::uint64_t turns) const {
    if (threadIdx.x != 0) return;
    peers_.state->chunks[blockIdx.x] = first_ + turns;
    auto* finished = reinterpret_cast<unsigned long long*>(&peers_.state->finished_blocks);
    if (atomicAdd(finished, 1ull) + 1 == gridDim.x) {  // the last block: no other reads these any more
      peers_.state->finished_blocks = 0;
      peers_.state->calls = sequence_ + 1;
    }
  }

  const Peers& peers_;
  const LaneTable& table_;
  const std::uint64_t first_, sequence_;
};

template <Operation operation, int W, class T>
__global__ void __launch_bounds__(kThreads, resident_blocks_per_multiprocessor(W)) collective_kernel(const __grid_constant__ Peers peers,
                                                              const __grid_constant__ LaneTable table) {
  // Written by an earlier launch, or by a failing block of this one, which then exits as well.
  if (load_acquire_system(&peers.state->failed) != 0) return;
  Block<operation, W, T>(peers, table).run();
}

struct Siblings {
  const void* inputs[kMaximumRanks];
};

template <int W, class T>
__global__ void __launch_bounds__(kThreads) tree_sum_kernel(Siblings siblings, T* output, std::uint64_t elements) {
  const std::uint64_t first = (static_cast<std::uint64_t>(blockIdx.x) * kThreads + threadIdx.x) * Vector<T>::kElements;
  if (first >= elements) return;
  Vector<T> values[W];
#pragma unroll
  for (int rank = 0; rank < W; ++rank) {
    values[rank] = load_elements(static_cast<const T*>(siblings.inputs[rank]), first, elements);
  }
  store_elements(output, first, elements, tree_sum_vector<W, T>(values));
}

template <Operation operation, int W, class T>
gpu::Error launch(const Peers& peers, const LaneTable& table, int blocks, gpu::Stream stream) {
  collective_kernel<operation, W, T><<<blocks, kThreads, 0, stream>>>(peers, table);
  return gpu::last_error();
}

template <Operation operation, class T>
gpu::Error launch_world(int world, const Peers& peers, const LaneTable& table, int blocks, gpu::Stream stream) {
  switch (world) {
    case 2: return launch<operation, 2, T>(peers, table, blocks, stream);
    case 4: return launch<operation, 4, T>(peers, table, blocks, stream);
    default: return launch<operation, 8, T>(peers, table, blocks, stream);
  }
}

template <Operation operation>
gpu::Error launch_reduction(DType dtype, int world, const Peers& peers, const LaneTable& table, int blocks,
                            gpu::Stream stream) {
  switch (dtype) {
    case DType::kFloat32: return launch_world<operation, float>(world, peers, table, blocks, stream);
    case DType::kFloat16: return launch_world<operation, Float16>(world, peers, table, blocks, stream);
    default: return launch_world<operation, BFloat16>(world, peers, table, blocks, stream);
  }
}

template <class T>
gpu::Error launch_siblings(int count, const Siblings& siblings, void* output, std::size_t elements, gpu::Stream stream) {
  const std::size_t per_block = static_cast<std::size_t>(kThreads) * Vector<T>::kElements;
  const unsigned blocks = static_cast<unsigned>((elements + per_block - 1) / per_block);
  T* result = static_cast<T*>(output);
  switch (count) {
    case 1: tree_sum_kernel<1, T><<<blocks, kThreads, 0, stream>>>(siblings, result, elements); break;
    case 2: tree_sum_kernel<2, T><<<blocks, kThreads, 0, stream>>>(siblings, result, elements); break;
    case 4: tree_sum_kernel<4, T><<<blocks, kThreads, 0, stream>>>(siblings, result, elements); break;
    default: tree_sum_kernel<8, T><<<blocks, kThreads, 0, stream>>>(siblings, result, elements); break;
  }
  return gpu::last_error();
}

template <class Kernel>
void load(Kernel* kernel, gpu::Error* error) {
  if (*error == gpu::kSuccess) *error = gpu::load_kernel(reinterpret_cast<const void*>(kernel));
}

template <int W>
void load_world(gpu::Error* error) {
  load(collective_kernel<Operation::kAllReduce, W, float>, error);
  load(collective_kernel<Operation::kAllReduce, W, Float16>, error);
  load(collective_kernel<Operation::kAllReduce, W, BFloat16>, error);
  load(collective_kernel<Operation::kReduceScatter, W, float>, error);
  load(collective_kernel<Operation::kReduceScatter, W, Float16>, error);
  load(collective_kernel<Operation::kReduceScatter, W, BFloat16>, error);
  load(collective_kernel<Operation::kAllGather, W, Byte>, error);
  load(collective_kernel<Operation::kBarrier, W, Byte>, error);
}

}  // namespace

gpu::Error load_kernels() {
  gpu::Error error = gpu::kSuccess;
#if defined(JAXDP_TUNING)  // bench/gpu_tune.sh: one kernel, quickly compiled
  load(collective_kernel<Operation::kAllReduce, 2, float>, &error);
#else
  load_world<2>(&error);
  load_world<4>(&error);
  load_world<8>(&error);
#endif
  return error;
}

gpu::Error launch_collective(Operation operation, int world, DType dtype, const Peers& peers, LaneTable& table,
                             int maximum_blocks, gpu::Stream stream) {
  const std::uint64_t vectors = table.first_vector[table.count];
  const int limit = maximum_blocks < kMaximumBlocks ? maximum_blocks : kMaximumBlocks;
  const std::uint64_t threads = static_cast<std::uint64_t>(limit) * kThreads;
  table.vectors_per_thread = vectors <= threads ? 1 : vectors <= 2 * threads ? 2 : kVectorsPerThread;
  const std::uint64_t chunk = static_cast<std::uint64_t>(kThreads) * table.vectors_per_thread;
  const std::uint64_t chunks = (vectors + chunk - 1) / chunk;
  const int blocks = chunks < 1 ? 1 : chunks < static_cast<std::uint64_t>(limit) ? static_cast<int>(chunks) : limit;
#if defined(JAXDP_TUNING)
  (void)operation, (void)world, (void)dtype;
  return launch<Operation::kAllReduce, 2, float>(peers, table, blocks, stream);
#endif
  switch (operation) {
    case Operation::kAllReduce:
      return launch_reduction<Operation::kAllReduce>(dtype, world, peers, table, blocks, stream);
    case Operation::kReduceScatter:
      return launch_reduction<Operation::kReduceScatter>(dtype, world, peers, table, blocks, stream);
    case Operation::kAllGather:
      return launch_world<Operation::kAllGather, Byte>(world, peers, table, blocks, stream);
    default: return launch_world<Operation::kBarrier, Byte>(world, peers, table, blocks, stream);
  }
}

gpu::Error launch_tree_sum(DType dtype, int siblings, const void* const* inputs, void* output, std::size_t elements,
                           gpu::Stream stream) {
  if (elements == 0) return gpu::kSuccess;
  Siblings operands{};
  for (int i = 0; i < siblings; ++i) operands.inputs[i] = inputs[i];
  switch (dtype) {
    case DType::kFloat32: return launch_siblings<float>(siblings, operands, output, elements, stream);
    case DType::kFloat16: return launch_siblings<Float16>(siblings, operands, output, elements, stream);
    default: return launch_siblings<BFloat16>(siblings, operands, output, elements, stream);
  }
}

}  // namespace jaxdp

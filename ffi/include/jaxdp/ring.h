// How GPU ranks meet: per block, a ring of chunks in the receiver's memory, with credits.
//
// Block b of every rank talks only to block b of the others. Rank s counts the chunks that its block
// b has sent since the communicator began (64-bit, never reset, compared with >=). Chunk c goes into
// slot c % kDepth of the ring that receiver p keeps for (sender s, block b):
//
//   await(done[p] >= c + 1 - kDepth)   acquires p's statement that it has read the slot's last use
//   write the chunk into p's slot      remote stores: nothing waits for an answer over the link
//   publish(ready of s at p, c + 1)    releases the chunk
//
//   await(ready of s >= c + 1)         acquires the chunk (p polls its own memory)
//   read the slot
//   publish(done of p at s, c + 1)     releases the slot
//
// A ring belongs to one block number, so launches may change their grid from call to call, messages
// may be larger than the rings, and the rings stay in the second-level cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "jaxdp/protocol.h"

namespace jaxdp {

// H200 x 2, 2026-11-30, bench/gpu_tune.sh: at 128 MiB 256 blocks took 441 us, 128 blocks 583 and 64
// blocks 856 (bytes in flight are what counts); a depth of 2 is as good as 4 and takes half the memory.
#if !defined(JAXDP_TUNING)
#define JAXDP_RING_DEPTH 2
#define JAXDP_MAXIMUM_BLOCKS 256
#define JAXDP_VECTORS_PER_THREAD 4
#define JAXDP_THREADS 512
#endif
inline constexpr int kRingDepth = JAXDP_RING_DEPTH;
inline constexpr int kMaximumBlocks = JAXDP_MAXIMUM_BLOCKS;
inline constexpr int kThreads = JAXDP_THREADS;
inline constexpr int kVectorsPerThread = JAXDP_VECTORS_PER_THREAD;
inline constexpr int kChunkVectors = kThreads * kVectorsPerThread;
inline constexpr std::size_t kVectorBytes = 16;
inline constexpr std::size_t kChunkBytes = kChunkVectors * kVectorBytes;
inline constexpr int kMaximumRanks = 8;
inline constexpr int kMaximumLanes = 64;

// The words that peers write into one rank's memory. Each has one writer.
struct RingWords {
  Word ready[kMaximumRanks][kMaximumBlocks];          // [sender][block]: chunks that have arrived
  Word done[kMaximumRanks][kMaximumBlocks];           // [receiver][block]: chunks it has read
  // [sender][block][slot]: of the call whose first chunk is in the slot; released with that chunk.
  std::uint64_t signature[kMaximumRanks][kMaximumBlocks][kRingDepth];
  Word closed[kMaximumRanks];  // [peer]: 1: the peer touches this memory no more
};

// Blocks that wait for peers must all be resident. Two of these blocks fit a multiprocessor in
// worlds of 2, where a thread needs at most 64 registers; in larger worlds one does.
inline constexpr int resident_blocks_per_multiprocessor(int world) { return world == 2 ? 2 : 1; }

// Bytes of the rings that one rank keeps for all senders and blocks.
inline constexpr std::size_t ring_bytes(int world) {
  return static_cast<std::size_t>(world) * kMaximumBlocks * kRingDepth * kChunkBytes;
}

JAXDP_HOST_DEVICE std::size_t slot_offset(int sender, int block, std::uint64_t chunk) {
  const std::size_t ring = static_cast<std::size_t>(sender) * kMaximumBlocks + static_cast<std::size_t>(block);
  return (ring * kRingDepth + static_cast<std::size_t>(chunk % kRingDepth)) * kChunkBytes;
}

// What a failed wait leaves for the host, in memory that both see.
struct DeviceStatus {
  std::uint64_t kind;       // a StatusKind; 0: none
  std::uint64_t sequence;   // the call
  std::uint64_t missing;    // bit r: rank r was waited for
  std::uint64_t signature;  // the other's hash, for a mismatch
};

// One rank's own counters, in its device's memory.
struct RankState {
  std::uint64_t chunks[kMaximumBlocks];  // sent, by block
  std::uint64_t calls;
  std::uint64_t finished_blocks;
  std::uint64_t failed;  // 1: every later launch returns at once
};

// A rank's view of the communicator; travels as a kernel parameter.
struct Peers {
  int rank;
  char* rings[kMaximumRanks];        // rings[p]: rank p's rings, as mapped here
  RingWords* words[kMaximumRanks];   // words[p]: rank p's words
  RankState* state;
  DeviceStatus* status;
  std::uint64_t timeout_ns;
};

// The arrays of one call. `first_vector[i]` is where lane i starts in the call's space of 16-byte
// vectors; the last vector of a lane may be partly used.
struct LaneTable {
  int count;
  const void* inputs[kMaximumLanes];
  void* outputs[kMaximumLanes];
  std::uint64_t elements[kMaximumLanes];  // of one block of the operation (all_gather: of the input)
  std::uint64_t first_vector[kMaximumLanes + 1];
  int vectors_per_thread;  // 1 to kVectorsPerThread: small messages spread over more blocks
  const float* divisor;  // all_reduce: the root is divided by it; null: not divided
  std::uint64_t signature;
};

}  // namespace jaxdp

// How ranks that share memory, and nothing else, run one collective after another. Layout and rules
// stand here once, for host and device.
//
// Every rank owns one segment that its peers map: a control block, then two payload buffers. Time is
// counted in generations, 64-bit and monotonic from the group's first sequence on: never reset, and
// only ever compared with >=. Each generation g of rank r runs
//
//   write payload g into buffer parity(g)          (and the call's signature into slot parity(g))
//   publish(ready, g)        releases that payload and signature
//   await(ready of all, g)   acquires every peer's
//   read the peers' buffers
//
// and a two-shot all_reduce goes on with
//
//   publish(reduced, g)      releases the share of the sum that r wrote into its buffer parity(g)
//   await(reduced of all, g) acquires every peer's share
//   read the peers' shares
//
// Parity. A rank publishes g + 1 only after its last read of generation g, and it writes generation
// g + 2 only after it has seen every rank publish g + 1. So no peer still reads buffer parity(g) or
// slot parity(g) when they are written again, and one barrier a generation is enough.
#pragma once

#include <cstddef>
#include <cstdint>

#include "jaxdp/vendor.h"

namespace jaxdp {

inline constexpr std::uint64_t kSegmentMagic = 0x3130637069706478;  // "xdpipc01"
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kSignatureText = 1000;
inline constexpr std::size_t kFailureText = 4000;  // two signatures and the sentence around them

// After every generation: a wait for it ends with every failure that a peer has reported.
inline constexpr std::uint64_t kLastGeneration = ~std::uint64_t{0};

// A control word alone on its cache line. Only the segment's owner writes it.
struct alignas(kCacheLine) Word {
  std::uint64_t value;
};

// What a rank calls in one generation. `text` holds the first bytes of the signature, `bytes` its
// whole length and `hash` all of it.
struct Signature {
  std::uint64_t hash, sequence, bytes;
  char text[kSignatureText];
};

// Why a rank failed; written once, before `failed` is published.
struct FailureRecord {
  std::uint64_t kind, rank, bytes;  // `rank` saw the cause first
  char text[kFailureText];
};

// Memory that a new segment holds is zero, and zero is a valid control block before any generation.
struct Control {
  std::uint64_t magic, nonce, rank, world, staging_bytes;
  Word joined;    // 1: the owner has mapped every peer's segment
  Word ready;     // the newest generation whose payload is there
  Word reduced;   // the newest generation whose share of the sum is there
  Word failed;    // not 0: the generation that the owner could not finish; `failure` says why
  Word closed;    // kLastGeneration: the owner reads no peer's segment any more
  alignas(kCacheLine) Signature signatures[2];
  alignas(kCacheLine) FailureRecord failure;
};

JAXDP_HOST_DEVICE int parity(std::uint64_t generation) {
#if defined(JAXDP_BREAK_PARITY)  // test builds only: one buffer, written again while peers read it
  return static_cast<int>(generation & 0);
#else
  return static_cast<int>(generation & 1);
#endif
}

// Test builds may leave out the barrier between a share's sum and its readers.
#if defined(JAXDP_BREAK_SECOND_BARRIER)
inline constexpr bool kSecondBarrier = false;
#else
inline constexpr bool kSecondBarrier = true;
#endif

// Releases everything that the owner wrote before.
JAXDP_HOST_DEVICE void publish(Word& word, std::uint64_t generation) {
  store_release_system(&word.value, generation);
}

// When true, acquires everything that the owner wrote before it published `generation`.
JAXDP_HOST_DEVICE bool reached(const Word& word, std::uint64_t generation) {
  return load_acquire_system(&word.value) >= generation;
}

// Waits until `word` reaches `generation` or `turn()`, called between looks, returns false: `turn`
// holds the deadline. The last look comes after the last turn, so that a peer which published and
// then failed or died counts as arrived.
template <class Turn>
JAXDP_HOST_DEVICE bool await(const Word& word, std::uint64_t generation, Turn&& turn) {
  while (!reached(word, generation)) {
    if (!turn()) return reached(word, generation);
  }
  return true;
}

}  // namespace jaxdp

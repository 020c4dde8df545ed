// How a call goes through staging: which elements travel in which generation (pure), and what a rank
// copies in, adds and copies out in one. Cutting is elementwise, so it cannot change a bit.
#pragma once

#include <cstddef>
#include <vector>

#include "jaxdp/collective.h"

namespace jaxdp {

// Elements [begin, begin + count) of one lane; in a reduce_scatter, of each of its blocks. They
// start `offset` bytes into every rank's staging buffer.
struct Piece {
  std::size_t lane, begin, count, offset;
};

using Chunk = std::vector<Piece>;  // what one generation carries

// Cuts a call into chunks that fit `staging_bytes`. At least one, so that an empty call and a barrier
// meet their peers too. A function of operation, lane sizes, world and staging_bytes alone: equal on
// all ranks whose signatures are.
std::vector<Chunk> plan_chunks(const Call& call, int world, std::size_t staging_bytes);

// A rank's view of one generation's buffers.
struct Staging {
  int rank, world;
  char* buffers[kMaximumWorld];  // rank order
};

// One-shot: every rank copies what its peers need, and after the barrier makes its result alone.
void copy_in(const Call& call, const Chunk& chunk, const Staging& staging);
void make_result(const Call& call, const Chunk& chunk, const Staging& staging);

// Two-shot all_reduce: each rank adds one share of the elements, and after a second barrier copies the
// shares of the others. Moves 2 N bytes a rank where one-shot moves W N.
void copy_in_shares(const Call& call, const Chunk& chunk, const Staging& staging);
void add_own_share(const Call& call, const Chunk& chunk, const Staging& staging);
void copy_out_shares(const Call& call, const Chunk& chunk, const Staging& staging);

}  // namespace jaxdp

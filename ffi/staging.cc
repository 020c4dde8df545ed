#include "jaxdp/staging.h"

#include <algorithm>
#include <cstring>

#include "jaxdp/protocol.h"

namespace jaxdp {
namespace {

const char* at(const void* base, std::size_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }

constexpr std::size_t round_up(std::size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Elements that a full cache line holds.
std::size_t line_elements(const Lane& lane) { return std::max<std::size_t>(1, kCacheLine / lane.width); }

struct Share {
  std::size_t begin, count;
};

// Rank's part of `count` elements: whole cache lines, so that no two ranks write one line.
Share share_of(std::size_t count, std::size_t line, int rank, int world) {
  const std::size_t lines = (count + line - 1) / line;
  const std::size_t begin = std::min(count, lines * rank / world * line);
  const std::size_t end = std::min(count, lines * (rank + 1) / world * line);
  return {begin, end - begin};
}

// The peers of a rank, each rank beginning with its next: no two read the same segment at once.
template <class Visit>
void for_each_peer(const Staging& staging, Visit&& visit) {
  for (int step = 1; step < staging.world; ++step) visit((staging.rank + step) % staging.world);
}

void gather(const Lane& lane, const Piece& piece, const Staging& staging) {
  const std::size_t bytes = piece.count * lane.width;
  const auto result = [&](int rank) { return at(lane.output, (rank * lane.elements + piece.begin) * lane.width); };
  std::memcpy(result(staging.rank), at(lane.input, piece.begin * lane.width), bytes);
  for_each_peer(staging, [&](int peer) { std::memcpy(result(peer), staging.buffers[peer] + piece.offset, bytes); });
}

// Adds `count` elements that start `offset` bytes into the peers' buffers; this rank's own are read
// where they are.
void add(const Lane& lane, const Staging& staging, std::size_t offset, const void* own, std::size_t count,
         void* const* outputs, int output_count) {
  const void* inputs[kMaximumWorld];
  for (int rank = 0; rank < staging.world; ++rank) inputs[rank] = staging.buffers[rank] + offset;
  inputs[staging.rank] = own;
  tree_reduce(lane.dtype, staging.world, inputs, 0, count, outputs, output_count, 0);
}

}  // namespace

std::vector<Chunk> plan_chunks(const Call& call, int world, std::size_t staging_bytes) {
  std::vector<Chunk> chunks(1);
  const std::size_t blocks = call.operation == Operation::kReduceScatter ? world : 1;
  std::size_t used = 0;
  for (std::size_t index = 0; index < call.lanes.size(); ++index) {
    const Lane& lane = call.lanes[index];
    const std::size_t elements = lane.elements / blocks, line = line_elements(lane);
    for (std::size_t begin = 0; begin < elements;) {
      const std::size_t room = (staging_bytes - used) / (blocks * lane.width) / line * line;
      if (room == 0) {
        chunks.emplace_back();
        used = 0;
        continue;
      }
      const std::size_t count = std::min(room, elements - begin);
      chunks.back().push_back({index, begin, count, used});
      used = std::min(staging_bytes, used + round_up(blocks * count * lane.width));
      begin += count;
    }
  }
  return chunks;
}

void copy_in(const Call& call, const Chunk& chunk, const Staging& staging) {
  char* own = staging.buffers[staging.rank];
  for (const Piece& piece : chunk) {
    const Lane& lane = call.lanes[piece.lane];
    const std::size_t bytes = piece.count * lane.width;
    if (call.operation == Operation::kReduceScatter) {
      const std::size_t block_elements = lane.elements / staging.world;
      for_each_peer(staging, [&](int peer) {
        std::memcpy(own + piece.offset + peer * bytes,
                    at(lane.input, (peer * block_elements + piece.begin) * lane.width), bytes);
      });
    } else if (staging.world > 1) {
      std::memcpy(own + piece.offset, at(lane.input, piece.begin * lane.width), bytes);
    }
  }
}

void make_result(const Call& call, const Chunk& chunk, const Staging& staging) {
  for (const Piece& piece : chunk) {
    const Lane& lane = call.lanes[piece.lane];
    if (call.operation == Operation::kAllGather) {
      gather(lane, piece, staging);
      continue;
    }
    const bool scatters = call.operation == Operation::kReduceScatter;
    const std::size_t first = scatters ? staging.rank * (lane.elements / staging.world) : 0;
    const std::size_t offset = piece.offset + (scatters ? staging.rank * piece.count * lane.width : 0);
    void* output = at(lane.output, piece.begin * lane.width);
    add(lane, staging, offset, at(lane.input, (first + piece.begin) * lane.width), piece.count, &output, 1);
  }
}

void copy_in_shares(const Call& call, const Chunk& chunk, const Staging& staging) {
  for (const Piece& piece : chunk) {
    const Lane& lane = call.lanes[piece.lane];
    for_each_peer(staging, [&](int peer) {
      const Share share = share_of(piece.count, line_elements(lane), peer, staging.world);
      std::memcpy(staging.buffers[staging.rank] + piece.offset + share.begin * lane.width,
                  at(lane.input, (piece.begin + share.begin) * lane.width), share.count * lane.width);
    });
  }
}

void add_own_share(const Call& call, const Chunk& chunk, const Staging& staging) {
  for (const Piece& piece : chunk) {
    const Lane& lane = call.lanes[piece.lane];
    const Share share = share_of(piece.count, line_elements(lane), staging.rank, staging.world);
    const std::size_t offset = piece.offset + share.begin * lane.width;
    const std::size_t place = (piece.begin + share.begin) * lane.width;
    // Nobody else reads or writes this share of the own buffer before the second barrier.
    void* outputs[] = {at(lane.output, place), staging.buffers[staging.rank] + offset};
    add(lane, staging, offset, at(lane.input, place), share.count, outputs, 2);
  }
}

void copy_out_shares(const Call& call, const Chunk& chunk, const Staging& staging) {
  for (const Piece& piece : chunk) {
    const Lane& lane = call.lanes[piece.lane];
    for_each_peer(staging, [&](int peer) {
      const Share share = share_of(piece.count, line_elements(lane), peer, staging.world);
      std::memcpy(at(lane.output, (piece.begin + share.begin) * lane.width),
                  staging.buffers[peer] + piece.offset + share.begin * lane.width, share.count * lane.width);
    });
  }
}

}  // namespace jaxdp

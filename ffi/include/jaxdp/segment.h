// A rank's shared memory, and whether its owner is alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "jaxdp/protocol.h"

namespace jaxdp {

// One mapping of one rank's segment, for the life of this object. The file behind it has no name,
// so memory goes when the last process that maps it ends, however it ends.
class Segment {
 public:
  // Bytes of the file of a segment with two payload buffers of `staging_bytes`.
  static std::size_t file_bytes(std::size_t staging_bytes);

  // Maps a file of at least file_bytes(staging_bytes); `descriptor` stays the caller's. On failure
  // returns null and says why in `error`.
  static std::shared_ptr<Segment> map(int descriptor, std::size_t staging_bytes, std::string* error);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Makes this rank's own, still zero, segment valid.
  void initialize(std::uint64_t nonce, int rank, int world);

  // Empty if this is the segment of `rank` in the group with `nonce`, else what it is instead.
  std::string mismatch(std::uint64_t nonce, int rank, int world) const;

  Control& control() const { return *static_cast<Control*>(base_); }
  char* buffer(int parity) const;
  std::size_t staging_bytes() const { return staging_bytes_; }

 private:
  Segment(void* base, std::size_t staging_bytes) : base_(base), staging_bytes_(staging_bytes) {}

  void* base_;
  std::size_t staging_bytes_;
};

// Tells dead processes from live ones by pidfd, which a zombie or a reused pid does not mislead.
class ProcessWatch {
 public:
  // Takes ownership of the descriptors, one a rank; -1 means that rank is not watched.
  explicit ProcessWatch(std::vector<int> pidfds) : pidfds_(std::move(pidfds)) {}
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool dead(int rank) const;

 private:
  std::vector<int> pidfds_;
};

}  // namespace jaxdp

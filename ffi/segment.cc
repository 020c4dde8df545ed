#include "jaxdp/segment.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace jaxdp {
namespace {

constexpr std::size_t kPage = 4096;

constexpr std::size_t control_bytes() { return (sizeof(Control) + kPage - 1) / kPage * kPage; }

}  // namespace

std::size_t Segment::file_bytes(std::size_t staging_bytes) { return control_bytes() + 2 * staging_bytes; }

std::shared_ptr<Segment> Segment::map(int descriptor, std::size_t staging_bytes, std::string* error) {
  const std::size_t bytes = file_bytes(staging_bytes);
  struct stat file {};
  // A mapping longer than its file would raise SIGBUS when it is read.
  if (fstat(descriptor, &file) != 0 || static_cast<std::size_t>(file.st_size) < bytes) {
    *error = "the segment has " + std::to_string(file.st_size) + " bytes, " + std::to_string(bytes) + " are needed";
    return nullptr;
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  if (base == MAP_FAILED) {
    *error = std::string("the segment cannot be mapped: ") + std::strerror(errno);
    return nullptr;
  }
  return std::shared_ptr<Segment>(new Segment(base, staging_bytes));
}

Segment::~Segment() { munmap(base_, file_bytes(staging_bytes_)); }

void Segment::initialize(std::uint64_t nonce, int rank, int world) {
  Control& own = control();
  own.nonce = nonce;
  own.rank = static_cast<std::uint64_t>(rank);
  own.world = static_cast<std::uint64_t>(world);
  own.staging_bytes = staging_bytes_;
  store_release_system(&own.magic, kSegmentMagic);  // releases the header; mismatch() acquires it
}

std::string Segment::mismatch(std::uint64_t nonce, int rank, int world) const {
  const Control& peer = control();
  if (load_acquire_system(&peer.magic) != kSegmentMagic) return "it is no jaxdp segment of this version";
  if (peer.nonce != nonce) return "it belongs to another run";
  if (peer.rank != static_cast<std::uint64_t>(rank) || peer.world != static_cast<std::uint64_t>(world) ||
      peer.staging_bytes != staging_bytes_) {
    return "it is of rank " + std::to_string(peer.rank) + " of " + std::to_string(peer.world) + " with " +
           std::to_string(peer.staging_bytes) + " bytes of staging";
  }
  return {};
}

char* Segment::buffer(int parity) const { return static_cast<char*>(base_) + control_bytes() + parity * staging_bytes_; }

ProcessWatch::~ProcessWatch() {
  for (const int descriptor : pidfds_) {
    if (descriptor >= 0) close(descriptor);
  }
}

bool ProcessWatch::dead(int rank) const {
  if (rank >= static_cast<int>(pidfds_.size()) || pidfds_[rank] < 0) return false;
  pollfd entry{pidfds_[rank], POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

}  // namespace jaxdp

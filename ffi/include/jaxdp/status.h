// How a collective can fail. The kind's name is the Python exception's name; the text names what
// was waited for. Native code returns these and never prints, exits or aborts.
#pragma once

#include <string>
#include <utility>

namespace jaxdp {

enum class StatusKind { kOk, kRankMismatch, kCollectiveTimeout, kPeerFailure, kCommunicatorClosed };

inline const char* kind_name(StatusKind kind) {
  switch (kind) {
    case StatusKind::kOk: return "Ok";
    case StatusKind::kRankMismatch: return "RankMismatch";
    case StatusKind::kCollectiveTimeout: return "CollectiveTimeout";
    case StatusKind::kPeerFailure: return "PeerFailure";
    case StatusKind::kCommunicatorClosed: return "CommunicatorClosed";
  }
  return "Unknown";
}

struct Status {
  StatusKind kind = StatusKind::kOk;
  std::string message;

  bool ok() const { return kind == StatusKind::kOk; }
  // The form that jaxdp/collectives/errors.py turns into the named exception.
  std::string text() const { return std::string("jaxdp.") + kind_name(kind) + ": " + message; }
};

inline Status not_a_member(int device_ordinal) {
  return {StatusKind::kRankMismatch, "the device with ordinal " + std::to_string(device_ordinal) +
                                         " is not in the communicator. Run the program on the communicator's devices."};
}

}  // namespace jaxdp

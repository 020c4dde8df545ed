// One rank's dealings with its peers' control blocks: publish, wait, compare, fail.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "jaxdp/segment.h"
#include "jaxdp/staging.h"
#include "jaxdp/status.h"

namespace jaxdp {

// A wait for every rank's `word` to reach `generation` before `deadline_ns` (clock_ns).
struct Wait {
  Word Control::*word;
  std::uint64_t generation, deadline_ns;
  std::function<std::string()> subject;  // what is waited for, for the error's text alone
};

// Used by one thread at a time, `stop` excepted.
class Peers {
 public:
  Peers(int rank, std::vector<std::shared_ptr<Segment>> segments, std::vector<int> pidfds, double timeout_s);

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(segments_.size()); }
  std::size_t staging_bytes() const { return segments_[rank_]->staging_bytes(); }
  Staging staging(std::uint64_t generation) const;

  // The deadline of a wait that begins now.
  std::uint64_t deadline_ns() const;

  void publish(Word Control::*word, std::uint64_t generation);
  bool all_reach_within(std::uint64_t wait_ns, Word Control::*word, std::uint64_t generation) const;

  // Ok once all ranks are there and none has failed this generation or an earlier one. Otherwise why
  // not: a peer's own failure as that peer reported it, a peer that is dead (PeerFailure), closed
  // (CommunicatorClosed) or late (CollectiveTimeout).
  Status await_all(const Wait& wait);

  // Writes this rank's signature of a call; published with `ready`.
  void sign(std::uint64_t generation, std::uint64_t sequence, const std::string& signature);
  // Compares all ranks' signatures, in the same way on each rank; call it when all are ready.
  Status compare_signatures(std::uint64_t generation) const;

  // Publishes why this rank cannot finish `generation`, so that no peer waits for it. The first stands.
  void fail(std::uint64_t generation, const Status& status);

  // Ends every wait of this rank, now and later, with CommunicatorClosed.
  void stop() { stopped_.store(true); }

 private:
  class Turns;

  Control& control(int rank) const { return segments_[rank]->control(); }
  Status interruption(const Wait& wait, bool look_for_dead);
  Status reported_failure(std::uint64_t last_generation);
  Status lost_peer(const Wait& wait) const;
  Status timeout(const Wait& wait) const;
  std::vector<int> missing(const Wait& wait) const;

  const int rank_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  const ProcessWatch watch_;
  const double timeout_s_;
  int reporter_ = -1;  // the peer whose failure ended this rank's wait
  std::atomic<bool> stopped_{false};
};

}  // namespace jaxdp

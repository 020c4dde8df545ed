#include "jaxdp/peers.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "jaxdp/group.h"

namespace jaxdp {
namespace {

constexpr std::uint64_t kSpins = 64;                  // a few microseconds
constexpr std::uint64_t kYieldUntil_ns = 500'000;     // then sleep: a late peer may need this core
constexpr std::uint64_t kLongestSleep_ns = 1'000'000;
constexpr std::uint64_t kLookForDead_ns = 2'000'000;

// FNV-1a.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001B3u;
  return hash;
}

template <std::size_t N>
std::size_t copy_text(const std::string& text, char (&slot)[N]) {
  const std::size_t bytes = std::min(text.size(), N);
  std::memcpy(slot, text.data(), bytes);
  return bytes;
}

std::string text_of(const Signature& signature) {
  const std::string text(signature.text, std::min<std::size_t>(signature.bytes, kSignatureText));
  if (signature.bytes <= kSignatureText) return text;
  return text + "... (" + std::to_string(signature.bytes) + " bytes, hash " + std::to_string(signature.hash) + ")";
}

bool equal(const Signature& a, const Signature& b) {
  return a.hash == b.hash && a.sequence == b.sequence && a.bytes == b.bytes &&
         std::memcmp(a.text, b.text, std::min<std::size_t>(a.bytes, kSignatureText)) == 0;
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + join_ranks(ranks);
}

}  // namespace

// What a waiting thread does between two looks: spin, then yield, then sleep a sixteenth of the time
// waited so far, so that a wait lasts at most that much longer than it must.
class Peers::Turns {
 public:
  bool next(Peers& peers, const Wait& wait) {
    if (++turns_ < kSpins) {
      relax();
      return true;
    }
    const std::uint64_t now = clock_ns();
    if (turns_ == kSpins) looked_ = begin_ = now;
    const bool look_for_dead = now - looked_ >= kLookForDead_ns;
    if (look_for_dead) looked_ = now;
    why_ = peers.interruption(wait, look_for_dead);
    if (why_.ok()) rest(now - begin_);
    return why_.ok();
  }
  const Status& why() const { return why_; }

 private:
  static void rest(std::uint64_t waited_ns) {
    if (waited_ns < kYieldUntil_ns) {
      sched_yield();
      return;
    }
    const timespec duration{0, static_cast<long>(std::min(waited_ns / 16, kLongestSleep_ns))};
    nanosleep(&duration, nullptr);
  }

  std::uint64_t turns_ = 0, begin_ = 0, looked_ = 0;
  Status why_;
};

Peers::Peers(int rank, std::vector<std::shared_ptr<Segment>> segments, std::vector<int> pidfds, double timeout_s)
    : rank_(rank), segments_(std::move(segments)), watch_(std::move(pidfds)), timeout_s_(timeout_s) {}

Staging Peers::staging(std::uint64_t generation) const {
  Staging staging{rank_, world(), {}};
  for (int rank = 0; rank < world(); ++rank) staging.buffers[rank] = segments_[rank]->buffer(parity(generation));
  return staging;
}

std::uint64_t Peers::deadline_ns() const {
  return clock_ns() + static_cast<std::uint64_t>(std::min(timeout_s_, 1e9) * 1e9);
}

void Peers::publish(Word Control::*word, std::uint64_t generation) {
  jaxdp::publish(control(rank_).*word, generation);
}

bool Peers::all_reach_within(std::uint64_t wait_ns, Word Control::*word, std::uint64_t generation) const {
  const std::uint64_t until = clock_ns() + wait_ns;
  std::uint64_t turns = 0;
  const auto turn = [&] {
    ++turns < kSpins ? relax() : static_cast<void>(sched_yield());
    return clock_ns() < until;
  };
  for (int rank = 0; rank < world(); ++rank) {
    if (!await(control(rank).*word, generation, turn)) return false;
  }
  return true;
}

Status Peers::await_all(const Wait& wait) {
  Turns turns;
  for (int rank = 0; rank < world(); ++rank) {
    const bool there =
        await(control(rank).*wait.word, wait.generation, [&] { return turns.next(*this, wait); });
    if (!there) return turns.why();
  }
  // A rank that comes after its peers gave the call up gives it up too, though their payload is there.
  return reported_failure(wait.generation);
}

Status Peers::reported_failure(std::uint64_t last_generation) {
  for (int rank = 0; rank < world(); ++rank) {
    const std::uint64_t failed = load_acquire_system(&control(rank).failed.value);  // acquires the record
    if (rank == rank_ || failed == 0 || failed > last_generation) continue;
    const FailureRecord& record = control(rank).failure;
    reporter_ = rank;
    return {static_cast<StatusKind>(record.kind),
            "rank " + std::to_string(record.rank) + " reported first: " + std::string(record.text, record.bytes)};
  }
  return {};
}

Status Peers::interruption(const Wait& wait, bool look_for_dead) {
  if (Status reported = reported_failure(kLastGeneration); !reported.ok()) return reported;
  if (stopped_.load()) return {StatusKind::kCommunicatorClosed, wait.subject() + " was in flight at close()."};
  if (look_for_dead) {
    if (Status lost = lost_peer(wait); !lost.ok()) return lost;
  }
  return clock_ns() < wait.deadline_ns ? Status{} : timeout(wait);
}

Status Peers::lost_peer(const Wait& wait) const {
  const std::string waiting = wait.subject() + ": rank " + std::to_string(rank_) + " waited for rank ";
  for (const int rank : missing(wait)) {
    const bool closed = reached(control(rank).closed, 1), dead = watch_.dead(rank);
    // What it published before it closed or died counts: look at its word again.
    if ((!closed && !dead) || reached(control(rank).*wait.word, wait.generation)) continue;
    if (closed) return {StatusKind::kCommunicatorClosed, waiting + std::to_string(rank) + ", which closed the communicator."};
    return {StatusKind::kPeerFailure, waiting + std::to_string(rank) + ", whose process has died."};
  }
  return {};
}

Status Peers::timeout(const Wait& wait) const {
  return {StatusKind::kCollectiveTimeout, wait.subject() + ": rank " + std::to_string(rank_) + " waited " +
                                              seconds_text(timeout_s_) + " for " + ranks_text(missing(wait)) + "."};
}

std::vector<int> Peers::missing(const Wait& wait) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world(); ++rank) {
    if (!reached(control(rank).*wait.word, wait.generation)) ranks.push_back(rank);
  }
  return ranks;
}

void Peers::sign(std::uint64_t generation, std::uint64_t sequence, const std::string& signature) {
  Signature& slot = control(rank_).signatures[parity(generation)];
  slot.hash = hash_of(signature);
  slot.sequence = sequence;
  slot.bytes = signature.size();
  copy_text(signature, slot.text);
}

Status Peers::compare_signatures(std::uint64_t generation) const {
  const Signature& first = control(0).signatures[parity(generation)];
  for (int rank = 1; rank < world(); ++rank) {
    const Signature& other = control(rank).signatures[parity(generation)];
    if (equal(first, other)) continue;
    const auto has = [](int who, const Signature& signature) {
      return "rank " + std::to_string(who) + " has call " + std::to_string(signature.sequence) + ", " + text_of(signature);
    };
    return {StatusKind::kRankMismatch, has(0, first) + ", but " + has(rank, other) +
                                           ". All ranks must make the same calls in the same order."};
  }
  return {};
}

void Peers::fail(std::uint64_t generation, const Status& status) {
  Control& own = control(rank_);
  if (own.failed.value != 0) return;
  if (reporter_ >= 0) {
    own.failure = control(reporter_).failure;
  } else {
    own.failure.kind = static_cast<std::uint64_t>(status.kind);
    own.failure.rank = static_cast<std::uint64_t>(rank_);
    own.failure.bytes = copy_text(status.message, own.failure.text);
  }
  jaxdp::publish(own.failed, generation);  // releases the record; reported_failure() acquires it
}

}  // namespace jaxdp

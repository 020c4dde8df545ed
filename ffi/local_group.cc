// Ranks of one process. A rank that submits does not block its thread: the last rank to arrive
// runs the sum (with helpers) and completes every rank's call, so no number of devices, threads or
// independent calls can deadlock. A watchdog thread ends calls whose peers never come.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <thread>
#include <chrono>

#include "jaxdp/group.h"
#include "jaxdp/work.h"

namespace jaxdp {
namespace {

using Clock = std::chrono::steady_clock;

struct Pending {
  std::vector<Call> calls;
  std::vector<Completion> done;  // empty function: this rank has not arrived
  int arrived = 0;
  int first = -1;  // the rank that came first, whose signature the others must match
  Clock::time_point deadline;
};

class LocalGroup final : public Group {
 public:
  explicit LocalGroup(const LocalOptions& options)
      : ordinals_(options.device_ordinals),
        timeout_s_(options.timeout_s),
        first_sequence_(options.first_sequence),
        next_(options.device_ordinals.size(), options.first_sequence),
        watchdog_([this] { watch(); }) {}

  ~LocalGroup() override { close(); }

  void submit(int rank, Call call, Completion done, Executor& executor) override {
    std::unique_lock lock(mutex_);
    if (!failure_.ok()) {
      const Status failure = failure_;
      lock.unlock();
      return done(failure);
    }
    const std::uint64_t sequence = next_[rank]++;
    Pending& pending = enter(sequence);
    const bool differs = pending.first >= 0 && pending.calls[pending.first].signature != call.signature;
    const Status mismatch = differs ? describe_mismatch(sequence, pending, rank, call) : Status{};
    if (pending.first < 0) pending.first = rank;
    pending.calls[rank] = std::move(call);
    pending.done[rank] = std::move(done);
    if (differs) return fail(std::move(lock), mismatch);
    if (++pending.arrived < world()) return;
    Pending complete = std::move(pending);
    pending_.erase(sequence);
    ++running_;
    lock.unlock();
    execute(std::move(complete), executor);
  }

  Status close() override {
    std::unique_lock lock(mutex_);
    if (!closing_) {
      closing_ = true;
      // A rank that is on its way still finds its call: what has begun is finished.
      idle_.wait_until(lock, Clock::now() + timeout(), [this] { return running_ == 0 && pending_.empty(); });
      closed_ = true;
      if (failure_.ok()) failure_ = {StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."};
      wake_.notify_all();
      finish_pending(std::move(lock), failure_);
      watchdog_.join();
    }
    return {};
  }

  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  std::uint64_t calls(int rank) const override {
    std::lock_guard lock(mutex_);
    return next_[rank] - first_sequence_;
  }

  int rank_of(int device_ordinal) const override {
    const auto found = std::find(ordinals_.begin(), ordinals_.end(), device_ordinal);
    return found == ordinals_.end() ? -1 : static_cast<int>(found - ordinals_.begin());
  }

 private:
  int world() const { return static_cast<int>(ordinals_.size()); }
  Clock::duration timeout() const {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
  }

  Pending& enter(std::uint64_t sequence) {
    Pending& pending = pending_[sequence];
    if (pending.calls.empty()) {
      pending.calls.resize(world());
      pending.done.resize(world());
      pending.deadline = Clock::now() + timeout();
      if (pending_.size() == 1) wake_.notify_all();  // later calls have later deadlines
    }
    return pending;
  }

  static Status describe_mismatch(std::uint64_t sequence, const Pending& pending, int rank, const Call& call) {
    return {StatusKind::kRankMismatch,
            "call " + std::to_string(sequence) + ": rank " + std::to_string(pending.first) + " has " +
                pending.calls[pending.first].signature + ", rank " + std::to_string(rank) + " has " + call.signature +
                ". All ranks must make the same calls in the same order."};
  }

  Status describe_timeout(std::uint64_t sequence, const Pending& pending) const {
    std::vector<int> missing, waiting;
    for (int rank = 0; rank < world(); ++rank) (pending.done[rank] ? waiting : missing).push_back(rank);
    return {StatusKind::kCollectiveTimeout,
            "call " + std::to_string(sequence) + ", " + pending.calls[pending.first].signature + ": rank " +
                join_ranks(waiting) + " waited " + std::to_string(timeout_s_) + " s for rank " + join_ranks(missing) +
                "."};
  }

  // Poisons the group and completes every waiting call with the cause.
  void fail(std::unique_lock<std::mutex> lock, const Status& status) {
    failure_ = status;
    finish_pending(std::move(lock), status);
  }

  void finish_pending(std::unique_lock<std::mutex> lock, const Status status) {
    std::vector<Completion> waiting;
    for (auto& [sequence, pending] : pending_) {
      for (auto& done : pending.done) {
        if (done) waiting.push_back(std::move(done));
      }
    }
    pending_.clear();
    idle_.notify_all();
    lock.unlock();
    for (auto& done : waiting) done(status);
  }

  void execute(Pending complete, Executor& executor) {
    auto work = std::make_shared<Work>(std::move(complete.calls));
    const std::size_t helpers = work->helpers(executor.threads());
    // A helper that comes late finds no task and touches no buffer.
    for (std::size_t i = 0; i < helpers; ++i) executor.schedule([work] { work->run(); });
    work->run();
    work->wait();
    {
      std::lock_guard lock(mutex_);
      --running_;
      idle_.notify_all();
    }
    // The group may be gone after the last completion: nothing of it is touched from here on. What a
    // rank does next runs on the thread that completes it. After a long call all but one go to other
    // threads; after a short one, waking them costs more than it gains.
    for (std::size_t rank = 1; rank < complete.done.size(); ++rank) {
      if (!work->is_long()) {
        complete.done[rank](Status{});
      } else {
        executor.schedule([done = std::move(complete.done[rank])] { done(Status{}); });
      }
    }
    complete.done[0](Status{});
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!closed_) {
      if (pending_.empty()) {
        wake_.wait(lock);
        continue;
      }
      const auto [sequence, deadline] = std::pair(pending_.begin()->first, pending_.begin()->second.deadline);
      wake_.wait_until(lock, deadline);
      const auto found = pending_.find(sequence);
      if (found == pending_.end() || Clock::now() < deadline) continue;
      fail(std::move(lock), describe_timeout(sequence, found->second));
      lock = std::unique_lock(mutex_);
    }
  }

  const std::vector<int> ordinals_;
  const double timeout_s_;
  const std::uint64_t first_sequence_;

  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::uint64_t> next_;
  std::map<std::uint64_t, Pending> pending_;
  Status failure_;
  int running_ = 0;
  bool closing_ = false, closed_ = false;
  std::thread watchdog_;  // last: it starts when all else is there
};

}  // namespace

std::shared_ptr<Group> make_local_group(const LocalOptions& options) { return std::make_shared<LocalGroup>(options); }

}  // namespace jaxdp

// Ranks of one node, one process each. A rank's calls run one after another: on the submitting thread
// if its peers are there within microseconds, else on the group's own worker thread, so that no XLA
// thread waits for a peer and two communicators cannot deadlock each other.
#include "jaxdp/ipc_group.h"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>

#include "jaxdp/peers.h"

namespace jaxdp {

#if defined(JAXDP_TEST_HOOKS)
void (*phase_hook)(int, std::uint64_t, Phase) = nullptr;
#endif

namespace {

// How long a submitting thread looks for its peers before the worker takes the call. The worker's
// wake-up costs about as much; while it lasts the thread does nothing that a peer could depend on.
constexpr std::uint64_t kInlineWait_ns = 50'000;

struct Job {
  Call call;
  Completion done;
  std::uint64_t sequence = 0;
  std::fenv_t environment{};  // of the submitting thread: XLA's flush subnormals, and `done` runs XLA code
  // Set by begin().
  bool begun = false;
  bool two_shot = false;
  std::uint64_t generation = 0;  // of the first chunk
  std::uint64_t deadline_ns = 0;
  std::vector<Chunk> chunks;

  std::string subject() const { return "call " + std::to_string(sequence) + ", " + call.signature; }
};

class IpcGroup final : public Group {
 public:
  explicit IpcGroup(IpcOptions options)
      : device_ordinal_(options.device_ordinal),
        one_shot_bytes_(options.one_shot_bytes),
        first_sequence_(options.first_sequence),
        timeout_(std::min(options.timeout_s, 1e9)),
        next_sequence_(options.first_sequence),
        next_generation_(options.first_sequence),
        peers_(options.rank, std::move(options.segments), std::move(options.pidfds), options.timeout_s) {}

  ~IpcGroup() override { close(); }

  // Every rank has mapped every segment when this returns Ok.
  Status join() {
    peers_.publish(&Control::joined, 1);
    const Status status =
        peers_.await_all({&Control::joined, 1, peers_.deadline_ns(), [] { return "creating the communicator"; }});
    if (!status.ok()) {
      poison(next_generation_, status);
    } else {
      worker_ = std::thread([this] { work(); });
    }
    return status;
  }

  void submit(int, Call call, Completion done, Executor&) override {
    Job job;
    job.call = std::move(call);
    job.done = std::move(done);
    std::fegetenv(&job.environment);
    std::unique_lock lock(mutex_);
    if (!failure_.ok()) {
      const Status failure = failure_;
      lock.unlock();
      return job.done(failure);
    }
    job.sequence = next_sequence_++;
    if (running_ || !queue_.empty()) return queue_.push_back(std::move(job));
    running_ = true;
    lock.unlock();
    begin(job);
    if (!peers_.all_reach_within(kInlineWait_ns, &Control::ready, job.generation)) return hand_over(std::move(job));
    complete(std::move(job));
  }

  Status close() override {
    {
      std::lock_guard lock(mutex_);
      if (closed_) return {};
      closed_ = true;
      if (failure_.ok()) failure_ = {StatusKind::kCommunicatorClosed, "the communicator was closed; create a new one."};
    }
    end_calls();
    peers_.publish(&Control::closed, kLastGeneration);  // releases nothing: no peer's segment is read from here on
    pass(peers_.rank(), next_sequence_, Phase::kInClose);
    // A failure was reported when it happened, and peers learn of it by `failed`: nothing to wait for.
    if (!poison_.ok()) return {};
    return peers_.await_all(
        {&Control::closed, kLastGeneration, peers_.deadline_ns(), [] { return "closing the communicator"; }});
  }

  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

  std::uint64_t calls(int) const override {
    std::lock_guard lock(mutex_);
    return next_sequence_ - first_sequence_;
  }

  int rank_of(int device_ordinal) const override { return device_ordinal == device_ordinal_ ? peers_.rank() : -1; }

 private:
  // Publishes the first chunk. Never waits: its buffer is free by the rule of parity.
  void begin(Job& job) {
    job.begun = true;
    job.deadline_ns = peers_.deadline_ns();
    job.chunks = plan_chunks(job.call, peers_.world(), peers_.staging_bytes());
    job.two_shot = job.call.operation == Operation::kAllReduce && peers_.world() > 1 &&
                   message_bytes(job.call) > one_shot_bytes_;
    job.generation = next_generation_;
    next_generation_ += job.chunks.size();
    peers_.sign(job.generation, job.sequence, job.call.signature);
    offer(job, 0);
  }

  static std::size_t message_bytes(const Call& call) {
    std::size_t bytes = 0;
    for (const Lane& lane : call.lanes) bytes += lane.elements * lane.width;
    return bytes;
  }

  void offer(const Job& job, std::size_t index) {
    const std::uint64_t generation = job.generation + index;
    const auto copy = job.two_shot ? copy_in_shares : copy_in;
    copy(job.call, job.chunks[index], peers_.staging(generation));
    pass(peers_.rank(), job.sequence, Phase::kBeforePublish);
    peers_.publish(&Control::ready, generation);  // releases payload and signature; meet() acquires the peers'
    pass(peers_.rank(), job.sequence, Phase::kAfterPublish);
  }

  Status finish(const Job& job) {
    for (std::size_t index = 0; index < job.chunks.size(); ++index) {
      if (index > 0) offer(job, index);
      const Status status = meet(job, index);
      if (!status.ok()) return status;
    }
    return {};
  }

  // One generation from the barrier on.
  Status meet(const Job& job, std::size_t index) {
    const std::uint64_t generation = job.generation + index;
    const auto subject = [&job] { return job.subject(); };
    const std::uint64_t deadline = index == 0 ? job.deadline_ns : peers_.deadline_ns();
    Status status = peers_.await_all({&Control::ready, generation, deadline, subject});
    if (status.ok() && index == 0) status = peers_.compare_signatures(generation);
    if (!status.ok()) return status;
    const Staging staging = peers_.staging(generation);
    if (!job.two_shot) {
      pass(peers_.rank(), job.sequence, Phase::kMidReduce);
      make_result(job.call, job.chunks[index], staging);
      pass(peers_.rank(), job.sequence, Phase::kBeforeDone);
      return {};
    }
    add_own_share(job.call, job.chunks[index], staging);
    pass(peers_.rank(), job.sequence, Phase::kMidReduce);
    peers_.publish(&Control::reduced, generation);  // releases the share; the next wait acquires the peers'
    if (kSecondBarrier) status = peers_.await_all({&Control::reduced, generation, peers_.deadline_ns(), subject});
    if (status.ok()) copy_out_shares(job.call, job.chunks[index], staging);
    pass(peers_.rank(), job.sequence, Phase::kBeforeDone);
    return status;
  }

  // Ends the running job, which leaves the next one to whoever comes first.
  void complete(Job job) {
    Status status;
    {
      std::lock_guard lock(mutex_);
      status = poison_;
    }
    if (status.ok()) status = finish(job);
    if (!status.ok()) poison(job.generation, status);
    {
      std::lock_guard lock(mutex_);
      running_ = false;
      wake_.notify_all();
    }
    // `done` may run more of the program, and so submit the next call, on this thread.
    job.done(status);
  }

  void hand_over(Job job) {
    std::lock_guard lock(mutex_);
    queue_.push_front(std::move(job));
    running_ = false;
    wake_.notify_all();
  }

  void poison(std::uint64_t generation, const Status& status) {
    peers_.fail(generation, status);
    std::lock_guard lock(mutex_);
    if (poison_.ok()) poison_ = status;
    if (failure_.ok()) failure_ = status;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ended_ || (!queue_.empty() && !running_); });
      if (queue_.empty()) return;
      Job job = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      const bool poisoned = !poison_.ok();
      lock.unlock();
      std::fesetenv(&job.environment);
      if (!job.begun && !poisoned) begin(job);
      complete(std::move(job));
      lock.lock();
    }
  }

  // Lets the calls in flight finish, ends them at the deadline, and joins the worker.
  void end_calls() {
    std::unique_lock lock(mutex_);
    const auto idle = [this] { return queue_.empty() && !running_; };
    if (!wake_.wait_for(lock, timeout_, idle)) {
      peers_.stop();
      wake_.wait(lock, idle);
    }
    ended_ = true;
    wake_.notify_all();
    lock.unlock();
    if (worker_.joinable()) worker_.join();
  }

  const int device_ordinal_;
  const std::size_t one_shot_bytes_;
  const std::uint64_t first_sequence_;
  const std::chrono::duration<double> timeout_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::uint64_t next_sequence_;
  Status failure_;         // what new calls get
  Status poison_;          // what calls in flight get
  bool running_ = false;   // some thread runs a job: it alone uses what follows
  bool closed_ = false, ended_ = false;
  std::uint64_t next_generation_;
  Peers peers_;
  std::thread worker_;
};

}  // namespace

std::shared_ptr<Group> make_ipc_group(IpcOptions options, Status* status) {
  auto group = std::make_shared<IpcGroup>(std::move(options));
  *status = group->join();
  return status->ok() ? group : nullptr;
}

}  // namespace jaxdp

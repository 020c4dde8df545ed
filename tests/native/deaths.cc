// A rank is killed at each phase of a call, and of closing, on each route. The others finish the calls
// whose payload is there, exactly, and fail the first one that is not, long before the deadline.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "jaxdp/vendor.h"
#include "ranks.h"

namespace jaxdp::test {
namespace {

constexpr int kWorld = 4, kVictim = 2, kCalls = 6;
constexpr std::uint64_t kFatalCall = 4;
constexpr double kTimeout_s = 30.0, kPrompt_s = 5.0;

Phase fatal_phase;

void kill_victim(int rank, std::uint64_t sequence, Phase phase) {
  const bool fatal = phase == fatal_phase && (phase == Phase::kInClose || sequence == kFatalCall);
  if (rank == kVictim && fatal) raise(SIGKILL);
}

struct Shared {
  std::uint64_t pids[kWorld];
};

std::vector<int> watch_peers(const Shared& shared, int own) {
  std::vector<int> pidfds;
  for (int rank = 0; rank < kWorld; ++rank) {
    while (load_acquire_system(&shared.pids[rank]) == 0) relax();
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(shared.pids[rank]), 0));
    pidfds.push_back(rank == own ? -1 : descriptor);
  }
  return pidfds;
}

// Exits 0 if all went as it must for a rank that lives.
void run_rank(int rank, Shared& shared, const std::vector<std::shared_ptr<Segment>>& segments, std::size_t one_shot) {
  phase_hook = kill_victim;
  Status status;
  const auto group = make_ipc_group({rank, rank, segments, watch_peers(shared, rank), kTimeout_s, 1, one_shot}, &status);
  expect(status.ok(), status.text());
  int finished = 0;
  const std::uint64_t begin = clock_ns();
  for (; finished < kCalls; ++finished) {
    Exchange exchange(Operation::kAllReduce, kWorld, rank, 3000);  // three generations
    status = submit(*group, rank, exchange.call()).get();
    if (!status.ok()) break;
    expect(exchange.right(), "the sum of call " + std::to_string(finished + 1));
  }
  if (fatal_phase == Phase::kInClose) {
    expect(finished == kCalls, status.text());
    status = group->close();  // the victim is dead, or has acknowledged: either is an end
    expect(status.ok() || status.kind == StatusKind::kPeerFailure, status.text());
  } else {
    expect(status.kind == StatusKind::kPeerFailure, "call " + std::to_string(finished + 1) + " gave " + status.text());
    expect(status.message.find("rank 2, whose process has died") != std::string::npos, status.message);
    expect(finished == static_cast<int>(kFatalCall) - 1 || finished == static_cast<int>(kFatalCall), "calls finished");
    expect(group->close().ok(), "close after a failure");
  }
  expect(static_cast<double>(clock_ns() - begin) * 1e-9 < kPrompt_s, "it took too long");
  _exit(0);
}

void run_case(Phase phase, std::size_t one_shot) {
  fatal_phase = phase;
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto segments = make_segments(kWorld);
  for (int rank = 0; rank < kWorld; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) run_rank(rank, *shared, segments, one_shot);
    store_release_system(&shared->pids[rank], static_cast<std::uint64_t>(pid));
  }
  for (int rank = 0; rank < kWorld; ++rank) {
    int code = 0;
    waitpid(static_cast<pid_t>(shared->pids[rank]), &code, 0);
    const bool right = rank == kVictim ? WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL : code == 0;
    expect(right, "phase " + std::to_string(static_cast<int>(phase)) + ", rank " + std::to_string(rank) + " ended with " +
                      std::to_string(code));
  }
  munmap(shared, sizeof(Shared));
}

}  // namespace
}  // namespace jaxdp::test

int main() {
  using jaxdp::Phase;
  for (const Phase phase : {Phase::kBeforePublish, Phase::kAfterPublish, Phase::kMidReduce, Phase::kBeforeDone, Phase::kInClose}) {
    for (const std::size_t one_shot : {std::size_t{0}, ~std::size_t{0}}) jaxdp::test::run_case(phase, one_shot);
  }
  std::puts("the living ended in time at every phase");
  return 0;
}

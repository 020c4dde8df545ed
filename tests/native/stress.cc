// Ranks as threads make the same random calls, each pausing by its own dice; every sum is checked.
//   stress local|ipc WORLD CALLS     one group
//   stress opposite WORLD CALLS      two ipc groups, submitted to in opposite orders by odd ranks
#include <chrono>
#include <cstring>
#include <thread>

#include "ranks.h"

namespace jaxdp::test {
namespace {

std::vector<std::shared_ptr<Group>> make_ipc_groups(int world) {
  const auto segments = make_segments(world);
  std::vector<std::shared_ptr<Group>> groups(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      Status status;
      groups[rank] = make_ipc_group({rank, rank, segments, {}, 60.0, 1, 2048}, &status);
      expect(status.ok(), status.text());
    });
  }
  for (auto& thread : threads) thread.join();
  return groups;
}

std::vector<std::shared_ptr<Group>> make_local_groups(int world) {
  LocalOptions options;
  for (int rank = 0; rank < world; ++rank) options.device_ordinals.push_back(rank);
  options.timeout_s = 60.0;
  return std::vector<std::shared_ptr<Group>>(world, make_local_group(options));
}

void pause_sometimes(std::mt19937& dice) {
  if (dice() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice() % 300));
}

// groups[g][rank]; every rank submits call k to each group before it waits for any.
void run_rank(const std::vector<std::vector<std::shared_ptr<Group>>>& groups, int world, int rank, int calls) {
  std::mt19937 shared(7), own(rank + 1);
  for (int k = 0; k < calls; ++k) {
    const auto operation = static_cast<Operation>(shared() % 4);
    const std::size_t count = shared() % 8 == 0 ? shared() % 5000 : shared() % 300;
    std::vector<Exchange> exchanges(groups.size(), Exchange(operation, world, rank, count));
    std::vector<std::future<Status>> results(groups.size());
    pause_sometimes(own);
    for (std::size_t step = 0; step < groups.size(); ++step) {
      const std::size_t g = rank % 2 ? groups.size() - 1 - step : step;
      results[g] = submit(*groups[g][rank], rank, exchanges[g].call());
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const Status status = results[g].get();
      expect(status.ok(), status.text());
      expect(exchanges[g].right(), "rank " + std::to_string(rank) + ", call " + std::to_string(k) + ", operation " +
                                       std::to_string(static_cast<int>(operation)) + " of " + std::to_string(count));
    }
  }
  for (const auto& group : groups) {
    const Status status = group[rank]->close();
    expect(status.ok(), status.text());
  }
}

int run(const std::string& kind, int world, int calls) {
  std::vector<std::vector<std::shared_ptr<Group>>> groups;
  groups.push_back(kind == "local" ? make_local_groups(world) : make_ipc_groups(world));
  if (kind == "opposite") groups.push_back(make_ipc_groups(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back([&, rank] { run_rank(groups, world, rank, calls); });
  for (auto& thread : threads) thread.join();
  std::puts("every sum was right");
  return 0;
}

}  // namespace
}  // namespace jaxdp::test

int main(int count, char** arguments) {
  if (count != 4) return 2;
  return jaxdp::test::run(arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3]));
}

// Times all_reduce of two GPUs without XLA, for the constants of ring.h: prints microseconds a call.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "jaxdp/gpu_group.h"

using namespace jaxdp;

static void must(gpu::Error error) {
  if (error != gpu::kSuccess) {
    std::fprintf(stderr, "%s\n", gpu::message(error));
    std::exit(1);
  }
}

int main(int argc, char** argv) {
  const int blocks = argc > 1 ? std::atoi(argv[1]) : kMaximumBlocks;
  auto group = std::make_shared<GpuGroup>(2, 5.0, blocks);
  for (int rank = 0; rank < 2; ++rank) group->add_rank(rank, rank);
  group->connect_local();
  std::printf("depth %d blocks %d threads %d vectors %d:", kRingDepth, blocks, kThreads, kVectorsPerThread);
  for (const std::size_t bytes : {4096ul, 65536ul, 1ul << 20, 4ul << 20, 16ul << 20, 64ul << 20, 128ul << 20, 256ul << 20}) {
    const int calls = bytes <= 1 << 20 ? 200 : 40;
    double best = 1e30;
    for (int repeat = 0; repeat < 4; ++repeat) {
      std::vector<std::thread> threads;
      double us[2];
      for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
          must(gpu::set_device(rank));
          void *in, *out;
          must(gpu::allocate(&in, bytes));
          must(gpu::allocate(&out, bytes));
          gpu::Stream stream;
          must(gpu::create_stream(&stream));
          Call call{Operation::kAllReduce, {{in, out, bytes / 4, 4, DType::kFloat32}}, "all_reduce"};
          group->enqueue(rank, call, nullptr, stream);  // both meet here
          must(gpu::synchronize(stream));
          const std::uint64_t start = clock_ns();
          for (int i = 0; i < calls; ++i) group->enqueue(rank, call, nullptr, stream);
          must(gpu::synchronize(stream));
          us[rank] = static_cast<double>(clock_ns() - start) / 1e3 / calls;
          must(gpu::release(in));
          must(gpu::release(out));
        });
      }
      for (auto& thread : threads) thread.join();
      best = std::min(best, std::max(us[0], us[1]));
    }
    std::printf(" %8.1f", best);
  }
  std::printf("  %s\n", group->failure().message.c_str());
}

// One pool for the process. torch's CPU operations already run on an OpenMP runtime, whose threads spin for a while after each
// parallel region; a second pool would fight with them for the cores. So nothing here links to OpenMP: native.py finds
// GOMP_parallel (which GNU's runtime defines, and LLVM's for compatibility) in what libtorch_cpu has loaded and passes its
// address. Tasks are handed out by a counter, because cores differ in speed and are shared; which thread gets a task changes no
// result.
#include "parallel.h"

#include <atomic>
#include <cstdlib>

namespace eightfold {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

std::atomic<GompParallel> gomp_parallel{nullptr};

struct Region {
  std::atomic<std::int64_t> next{0};
  std::int64_t count;
  Task task;
  void* context;
};

void work(void* data) {
  auto* region = static_cast<Region*>(data);
  for (;;) {
    const std::int64_t index = region->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= region->count) return;
    region->task(region->context, index);
  }
}

struct Scratch {
  void* memory = nullptr;
  std::size_t bytes = 0;
  ~Scratch() { std::free(memory); }
};

}  // namespace

void parallel_for(std::int64_t count, int threads, Task task, void* context) {
  const GompParallel run = gomp_parallel.load(std::memory_order_relaxed);
  if (run == nullptr || threads <= 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  Region region;
  region.count = count;
  region.task = task;
  region.context = context;
  run(work, &region, static_cast<unsigned>(count < threads ? count : threads), 0);
}

void* thread_scratch(int slot, std::size_t bytes) {
  thread_local Scratch buffers[2];
  Scratch& scratch = buffers[slot];
  if (scratch.bytes < bytes) {
    std::free(scratch.memory);
    const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
    scratch.memory = std::aligned_alloc(64, rounded);
    scratch.bytes = scratch.memory == nullptr ? 0 : rounded;
    if (scratch.memory == nullptr) std::abort();
  }
  return scratch.memory;
}

void set_openmp(void* function) { gomp_parallel.store(reinterpret_cast<GompParallel>(function)); }

}  // namespace eightfold

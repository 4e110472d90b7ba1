// Threads: the OpenMP pool that the process already has, or none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eightfold {

// Called once for each task, in any order and on any thread; a task's result must not depend on either.
using Task = void (*)(void* context, std::int64_t index);

// Runs tasks 0 .. count - 1 on up to `threads` threads, the calling one included, and returns when all are done.
void parallel_for(std::int64_t count, int threads, Task task, void* context);

// Memory of the calling thread that lives until the thread ends and grows to the largest request; 64-byte aligned.
// Each slot is a buffer of its own, so that nested users do not collide. Contents are undefined.
void* thread_scratch(int slot, std::size_t bytes);
constexpr int kPanelSlot = 0;  // a task's own working memory
constexpr int kInputSlot = 1;  // converted inputs, made by the calling thread and read by all

// Adopts GOMP_parallel as found in the library that torch loaded; null returns to a single thread.
void set_openmp(void* gomp_parallel);

}  // namespace eightfold

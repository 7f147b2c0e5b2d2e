// Work divided among torch's threads, and aligned memory for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>

#include "arguments.h"

namespace nvfp4 {

constexpr int64_t kShare = 8;  // a worker claims this part of its part of what is left

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Words = std::unique_ptr<float[], Free>;

inline Words allocate(int64_t words) {
  void* p = std::aligned_alloc(64, std::max<int64_t>(1, ceil_div(words, 16)) * 64);
  STD_TORCH_CHECK(p != nullptr, "out of memory");
  return Words(static_cast<float*>(p));
}

// Work in units [0, count), claimed by workers as they go: one that the system holds up, or that shares its core,
// leaves its share to the others. Claims shrink: neighbours are prefetched, and the last are done at the same time (up
// to 5 % at few rows over 32 equal claims of each worker, two threads).
class Claims {
 public:
  Claims(int64_t count, int64_t workers) : count_(count), parts_(workers * kShare) {}

  template <typename Function>
  void run(Function f) {
    int64_t begin = next_.load();
    while (begin < count_) {
      const int64_t end = begin + std::max<int64_t>(1, (count_ - begin) / parts_);
      if (!next_.compare_exchange_weak(begin, end)) continue;
      f(begin, end);
      done_.fetch_add(end - begin, std::memory_order_release);
      begin = next_.load();
    }
  }
  // Until all is done. It waits only for what another worker has claimed, so it cannot wait for one that never runs.
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_;) {
      if (++spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }
  // Whether all is claimed: there is nothing to prepare for.
  bool exhausted() const { return next_.load(std::memory_order_relaxed) >= count_; }

 private:
  static constexpr int kSpins = 1 << 10;  // some 20 us; then the core may be wanted by the worker that is waited for
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int64_t count_, parts_;
  std::atomic<int64_t> next_{0}, done_{0};
};

}  // namespace nvfp4

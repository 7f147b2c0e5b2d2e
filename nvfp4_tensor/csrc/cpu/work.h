// Work divided among torch's threads, and aligned memory for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "arguments.h"

namespace nvfp4 {

constexpr int64_t kShare = 8;  // a worker claims this part of what is left of a range

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Words = std::unique_ptr<float[], Free>;

inline Words allocate(int64_t words) {
  void* p = std::aligned_alloc(64, std::max<int64_t>(1, ceil_div(words, 16)) * 64);
  STD_TORCH_CHECK(p != nullptr, "out of memory");
  return Words(static_cast<float*>(p));
}

// Work in units [0, count), claimed by workers as they go: first each from a range of its own, whose neighbours are
// prefetched, then from the ranges of others. So one that the system holds up, or that shares its core, leaves its
// share to the others. Claims shrink, that the last are done at the same time (up to 5 % at few rows over 32 equal
// claims of each worker, two threads).
class Claims {
 public:
  Claims(int64_t count, int64_t workers) : count_(count), ranges_(workers) {
    for (int64_t w = 0; w < workers; ++w) {
      ranges_[w].next = count * w / workers;
      ranges_[w].end = count * (w + 1) / workers;
    }
  }

  template <typename Function>
  void run(int64_t worker, Function f) {
    int64_t done = 0;
    for (size_t i = 0; i < ranges_.size(); ++i) done += run(ranges_[(worker + i) % ranges_.size()], f);
    if (done) done_.fetch_add(done, std::memory_order_release);
  }
  // Until all is done. It waits only for what another worker has claimed, so it cannot wait for one that never runs.
  void wait() const {
    for (int spins = 0; !is_done();) {
      if (++spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }
  bool is_done() const { return done_.load(std::memory_order_acquire) >= count_; }
  // The first unit of a worker's own range.
  int64_t first(int64_t worker) const { return count_ * worker / int64_t(ranges_.size()); }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  template <typename Function>
  static int64_t run(Range& range, Function f) {
    int64_t done = 0, begin = range.next.load();
    while (begin < range.end) {
      const int64_t end = begin + std::max<int64_t>(1, (range.end - begin) / kShare);
      if (!range.next.compare_exchange_weak(begin, end)) continue;
      f(begin, end);
      done += end - begin;
      begin = range.next.load();
    }
    return done;
  }

  static constexpr int kSpins = 1 << 10;  // some 20 us; then the core may be wanted by the worker that is waited for
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int64_t count_;
  std::vector<Range> ranges_;
  std::atomic<int64_t> done_{0};
};

}  // namespace nvfp4

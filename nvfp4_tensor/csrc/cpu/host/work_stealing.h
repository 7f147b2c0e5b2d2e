// Work stealing: units of work, claimed by torch's threads as they go.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace nvfp4 {

constexpr int64_t kClaimFraction = 8;  // a worker claims 1 / kClaimFraction of what is left of a range

// Work in units [0, count), claimed by workers: each first claims from its own range, which the hardware prefetches,
// then from the ranges of others, so that a worker that the system delays leaves its units to the others. Claims shrink
// so that all workers finish together (few rows, two threads: up to 5 % over 32 equal claims per worker).
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
  // Waits until all units are done. It waits only for units that a worker has claimed: never for one that does not run.
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
  int64_t count() const { return count_; }
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
      const int64_t end = begin + std::max<int64_t>(1, (range.end - begin) / kClaimFraction);
      if (!range.next.compare_exchange_weak(begin, end)) continue;
      f(begin, end);
      done += end - begin;
      begin = range.next.load();
    }
    return done;
  }

  static constexpr int kSpins = 1 << 10;  // about 20 us; then it yields the core, which the awaited worker may need
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // YIELD is a no-op on most of them
#endif
  }

  const int64_t count_;
  std::vector<Range> ranges_;
  std::atomic<int64_t> done_{0};
};

}  // namespace nvfp4

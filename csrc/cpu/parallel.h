// Work sharing on torch's thread pool.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

namespace fastspec::cpu {

// The number of threads for work that can be divided into `shares`, each worth a thread: up to
// torch's number, and one for a while after a thread was late.
//
// The end of a parallel region waits for all its threads. One that the system schedules late,
// because another program has its core, makes a region of microseconds take milliseconds. If that
// is most of a region, work is not shared for several times as long, then sharing is tried again.
// Work that would take longer alone than the rest of this pause is shared without waiting for its
// end.
int64_t workers_for(int64_t shares);
inline int64_t workers_for(int64_t work, int64_t grain) { return workers_for(work / grain); }

// How long to work alone after a region in which a thread was this late; longer each time in a row.
// All in ns.
int64_t pause_after(int64_t lateness, int64_t duration, int64_t pause_before);

// The arrival times of a parallel region's threads.
class Arrivals {
 public:
  Arrivals();
  void add();        // called by each thread
  void end() const;  // called when all are done

 private:
  const int64_t start_;
  std::atomic<int64_t> latest_;
};

// Calls body(i) for 0 <= i < count on several threads, at least `grain` neighbours on each.
template <class Body>
void parallel_region(int64_t count, int64_t grain, const Body& body) {
  struct Context {
    const Body& body;
    Arrivals arrivals;
  } context{body, {}};
  const auto run = [](int64_t begin, int64_t end, void* shared) {
    Context& given = *static_cast<Context*>(shared);
    given.arrivals.add();
    for (int64_t i = begin; i < end; ++i) given.body(i);
  };
  if (torch_parallel_for(0, count, grain, run, &context) != 0) {
    throw std::runtime_error("torch_parallel_for failed");
  }
  context.arrivals.end();
}

// Calls body(i) for 0 <= i < count, at least `grain` neighbours on one thread.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  grain = std::max<int64_t>(grain, 1);  // rows may be empty
  if (workers_for((count + grain - 1) / grain) > 1) return parallel_region(count, grain, body);
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Workers that go through the same phases, each made of tasks that are all done before the next
// phase begins. No phase waits for a worker that has not arrived: the others do its tasks, and it
// skips finished phases when it arrives. Only the end of the last phase waits for it.
class Team {
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

 public:
  Team(int64_t num_workers, int64_t num_phases)
      : num_workers(num_workers),
        num_phases_(num_phases),
        counters_(new Counter[num_phases * (num_workers + 1)]()) {}

  // One worker on its way through the phases.
  class Member {
   public:
    const int64_t worker;

    // The next phase: body(task) for 0 <= task < count, the same for all workers. Each takes tasks
    // in order from its own share, then from the others', because the cores of a machine rarely run
    // at the same pace. A worker whose body throws leaves the team.
    template <class Body>
    void share(int64_t count, const Body& body) {
      const auto one = [](int64_t) { return int64_t{1}; };
      do_phase(count, one, [&](int64_t first, int64_t) { body(first); });
    }

    // Like share, if neighbouring tasks read neighbouring memory: body(first, last) for runs of
    // tasks, each a quarter of the rest of a share. Cores prefetch within a run, and the last runs
    // are short.
    template <class Body>
    void share_runs(int64_t count, const Body& body) {
      do_phase(count, [](int64_t left) { return (left + 3) / 4; }, body);
    }

   private:
    friend class Team;
    Member(Team& team, int64_t worker) : worker(worker), team_(team) {}

    template <class Size, class Body>
    void do_phase(int64_t count, const Size& size_of_run, const Body& body) {
      const int64_t workers = team_.num_workers;
      if (phase_ == team_.num_phases_) throw std::logic_error("a team has fewer phases");
      Counter* const counters = &team_.counters_[phase_++ * (workers + 1)];
      const std::atomic<int64_t>& done = counters[workers].value;
      do_tasks(count, counters, size_of_run, body);
      for (int64_t spin = 0; done.load(std::memory_order_acquire) < count; ++spin) {
        spin < kSpinsAwake ? rest() : std::this_thread::yield();
      }
    }

    // Reports how many tasks a worker has taken, so nobody waits for those of a run that threw.
    struct Tally {
      std::atomic<int64_t>& done;
      int64_t taken = 0;
      ~Tally() {
        if (taken > 0) done += taken;
      }
    };

    template <class Size, class Body>
    void do_tasks(int64_t count, Counter* counters, const Size& size_of_run, const Body& body) {
      const int64_t workers = team_.num_workers;
      Tally tally{counters[workers].value};
      for (int64_t i = 0; i < workers; ++i) {
        const int64_t other = (worker + i) % workers;
        const int64_t first = count * other / workers, size = count * (other + 1) / workers - first;
        std::atomic<int64_t>& taken = counters[other].value;
        for (int64_t n = taken.load(std::memory_order_relaxed); n < size;) {
          const int64_t run = size_of_run(size - n);
          if (!taken.compare_exchange_weak(n, n + run)) continue;
          tally.taken += run;
          body(first + n, first + n + run);
          n = taken.load(std::memory_order_relaxed);
        }
      }
    }

    static void rest() {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }

    static constexpr int64_t kSpinsAwake = 2000;  // some 50 us
    Team& team_;
    int64_t phase_ = 0;
  };

  // Calls body(member) for each worker.
  template <class Body>
  void run(const Body& body) {
    const auto work = [&](int64_t worker) {
      Member member(*this, worker);
      body(member);
    };
    num_workers > 1 ? parallel_region(num_workers, 1, work) : work(0);
  }

  const int64_t num_workers;

 private:
  const int64_t num_phases_;
  const std::unique_ptr<Counter[]> counters_;
};

// Calls body(task, worker) once for each task; worker < workers.
template <class Body>
void for_each_task(int64_t count, int64_t workers, const Body& body) {
  Team(workers, 1).run([&](Team::Member& member) {
    member.share(count, [&](int64_t task) { body(task, member.worker); });
  });
}

}  // namespace fastspec::cpu

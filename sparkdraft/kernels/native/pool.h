// A small pool of threads: parallel_for(n, f) runs f(0) .. f(n - 1) on all of them, the caller included. Workers take
// the next free task until none is left, and spin for a moment between two calls before they sleep, since a decoding
// step makes hundreds of calls a few microseconds apart; a worker that wakes late is never waited for. Which thread
// ran a task is never visible in a result: that is the business of the kernels, which split outputs only.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace pool {

inline void pause_core() {
#if defined(__aarch64__)
    asm volatile("isb");  // 'yield' does nothing on most Arm cores; 'isb' really waits some cycles
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Calls ready() until it is true, or until 'limit' is over; gives the core away now and then to others who need it.
template <class Ready>
bool spin_until(Ready ready, std::chrono::microseconds limit) {
    const auto start = std::chrono::steady_clock::now();
    for (int round = 1;; ++round) {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            pause_core();
        }
        if (round % 16 == 0) std::this_thread::yield();
        if (std::chrono::steady_clock::now() - start > limit) return false;
    }
}

class Pool {
public:
    using Task = void (*)(const void* context, long index);

    explicit Pool(int threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    }

    int threads() const { return int(workers_.size()) + 1; }

    void run(long count, Task task, const void* context) {
        std::lock_guard<std::mutex> one_caller_at_a_time(call_);
        task_ = task, context_ = context, count_ = count;
        next_.store(0, std::memory_order_relaxed);
        epoch_.fetch_add(1);  // odd: open to workers
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        take_tasks();
        epoch_.fetch_add(1);  // even: closed; whoever has not entered by now stays out
        while (!spin_until([&] { return inside_.load() == 0; }, std::chrono::microseconds(1000))) {
        }
    }

    void stop() {
        stopping_.store(true);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        for (auto& worker : workers_) worker.join();
    }

private:
    void take_tasks() {
        for (long i; (i = next_.fetch_add(1)) < count_;) task_(context_, i);
    }

    // A worker enters first and looks second, the caller closes first and looks second: so either the worker sees that
    // the call is closed, or the caller sees the worker inside and waits for it.
    void work() {
        unsigned done = 0;
        while (wait_for_call(done)) {
            inside_.fetch_add(1);
            const unsigned epoch = epoch_.load();
            if (epoch % 2 == 1) take_tasks();
            inside_.fetch_sub(1);
            done = epoch;
        }
    }

    bool wait_for_call(unsigned done) {
        auto ready = [&] { return stopping_.load() || (epoch_.load() % 2 == 1 && epoch_.load() != done); };
        if (!spin_until(ready, std::chrono::microseconds(200))) {
            std::unique_lock<std::mutex> lock(sleep_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, ready);
            sleepers_.fetch_sub(1);
        }
        return !stopping_.load();
    }

    Task task_ = nullptr;
    const void* context_ = nullptr;
    long count_ = 0;
    alignas(64) std::atomic<long> next_{0};
    alignas(64) std::atomic<unsigned> epoch_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex call_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// Made on first use and never destroyed: workers may still wait in it when the process ends. A forked child has no
// workers, so it starts with none and makes its own.
inline Pool* current = nullptr;
inline int wanted_threads = 1;

inline Pool& get() {
    if (!current) {
        static const int once = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
        (void)once;
        current = new Pool(wanted_threads);
    }
    return *current;
}

inline void set_threads(int threads) {
    wanted_threads = threads < 1 ? 1 : threads;
    if (current && current->threads() != wanted_threads) {
        current->stop();
        delete current;
        current = nullptr;
    }
}

template <class F>
void parallel_for(long count, const F& f) {
    if (count <= 1 || wanted_threads == 1) {
        for (long i = 0; i < count; ++i) f(i);
        return;
    }
    get().run(count, [](const void* context, long i) { (*static_cast<const F*>(context))(i); }, &f);
}

// Runs f(begin, end) over 0 .. count in about 'pieces_per_thread' pieces a thread, or in one where 'work' (in rough
// multiply-adds) is too little to be worth waking anybody for. Pieces handed out in turn lie apart, so that those which
// a thread takes one after the other mostly follow each other in memory.
template <class F>
void parallel_ranges(long count, double work, int pieces_per_thread, const F& f) {
    const long threads = std::min<long>(wanted_threads, count);
    if (work < 20000 || threads <= 1) return f(0L, count);
    const long each = std::min<long>(pieces_per_thread, count / threads), pieces = threads * each;
    parallel_for(pieces, [&](long turn) {
        const long i = turn % threads * each + turn / threads;
        f(count * i / pieces, count * (i + 1) / pieces);
    });
}

}  // namespace pool

#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "deltic.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define DELTIC_PAUSE() _mm_pause()
#else
#define DELTIC_PAUSE() std::this_thread::yield()
#endif

namespace {

// How long a thread looks for news before it sleeps: longer than the gap between two pieces of a step, shorter than
// anybody would notice.
constexpr auto kPatience = std::chrono::microseconds(60);

// Looks for `ready` for a while; false if it has not come.
template <typename Ready> bool look(Ready ready) {
    auto until = std::chrono::steady_clock::now() + kPatience;
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            DELTIC_PAUSE();
        }
    } while (std::chrono::steady_clock::now() < until);
    return ready();
}

struct Scratch {
    void *data = nullptr;
    int64_t bytes = 0;
};

}  // namespace

// One job at a time. `ticket` holds the job's number in its upper half and the next piece in its lower one, so that a
// thread which wakes up late can never take a piece of a job that it has not read.
struct deltic_pool {
    std::vector<std::thread> threads;
    Scratch buffers[deltic::kScratch];

    std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> job{0};      // number of the newest job: what sleeping threads wait on
    std::atomic<uint32_t> left{0};     // pieces of it that are not done
    std::atomic<bool> closing{false};
    std::atomic<int64_t> pieces{0};
    std::atomic<void (*)(void *, int64_t, int)> body{nullptr};
    std::atomic<void *> context{nullptr};

    // Takes pieces of job `number` until none is left.
    void work(uint32_t number, int thread) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        while (uint32_t(seen >> 32) == number) {
            int64_t piece = int64_t(seen & 0xffffffff);
            auto run = body.load(std::memory_order_relaxed);
            auto with = context.load(std::memory_order_relaxed);
            if (piece >= pieces.load(std::memory_order_relaxed)) return;
            // the fields read above belong to this job if the ticket is still the same
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(with, piece, thread);
            if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_all();
            seen = ticket.load(std::memory_order_acquire);
        }
    }

    void serve(int thread) {
        uint32_t done = 0;
        while (true) {
            auto news = [&] { return job.load(std::memory_order_acquire) != done; };
            if (!look(news)) job.wait(done, std::memory_order_acquire);
            if (closing.load(std::memory_order_acquire)) return;
            uint32_t number = job.load(std::memory_order_acquire);
            if (number == done) continue;
            work(number, thread);
            done = number;
        }
    }
};

namespace deltic {

void run_pieces(deltic_pool *pool, int64_t pieces, void (*body)(void *, int64_t, int), void *context) {
    if (pieces <= 0) return;
    if (pieces == 1 || pool->threads.empty()) {
        for (int64_t piece = 0; piece < pieces; ++piece) body(context, piece, 0);
        return;
    }
    uint32_t number = pool->job.load(std::memory_order_relaxed) + 1;
    // nobody takes pieces while the job changes: the old ticket has none left, the new number is not out yet
    pool->ticket.store(uint64_t(number) << 32 | 0xffffffffu, std::memory_order_release);
    pool->pieces.store(pieces, std::memory_order_relaxed);
    pool->body.store(body, std::memory_order_relaxed);
    pool->context.store(context, std::memory_order_relaxed);
    pool->left.store(uint32_t(pieces), std::memory_order_relaxed);
    pool->ticket.store(uint64_t(number) << 32, std::memory_order_release);
    pool->job.store(number, std::memory_order_release);
    pool->job.notify_all();
    pool->work(number, 0);
    auto finished = [&] { return pool->left.load(std::memory_order_acquire) == 0; };
    while (!look(finished)) {
        uint32_t rest = pool->left.load(std::memory_order_acquire);
        if (rest) pool->left.wait(rest, std::memory_order_acquire);
    }
}

int pool_threads(const deltic_pool *pool) { return int(pool->threads.size()) + 1; }

void *scratch(deltic_pool *pool, int slot, int64_t bytes) {
    Scratch &buffer = pool->buffers[slot];
    if (buffer.bytes < bytes) {
        std::free(buffer.data);
        buffer = {};
        int64_t size = (bytes + 63) / 64 * 64;
        buffer.data = std::aligned_alloc(64, size_t(size));
        if (!buffer.data) throw std::bad_alloc();
        buffer.bytes = size;
    }
    return buffer.data;
}

}  // namespace deltic

extern "C" deltic_pool *deltic_pool_new(int threads) {
    auto *pool = new (std::nothrow) deltic_pool;
    if (!pool) return nullptr;
    try {
        for (int thread = 1; thread < threads; ++thread) pool->threads.emplace_back([pool, thread] { pool->serve(thread); });
    } catch (...) {  // fewer threads than asked for: the work is still done
    }
    return pool;
}

extern "C" void deltic_pool_free(deltic_pool *pool) {
    if (!pool) return;
    pool->closing = true;
    pool->job.fetch_add(1, std::memory_order_release);
    pool->job.notify_all();
    for (auto &thread : pool->threads) thread.join();
    for (Scratch &buffer : pool->buffers) std::free(buffer.data);
    delete pool;
}

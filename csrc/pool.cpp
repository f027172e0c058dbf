#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "levels.hpp"
#include "pause.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Time in microseconds that a thread spins before it sleeps: longer than the gap between two jobs of a step, too short
// to be noticed.
constexpr int64_t kPatience = 60;

// Spins until `ready` or for `patience` microseconds. False if it is not ready then.
template <typename Ready> bool look(int64_t patience, Ready ready) {
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(patience);
    do {
        for (int i = 0; i < 64; ++i) {
            if (ready()) return true;
            DELTIC_PAUSE();
        }
    } while (std::chrono::steady_clock::now() < until);
    return ready();
}

constexpr int64_t kLargePage = 2 << 20;

struct Scratch {
    void *data = nullptr;
    int64_t bytes = 0;
};

}  // namespace

// The pieces of one thread. `ticket` has the job number in its upper half and the next piece in its lower half, so that
// a thread that wakes up late cannot take a piece of a job that it has not read.
struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> end{0};
};

// Runs one job at a time. Each thread has a share of neighbouring pieces, because memory bandwidth is highest with one
// stream per thread. A thread that has finished its share takes pieces from other shares.
struct deltic_pool {
    explicit deltic_pool(const deltic::Kernels *kernels) : kernels(kernels) {}

    const deltic::Kernels *kernels;
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<deltic_pool>> alone;  // one per thread
    Scratch buffers[deltic::kScratch];

    std::vector<Share> shares;
    std::atomic<uint32_t> job{0};      // number of the newest job; sleeping threads wait on it
    std::atomic<uint32_t> left{0};     // unfinished pieces of that job
    std::atomic<bool> closing{false};
    std::atomic<int64_t> patience{kPatience};
    std::atomic<void (*)(void *, int64_t, int)> body{nullptr};
    std::atomic<void *> context{nullptr};

    ~deltic_pool() {
        for (Scratch &buffer : buffers) std::free(buffer.data);
    }

    // Runs pieces of job `number` until none is left, first from the thread's own share.
    void work(uint32_t number, int thread) {
        for (size_t i = 0; i < shares.size(); ++i) take(shares[(size_t(thread) + i) % shares.size()], number, thread);
    }

    void take(Share &share, uint32_t number, int thread) {
        uint64_t seen = share.ticket.load(std::memory_order_acquire);
        while (uint32_t(seen >> 32) == number) {
            auto run = body.load(std::memory_order_relaxed);
            auto with = context.load(std::memory_order_relaxed);
            if (uint32_t(seen) >= share.end.load(std::memory_order_relaxed)) return;
            // the fields read above belong to this job if the ticket has not changed
            if (!share.ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            run(with, uint32_t(seen), thread);
            if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_all();
            seen = share.ticket.load(std::memory_order_acquire);
        }
    }

    void serve(int thread) {
        uint32_t done = 0;
        while (true) {
            auto news = [&] { return job.load(std::memory_order_acquire) != done; };
            if (!look(patience.load(std::memory_order_relaxed), news)) job.wait(done, std::memory_order_acquire);
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
    // No thread may take a piece while the job changes: the old tickets are invalidated first, the new ones are stored
    // last.
    for (Share &share : pool->shares)
        share.ticket.store(uint64_t(number) << 32 | 0xffffffffu, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    pool->body.store(body, std::memory_order_relaxed);
    pool->context.store(context, std::memory_order_relaxed);
    pool->left.store(uint32_t(pieces), std::memory_order_relaxed);
    int64_t shares = int64_t(pool->shares.size());
    for (int64_t i = 0; i < shares; ++i) {
        Share &share = pool->shares[size_t(i)];
        share.end.store(uint32_t(pieces * (i + 1) / shares), std::memory_order_relaxed);
        share.ticket.store(uint64_t(number) << 32 | uint32_t(pieces * i / shares), std::memory_order_release);
    }
    pool->job.store(number, std::memory_order_release);
    pool->job.notify_all();
    pool->work(number, 0);
    auto finished = [&] { return pool->left.load(std::memory_order_acquire) == 0; };
    while (!look(kPatience, finished)) {
        uint32_t rest = pool->left.load(std::memory_order_acquire);
        if (rest) pool->left.wait(rest, std::memory_order_acquire);
    }
}

const Kernels &kernels(const deltic_pool *pool) { return *pool->kernels; }

void be_patient(deltic_pool *pool, int64_t microseconds) {
    pool->patience.store(microseconds, std::memory_order_relaxed);
}

int pool_threads(const deltic_pool *pool) { return int(pool->threads.size()) + 1; }

deltic_pool *alone(deltic_pool *pool, int thread) { return pool->alone[size_t(thread)].get(); }

void *scratch(deltic_pool *pool, int slot, int64_t bytes) {
    Scratch &buffer = pool->buffers[slot];
    if (buffer.bytes < bytes) {
        std::free(buffer.data);
        buffer = {};
        // large buffers get whole large pages: activations are streamed like weights
        int64_t page = bytes >= kLargePage ? kLargePage : 64, size = (bytes + page - 1) / page * page;
        buffer.data = std::aligned_alloc(size_t(page), size_t(size));
        if (!buffer.data) throw std::bad_alloc();
        buffer.bytes = size;
#if defined(MADV_HUGEPAGE)
        if (page == kLargePage) madvise(buffer.data, size_t(size), MADV_HUGEPAGE);
#endif
    }
    return buffer.data;
}

}  // namespace deltic

extern "C" deltic_pool *deltic_pool_new(int threads, int level) {
    const deltic::Kernels *kernels = deltic::kernels_of(level);
    auto *pool = kernels ? new (std::nothrow) deltic_pool(kernels) : nullptr;
    if (!pool) return nullptr;
    try {
        pool->shares = std::vector<Share>(size_t(threads < 1 ? 1 : threads));
        for (size_t i = 0; i < pool->shares.size(); ++i) pool->alone.emplace_back(new deltic_pool(kernels));
        for (int thread = 1; thread < threads; ++thread)
            pool->threads.emplace_back([pool, thread] { pool->serve(thread); });
    } catch (...) {  // fewer threads than requested: the pool still works
    }
    return pool;
}

extern "C" void deltic_pool_free(deltic_pool *pool) {
    if (!pool) return;
    pool->closing = true;
    pool->job.fetch_add(1, std::memory_order_release);
    pool->job.notify_all();
    for (auto &thread : pool->threads) thread.join();
    delete pool;
}

// The thread pool that runs the work of a call.
//
// Inline code here and in simd.hpp is always inlined or has internal linkage. A function that the linker may merge
// across files would contain the instructions of an arbitrary level.
//
// Idle threads sleep. If another program occupies a thread's core, only the piece that the thread has begun is delayed:
// pieces are small.
#pragma once
#include <cstdint>
#include <type_traits>

struct deltic_pool;

namespace deltic {

// Calls body(context, piece, thread) for every piece in [0, pieces) and returns when all are done. The assignment of
// pieces to threads is not deterministic, so pieces must write to separate memory. `thread` is below `pool_threads`.
void run_pieces(deltic_pool *pool, int64_t pieces, void (*body)(void *, int64_t, int), void *context);

int pool_threads(const deltic_pool *pool);

// Sets how long idle threads spin before they sleep; initially 60 microseconds.
void be_patient(deltic_pool *pool, int64_t microseconds);

// A pool without other threads, at the same level and with separate scratch memory. A body uses it to call kernels,
// which then run in the body's thread. thread: the argument of the body.
deltic_pool *alone(deltic_pool *pool, int thread);

// Returns `bytes` of uninitialized scratch memory, aligned to 64. It stays valid until a call requests more from the
// same slot. May be null for 0 bytes. Throws std::bad_alloc.
// slot: 0 .. kScratch - 1; buffers in use at the same time need different slots. Each kernel documents its slots.
constexpr int kScratch = 40;
void *scratch(deltic_pool *pool, int slot, int64_t bytes);
template <typename T> [[gnu::always_inline]] inline T *scratch_of(deltic_pool *pool, int slot, int64_t count) {
    return static_cast<T *>(scratch(pool, slot, count * int64_t(sizeof(T))));
}

// Runs a lambda (piece, thread) as the body.
template <typename Body> [[gnu::always_inline]] inline void parallel(deltic_pool *pool, int64_t pieces, Body &&body) {
    using Plain = std::remove_reference_t<Body>;
    run_pieces(
        pool, pieces,
        [](void *context, int64_t piece, int thread) { (*static_cast<Plain *>(context))(piece, thread); },
        const_cast<void *>(static_cast<const void *>(&body)));
}

}  // namespace deltic

// The threads that share the work of a call.
//
// Inline code here and in simd.hpp is always inlined or of internal linkage: a function that the linker may share
// between files would carry the instructions of whichever level it was compiled for.
//
// Idle threads sleep. A thread whose core is taken by another program holds up the piece that it has begun, and no
// more: work is handed out in small pieces.
#pragma once
#include <cstdint>
#include <type_traits>

struct deltic_pool;

namespace deltic {

// body(context, piece, thread) for every piece in [0, pieces); returns when all are done. Which thread gets which
// piece is a matter of chance, so pieces must write to places of their own. `thread` is below `pool_threads`.
void run_pieces(deltic_pool *pool, int64_t pieces, void (*body)(void *, int64_t, int), void *context);

int pool_threads(const deltic_pool *pool);

// Idle threads look for work for so long before they sleep; at first for 60 microseconds.
void be_patient(deltic_pool *pool, int64_t microseconds);

// A pool without other threads, at the same level, with scratch memory of its own: for a body that calls kernels, which
// then run in its thread. thread: as given to the body.
deltic_pool *alone(deltic_pool *pool, int thread);

// `bytes` of scratch memory, aligned to 64, that stay valid until more is asked of the same slot; not initialised. Null
// may stand for no bytes. Throws std::bad_alloc.
// slot: buffers in use at the same time need different ones (0 .. kScratch - 1). Each kernel documents the slots
// that it takes.
constexpr int kScratch = 40;
void *scratch(deltic_pool *pool, int slot, int64_t bytes);
template <typename T> [[gnu::always_inline]] inline T *scratch_of(deltic_pool *pool, int slot, int64_t count) {
    return static_cast<T *>(scratch(pool, slot, count * int64_t(sizeof(T))));
}

// A lambda (piece, thread) as the body.
template <typename Body> [[gnu::always_inline]] inline void parallel(deltic_pool *pool, int64_t pieces, Body &&body) {
    using Plain = std::remove_reference_t<Body>;
    run_pieces(
        pool, pieces,
        [](void *context, int64_t piece, int thread) { (*static_cast<Plain *>(context))(piece, thread); },
        const_cast<void *>(static_cast<const void *>(&body)));
}

}  // namespace deltic

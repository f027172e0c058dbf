// What a thread does that looks for news again and again.
#pragma once
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#define DELTIC_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define DELTIC_PAUSE() asm volatile("isb")  // `yield` takes no time at all
#else
#define DELTIC_PAUSE() std::this_thread::yield()
#endif

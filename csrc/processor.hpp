// The instructions of an x86-64 processor. zig's __builtin_cpu_supports finds none.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>

namespace deltic {

// A feature counts only if the operating system saves its registers.
struct Processor {
    // avx2 with FMA and F16C; avx512: F, BW, DQ and VL; vnni, bf16 as AVX-512; amx: tiles with bytes and bfloat16
    bool intel, avx2, avx512, vnni, bf16, amx;
};

inline Processor detect_processor() {
    unsigned last = 0, vendor = 0, a, b, c, d;
    Processor found{};
    if (!__get_cpuid(0, &last, &vendor, &c, &d)) return found;
    found.intel = vendor == signature_INTEL_ebx;
    constexpr unsigned kFma = 1u << 12, kXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    unsigned basic = 0, wanted = kFma | kXsave | kAvx | kF16c;
    if (!__get_cpuid(1, &a, &b, &basic, &d) || (basic & wanted) != wanted) return found;
    unsigned saved, unused;
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    constexpr unsigned kSavesAvx = 0x06, kSavesAvx512 = 0xe6;
    unsigned wide = 0, products = 0;
    if (!__get_cpuid_count(7, 0, &a, &wide, &products, &d)) return found;
    found.avx2 = (saved & kSavesAvx) == kSavesAvx && (wide & 1u << 5);
    constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    found.avx512 = found.avx2 && (saved & kSavesAvx512) == kSavesAvx512 && (wide & kAvx512) == kAvx512;
    found.vnni = found.avx512 && (products & 1u << 11);
    unsigned features = 0;
    constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
    found.amx = found.avx512 && __get_cpuid_count(7, 0, &a, &b, &c, &features) && (features & kAmx) == kAmx;
    found.bf16 = found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
    return found;
}

}  // namespace deltic
#endif

#include "levels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace deltic {
namespace {

#define DELTIC_TABLE(level, products)                                                                                  \
    {products::linear, products::linear_fine, products::linear_many, level::gdn, level::attention, level::fold_ring,   \
     level::store_kv,  level::add_norm,       level::silu_mul,       level::top, level::adjust,    level::draw_any,    \
     level::full_attention, level::layer_norm, level::gelu, level::add_bias, level::dots, level::gate_rounded}

constexpr Kernels kTables[] = {
    DELTIC_TABLE(portable, portable),
#if defined(__x86_64__)
    DELTIC_TABLE(avx2, avx2), DELTIC_TABLE(avx512, avx512), DELTIC_TABLE(vnni, vnni),
    DELTIC_TABLE(bf16, bf16), DELTIC_TABLE(bf16, amx),
#endif
};

#if defined(__x86_64__)
// Whether the processor has AMX with products of bytes and of bfloat16, and Linux lets this process use its registers.
bool may_use_amx() {
    unsigned a, b, c, features;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &features)) return false;
    constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
    if ((features & kNeeded) != kNeeded) return false;
#if defined(__linux__)
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}
#endif

int best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!has_avx2) return DELTIC_PORTABLE;
    auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!has_avx512) return DELTIC_AVX2;
    if (!__builtin_cpu_supports("avx512vnni")) return DELTIC_AVX512;
    if (!__builtin_cpu_supports("avx512bf16")) return DELTIC_VNNI;
    return may_use_amx() ? DELTIC_AMX : DELTIC_BF16_LEVEL;
#else
    return DELTIC_PORTABLE;
#endif
}

}  // namespace

int64_t fetch_ahead() {
#if defined(__x86_64__)
    if (__builtin_cpu_is("intel")) return 4096;  // 1.2 times as fast as 1536 (Emerald Rapids), no slower up to 16384
#endif
    return 1536;  // from 2048 on Zen 4 loses its own view of the stream, and a third of the speed
}

const Kernels *kernels_of(int level) { return level < 0 || level > best_level() ? nullptr : &kTables[level]; }

}  // namespace deltic

extern "C" int deltic_abi(void) { return DELTIC_ABI; }
extern "C" int deltic_page(void) { return DELTIC_PAGE; }
extern "C" int deltic_ring(void) { return DELTIC_RING; }
extern "C" int deltic_panel(void) { return DELTIC_PANEL; }
extern "C" int deltic_slices(void) { return DELTIC_SLICES; }
extern "C" int deltic_best_level(void) { return deltic::best_level(); }

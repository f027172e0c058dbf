#include "levels.hpp"

#include "processor.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace deltic {
namespace {

#define DELTIC_TABLE(level, products)                                                                                  \
    {products::linear, products::linear_fine, products::linear_many, level::gdn, level::attention, level::fold_ring,   \
     level::store_kv,  level::add_norm,       level::silu_mul,       level::top, level::adjust,    level::draw_any,    \
     level::full_attention, level::layer_norm, level::gelu, level::add_bias, level::dots, level::gate_rounded,         \
     level::low_rank_in, level::low_rank_out}

constexpr Kernels kTables[] = {
    DELTIC_TABLE(portable, portable),
#if defined(__x86_64__)
    DELTIC_TABLE(avx2, avx2), DELTIC_TABLE(avx512, avx512), DELTIC_TABLE(vnni, vnni),
    DELTIC_TABLE(bf16, bf16), DELTIC_TABLE(bf16, amx),
#elif defined(__aarch64__)
    DELTIC_TABLE(dotprod, dotprod), DELTIC_TABLE(i8mm, i8mm),
#endif
};

#if defined(__aarch64__) && defined(__linux__)
int arm_level() {
    // Bits of <asm/hwcap.h>. Old copies of that header lack some of them.
    constexpr unsigned long kDotprod = 1 << 20, kI8mm = 1 << 13;
    if (!(getauxval(AT_HWCAP) & kDotprod)) return DELTIC_PORTABLE;
    return getauxval(AT_HWCAP2) & kI8mm ? DELTIC_I8MM : DELTIC_DOTPROD;
}
#elif defined(__aarch64__) && defined(__APPLE__)
int arm_level() {
    int found = 0;
    size_t size = sizeof found;
    bool known = sysctlbyname("hw.optional.arm.FEAT_I8MM", &found, &size, nullptr, 0) == 0;
    return known && found ? DELTIC_I8MM : DELTIC_DOTPROD;  // all Apple processors for the Mac have dot products
}
#elif defined(__aarch64__)
int arm_level() { return DELTIC_PORTABLE; }
#elif defined(__x86_64__)
const Processor kProcessor = detect_processor();

// True if Linux grants this process the AMX tile registers, which a process must request.
bool may_use_tiles() {
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
    if (!kProcessor.avx2) return DELTIC_PORTABLE;
    if (!kProcessor.avx512) return DELTIC_AVX2;
    if (!kProcessor.vnni) return DELTIC_AVX512;
    if (!kProcessor.bf16) return DELTIC_VNNI;
    return kProcessor.amx && may_use_tiles() ? DELTIC_AMX : DELTIC_BF16_LEVEL;
#elif defined(__aarch64__)
    return arm_level();
#else
    return DELTIC_PORTABLE;
#endif
}

}  // namespace

int64_t fetch_ahead(bool sequential) {
#if defined(__x86_64__)
    if (kProcessor.intel) return 4096;  // 1.2 times as fast as 1536 (Emerald Rapids), no slower up to 16384
#endif
    // From 2048 on, Zen 4's hardware prefetcher loses the stream, which costs a third of the speed. A sequential stream
    // is fastest without software prefetch.
    return sequential ? 0 : 1536;
}

const Kernels *kernels_of(int level) { return level < 0 || level > best_level() ? nullptr : &kTables[level]; }

}  // namespace deltic

extern "C" int deltic_abi(void) { return DELTIC_ABI; }
extern "C" int deltic_page(void) { return DELTIC_PAGE; }
extern "C" int deltic_ring(void) { return DELTIC_RING; }
extern "C" int deltic_panel(void) { return DELTIC_PANEL; }
extern "C" int deltic_slices(void) { return DELTIC_SLICES; }
extern "C" int deltic_best_level(void) { return deltic::best_level(); }

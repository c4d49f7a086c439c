// Which kernel sets were built in, and which of them this CPU can run. Asked once per call; nothing is cached.
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace quire {

#if defined(__x86_64__)
namespace {

#if defined(QUIRE_EMULATE)
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

// Bits that not every compiler knows by name. Leaf 1: F16C; leaf 7, subleaf 1: AVX-VNNI.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#if defined(QUIRE_HAS_AVXVNNI)
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return kEmulated || (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1));
}
#endif

// Leaf 7: AMX-TILE and AMX-INT8. The system must save the tiles (XCR0), and Linux gives them to a process that asks.
#if defined(QUIRE_HAS_AMX)
bool has_amx() {
    if (kEmulated) return true;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;
#if defined(__linux__)
    constexpr long kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace
#endif

int available_kernels(const Kernels** out, int capacity) {
    int n = 0;
    auto offer = [&](const Kernels* k) {
        if (n < capacity) out[n++] = k;
    };
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq");
    if (avx512 && (kEmulated || __builtin_cpu_supports("avx512vnni"))) {
#if defined(QUIRE_HAS_AMX)
        if (has_amx()) offer(amx_kernels());
#endif
        offer(avx512_kernels());
    }
#if defined(QUIRE_HAS_AVXVNNI)
    if (avx2 && has_avx_vnni()) offer(avxvnni_kernels());
#endif
    if (avx512) offer(avx512bw_kernels());
    if (avx2) offer(avx2_kernels());
#elif defined(__aarch64__)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) offer(neondot_kernels());
#elif defined(__APPLE__)
    offer(neondot_kernels());  // every Apple CPU that runs this has it
#endif
    offer(neon_kernels());
#endif
    offer(scalar_kernels());
    return n;
}

const Kernels* find_kernels(const char* name) {
    const Kernels* sets[8];
    int n = available_kernels(sets, 8);
    for (int i = 0; i < n; i++)
        if (!strcmp(sets[i]->name, name)) return sets[i];
    return nullptr;
}

}  // namespace quire

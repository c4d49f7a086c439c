// What this machine can do at best, for floors: int8 dot products and fp32 multiply-adds from registers alone, and memory
// read over buffers of several sizes. Prints one JSON object; rates are 1e9 operations (a multiply-add is two) or bytes
// per second. Each figure is the best of a few short runs: a ceiling, not an average.
//
//     peaks [threads [int8]]        both one thread and this many are measured; "int8" leaves the rest out
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace {

constexpr double kSeconds = 0.12;  // of one run
constexpr int kRuns = 5;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A loop takes a number of rounds and returns something that depends on all of them, so that none is left out.
using Loop = uint64_t (*)(int64_t rounds);
std::atomic<uint64_t> sink{0};

// Runs body(thread) on every thread at once, and returns the sum of what they return.
template <class Body> double together(int threads, Body body) {
    std::atomic<int> waiting{threads};
    std::vector<double> rates((size_t)threads);
    std::vector<std::thread> others;
    auto one = [&](int t) {
        waiting.fetch_sub(1);
        while (waiting.load() > 0) std::this_thread::yield();
        rates[(size_t)t] = body(t);
    };
    for (int t = 1; t < threads; t++) others.emplace_back(one, t);
    one(0);
    for (auto& o : others) o.join();
    double sum = 0;
    for (double r : rates) sum += r;
    return sum;
}

double rate(int threads, Loop loop, double per_round) {
    double best = 0;
    for (int i = 0; i < kRuns; i++) {
        double r = together(threads, [&](int) {
            int64_t rounds = 0;
            double begun = now(), spent = 0;
            for (; spent < kSeconds; spent = now() - begun, rounds += 20000) sink += loop(20000);
            return (double)rounds * per_round / spent;
        });
        if (r > best) best = r;
    }
    return best * 1e-9;
}

// Twelve chains cover the latency of every instruction here, and with their operands fit 16 registers. They are named one by
// one because compilers keep an array in memory; the empty asm keeps the rounds apart.
constexpr int kChains = 12;
#define EACH(F) F(s0) F(s1) F(s2) F(s3) F(s4) F(s5) F(s6) F(s7) F(s8) F(s9) F(s10) F(s11)

#if defined(__x86_64__)
#define TARGET(t) __attribute__((target(t)))
#define KEEP(x) __asm__ volatile("" : "+x"(x));

TARGET("avx512f,avx512bw,avx512vl,avx512vnni") uint64_t vnni512(int64_t rounds) {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2), sum = _mm512_setzero_si512();
#define F(s) __m512i s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = _mm512_dpbusd_epi32(s, a, b); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = _mm512_xor_si512(sum, s);
    EACH(F)
#undef F
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(sum));
}

TARGET("avx2,avxvnni") uint64_t vnni256(int64_t rounds) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(2), sum = _mm256_setzero_si256();
#define F(s) __m256i s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = _mm256_dpbusd_avx_epi32(s, a, b); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = _mm256_xor_si256(sum, s);
    EACH(F)
#undef F
    return (uint64_t)_mm256_extract_epi64(sum, 0);
}

// Without a dot-product instruction: products in pairs to 16 bits, eight of those sums (as many as codes of four bits allow) in 16 bits,
// pairs of them to 32 bits, an addition. KEEP(a): a compiler that knows the factors multiplies them once.
constexpr int kWords = 8;
TARGET("avx512f,avx512bw") uint64_t words512(int64_t rounds) {
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2), ones = _mm512_set1_epi16(1), total = _mm512_setzero_si512();
#define F(s) __m512i s = total;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
        __m512i p;
#define F(s) KEEP(a) s = _mm512_maddubs_epi16(a, b); KEEP(s)
        EACH(F)
#undef F
        for (int i = 1; i < kWords; i++) {
#define F(s) KEEP(a) p = _mm512_maddubs_epi16(a, b); KEEP(p) s = _mm512_add_epi16(s, p); KEEP(s)
            EACH(F)
#undef F
        }
#define F(s) p = _mm512_madd_epi16(s, ones); KEEP(p) total = _mm512_add_epi32(total, p); KEEP(total)
        EACH(F)
#undef F
    }
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(total));
}

TARGET("avx2") uint64_t words256(int64_t rounds) {
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(2), ones = _mm256_set1_epi16(1), total = _mm256_setzero_si256();
#define F(s) __m256i s = total;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
        __m256i p;
#define F(s) KEEP(a) s = _mm256_maddubs_epi16(a, b); KEEP(s)
        EACH(F)
#undef F
        for (int i = 1; i < kWords; i++) {
#define F(s) KEEP(a) p = _mm256_maddubs_epi16(a, b); KEEP(p) s = _mm256_add_epi16(s, p); KEEP(s)
            EACH(F)
#undef F
        }
#define F(s) p = _mm256_madd_epi16(s, ones); KEEP(p) total = _mm256_add_epi32(total, p); KEEP(total)
        EACH(F)
#undef F
    }
    return (uint64_t)_mm256_extract_epi64(total, 0);
}

TARGET("avx512f") uint64_t fma512(int64_t rounds) {
    __m512 a = _mm512_set1_ps(1e-9f), b = _mm512_set1_ps(0.5f), sum = _mm512_setzero_ps();
#define F(s) __m512 s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = _mm512_fmadd_ps(a, b, s); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = _mm512_add_ps(sum, s);
    EACH(F)
#undef F
    return (uint64_t)_mm_cvtss_f32(_mm512_castps512_ps128(sum));
}

TARGET("avx2,fma") uint64_t fma256(int64_t rounds) {
    __m256 a = _mm256_set1_ps(1e-9f), b = _mm256_set1_ps(0.5f), sum = _mm256_setzero_ps();
#define F(s) __m256 s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = _mm256_fmadd_ps(a, b, s); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = _mm256_add_ps(sum, s);
    EACH(F)
#undef F
    return (uint64_t)_mm256_cvtss_f32(sum);
}

#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAVE_AMX 1
// Six accumulators over one pair of operands: enough to hide a tile product's latency. 16 x 16 results of 64 products each.
TARGET("amx-tile,amx-int8") uint64_t amx(int64_t rounds) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t columns[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; t++) shape.columns[t] = 64, shape.rows[t] = 16;
    alignas(64) int8_t ones[1024];
    alignas(64) int32_t out[256];
    memset(ones, 1, sizeof ones);
    // Compilers of this age move tile intrinsics across the configuration; the barriers hold them in place.
    _tile_loadconfig(&shape);
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (int64_t r = 0; r < rounds; r++) {
        _tile_dpbssd(0, 6, 7);
        _tile_dpbssd(1, 6, 7);
        _tile_dpbssd(2, 6, 7);
        _tile_dpbssd(3, 6, 7);
        _tile_dpbssd(4, 6, 7);
        _tile_dpbssd(5, 6, 7);
    }
    _tile_stored(0, out, 64);
    __asm__ volatile("" ::: "memory");
    _tile_release();
    return (uint64_t)out[0];
}

// AMX needs the kernel's leave: 8 KiB more of state for every thread.
bool has_amx() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
}
#endif

bool has_avxvnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

TARGET("avx2") uint64_t read_avx2(const uint8_t* p, size_t n) {
    __m256i s[4] = {};
    for (size_t i = 0; i + 128 <= n; i += 128)
        for (int j = 0; j < 4; j++) s[j] = _mm256_xor_si256(s[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
    return (uint64_t)_mm256_extract_epi64(_mm256_xor_si256(_mm256_xor_si256(s[0], s[1]), _mm256_xor_si256(s[2], s[3])), 0);
}
#elif defined(__aarch64__)
#if defined(__clang__)
#define DOTPROD __attribute__((target("dotprod")))
#else
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

#define KEEP(x) __asm__ volatile("" : "+w"(x));

DOTPROD uint64_t sdot(int64_t rounds) {
    int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(2);
    int32x4_t sum = vdupq_n_s32(0);
#define F(s) int32x4_t s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = vdotq_s32(s, a, b); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = vaddq_s32(sum, s);
    EACH(F)
#undef F
    return (uint64_t)vaddvq_s32(sum);
}

uint64_t fma128(int64_t rounds) {
    float32x4_t a = vdupq_n_f32(1e-9f), b = vdupq_n_f32(0.5f), sum = vdupq_n_f32(0);
#define F(s) float32x4_t s = sum;
    EACH(F)
#undef F
    for (int64_t r = 0; r < rounds; r++) {
#define F(s) s = vfmaq_f32(s, a, b); KEEP(s)
        EACH(F)
#undef F
    }
#define F(s) sum = vaddq_f32(sum, s);
    EACH(F)
#undef F
    return (uint64_t)vaddvq_f32(sum);
}
#endif

uint64_t read_plain(const uint8_t* p, size_t n) {
    uint64_t s[4] = {};
    for (size_t i = 0; i + 32 <= n; i += 32)
        for (size_t j = 0; j < 4; j++) {
            uint64_t x;
            memcpy(&x, p + i + 8 * j, 8);
            s[j] ^= x;
        }
    return s[0] ^ s[1] ^ s[2] ^ s[3];
}

using Read = uint64_t (*)(const uint8_t*, size_t);

// Each thread reads its own part of the buffer, again and again, as decoding reads the weights.
double read_rate(int threads, Read read, const uint8_t* p, size_t bytes) {
    const size_t part = bytes / (size_t)threads / 4096 * 4096;
    double best = 0;
    for (int i = 0; i < kRuns; i++) {
        double r = together(threads, [&](int t) {
            double begun = now(), spent = 0;
            int64_t passes = 0;
            for (; spent < kSeconds; spent = now() - begun, passes++) sink += read(p + (size_t)t * part, part);
            return (double)passes * (double)part / spent;
        });
        if (r > best) best = r;
    }
    return best * 1e-9;
}

const char* comma = "";

void show(const char* name, int threads, Loop loop, double per_round) {
    printf("%s\n  \"%s\": {\"1\": %.2f", comma, name, rate(1, loop, per_round));
    if (threads > 1) printf(", \"%d\": %.2f", threads, rate(threads, loop, per_round));
    printf("}");
    comma = ",";
}

// False when there is no memory for it.
bool read_rates(int threads, Read read) {
    const size_t largest = (size_t)2048 << 20;
    std::unique_ptr<uint8_t, void (*)(void*)> buffer((uint8_t*)malloc(largest), free);
    if (!buffer) {
        fprintf(stderr, "peaks: no memory for a buffer of 2 GiB\n");
        return false;
    }
    memset(buffer.get(), 1, largest);  // real pages, not the zero page
    comma = "";
    for (int mib : {64, 96, 128, 256, 512, 1024, 2048}) {
        printf("%s\n  \"%d\": {\"1\": %.2f", comma, mib, read_rate(1, read, buffer.get(), (size_t)mib << 20));
        if (threads > 1) printf(", \"%d\": %.2f", threads, read_rate(threads, read, buffer.get(), (size_t)mib << 20));
        printf("}");
        comma = ",";
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    int threads = argc > 1 ? atoi(argv[1]) : (int)std::thread::hardware_concurrency();
    if (threads < 1 || threads > 1024) {
        fprintf(stderr, "peaks: the number of threads must be between 1 and 1024\n");
        return 2;
    }
    const bool whole = argc < 3 || strcmp(argv[2], "int8");
    Read read = read_plain;
    printf("{\"threads\": %d, \"int8\": {", threads);
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (avx2) read = read_avx2;
    if (avx512 && __builtin_cpu_supports("avx512vnni")) show("avx512vnni", threads, vnni512, kChains * 128.0);
    if (avx2 && has_avxvnni()) show("avxvnni", threads, vnni256, kChains * 64.0);
    if (avx512) show("avx512bw", threads, words512, kWords * kChains * 128.0);
    if (avx2) show("avx2", threads, words256, kWords * kChains * 64.0);
#if defined(HAVE_AMX)
    if (has_amx()) show("amx", threads, amx, 6 * 16 * 16 * 64 * 2.0);
#endif
    comma = "";
    printf("}, \"fp32\": {");
    if (whole && avx512) show("avx512", threads, fma512, kChains * 32.0);
    if (whole && avx2) show("avx2", threads, fma256, kChains * 16.0);
#elif defined(__aarch64__)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
#endif
        show("sdot", threads, sdot, kChains * 32.0);
    comma = "";
    printf("}, \"fp32\": {");
    if (whole) show("neon", threads, fma128, kChains * 8.0);
#else
    printf("}, \"fp32\": {");
#endif
    printf("}, \"read\": {");
    if (whole && !read_rates(threads, read)) return 1;
    printf("}, \"checksum\": %llu}\n", (unsigned long long)(sink.load() & 0xffff));
    return 0;
}

// Detects the x86-64 level that the CPU and the operating system support: 1 (baseline), 3 (AVX2,
// FMA, F16C) or 4 (AVX-512 F, BW, CD, DQ, VL); 1 on other architectures. It is compiled into every
// library and called in the baseline one, which any CPU can load.
#include "conv_args.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

uint64_t enabled_state() {
  uint32_t low, high;
  // Inline assembly, since the intrinsic needs the xsave target feature, which the baseline lacks.
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

int level() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
  const bool osxsave = has(c, 27), fma = has(c, 12), f16c = has(c, 29), avx = has(c, 28);
  const bool movbe = has(c, 22);
  if (!(osxsave && avx && fma && f16c && movbe)) return 1;
  const uint64_t state = enabled_state();
  if ((state & 0x6) != 0x6) return 1;  // the operating system saves xmm and ymm registers
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
  const bool avx2 = has(b, 5), bmi = has(b, 3) && has(b, 8);
  if (!(avx2 && bmi)) return 1;
  uint32_t ea, eb, ec, ed;
  if (!__get_cpuid(0x80000001u, &ea, &eb, &ec, &ed) || !has(ec, 5)) return 1;  // lzcnt
  if ((state & 0xe6) != 0xe6) return 3;  // and zmm and mask registers
  const bool avx512 = has(b, 16) && has(b, 17) && has(b, 28) && has(b, 30) && has(b, 31);
  return avx512 ? 4 : 3;
}

}  // namespace

extern "C" CONVGRAD_EXPORT int convgrad_cpu_level(void) { return level(); }

#else

extern "C" CONVGRAD_EXPORT int convgrad_cpu_level(void) { return 1; }

#endif

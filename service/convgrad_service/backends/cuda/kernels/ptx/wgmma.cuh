// wgmma.mma_async for each N: 8 to 64 in steps of 8, to 256 in steps of 16, and 104. Part of
// warpgroup.cuh.
//
// Inline assembly names every accumulator register: for N = 8n CONVGRAD_D<n> lists the operand numbers,
// CONVGRAD_C<n> the constraints; the numbers that follow are those of the other operands.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

// The contiguous dimension of an operand in shared memory: K, or A's M and B's N (16-bit types only).
enum Major : int { kMajorK = 0, kMajorMn = 1 };

// c = a * b, or c += a * b where `scale_d`: M = 64, N = 8 * kFragments, K = 32 bytes (16 elements, or 8
// of float32, truncated to TF32). Each warp holds 16 rows of c, and of an A operand in registers, in
// mma's fragment layout (mma.cuh). Operands in shared memory are descriptors (warpgroup.cuh).
template <class T, int kFragments>
struct Wgmma;

#define CONVGRAD_D1 "%0,%1,%2,%3"
#define CONVGRAD_D2 CONVGRAD_D1 ",%4,%5,%6,%7"
#define CONVGRAD_D3 CONVGRAD_D2 ",%8,%9,%10,%11"
#define CONVGRAD_D4 CONVGRAD_D3 ",%12,%13,%14,%15"
#define CONVGRAD_D5 CONVGRAD_D4 ",%16,%17,%18,%19"
#define CONVGRAD_D6 CONVGRAD_D5 ",%20,%21,%22,%23"
#define CONVGRAD_D7 CONVGRAD_D6 ",%24,%25,%26,%27"
#define CONVGRAD_D8 CONVGRAD_D7 ",%28,%29,%30,%31"
#define CONVGRAD_D10 CONVGRAD_D8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CONVGRAD_D12 CONVGRAD_D10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define CONVGRAD_D13 CONVGRAD_D12 ",%48,%49,%50,%51"
#define CONVGRAD_D14 CONVGRAD_D12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define CONVGRAD_D16 CONVGRAD_D14 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define CONVGRAD_D18 CONVGRAD_D16 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define CONVGRAD_D20 CONVGRAD_D18 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define CONVGRAD_D22 CONVGRAD_D20 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define CONVGRAD_D24 CONVGRAD_D22 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define CONVGRAD_D26 CONVGRAD_D24 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define CONVGRAD_D28 CONVGRAD_D26 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define CONVGRAD_D30 CONVGRAD_D28 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define CONVGRAD_D32 CONVGRAD_D30 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define CONVGRAD_C(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define CONVGRAD_C1 CONVGRAD_C(0)
#define CONVGRAD_C2 CONVGRAD_C1, CONVGRAD_C(1)
#define CONVGRAD_C3 CONVGRAD_C2, CONVGRAD_C(2)
#define CONVGRAD_C4 CONVGRAD_C3, CONVGRAD_C(3)
#define CONVGRAD_C5 CONVGRAD_C4, CONVGRAD_C(4)
#define CONVGRAD_C6 CONVGRAD_C5, CONVGRAD_C(5)
#define CONVGRAD_C7 CONVGRAD_C6, CONVGRAD_C(6)
#define CONVGRAD_C8 CONVGRAD_C7, CONVGRAD_C(7)
#define CONVGRAD_C10 CONVGRAD_C8, CONVGRAD_C(8), CONVGRAD_C(9)
#define CONVGRAD_C12 CONVGRAD_C10, CONVGRAD_C(10), CONVGRAD_C(11)
#define CONVGRAD_C13 CONVGRAD_C12, CONVGRAD_C(12)
#define CONVGRAD_C14 CONVGRAD_C12, CONVGRAD_C(12), CONVGRAD_C(13)
#define CONVGRAD_C16 CONVGRAD_C14, CONVGRAD_C(14), CONVGRAD_C(15)
#define CONVGRAD_C18 CONVGRAD_C16, CONVGRAD_C(16), CONVGRAD_C(17)
#define CONVGRAD_C20 CONVGRAD_C18, CONVGRAD_C(18), CONVGRAD_C(19)
#define CONVGRAD_C22 CONVGRAD_C20, CONVGRAD_C(20), CONVGRAD_C(21)
#define CONVGRAD_C24 CONVGRAD_C22, CONVGRAD_C(22), CONVGRAD_C(23)
#define CONVGRAD_C26 CONVGRAD_C24, CONVGRAD_C(24), CONVGRAD_C(25)
#define CONVGRAD_C28 CONVGRAD_C26, CONVGRAD_C(26), CONVGRAD_C(27)
#define CONVGRAD_C30 CONVGRAD_C28, CONVGRAD_C(28), CONVGRAD_C(29)
#define CONVGRAD_C32 CONVGRAD_C30, CONVGRAD_C(30), CONVGRAD_C(31)

// SHAPE is "n<N>k<K>.f32.<type>.<type>"; P0 to P6 are the operand numbers after those of c. MAJORS and
// MAJOR_B append the transpose immediates, which TF32 does not have.
#define CONVGRAD_ISSUE(SHAPE, D, C, FRAGMENTS, P0, P1, P2, P3, P4, P5, P6, MAJORS, MAJOR_B)           \
  template <Major kA = kMajorK, Major kB = kMajorK>                                                   \
  __device__ static __forceinline__ void issue(float (&c)[FRAGMENTS][4], u64 a, u64 b, int scale_d) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64" SHAPE    \
                 " {" D "}, " P0 ", " P1 ", p, 1, 1" MAJORS(P3, P4) ";}"                              \
                 : C                                                                                  \
                 : "l"(a), "l"(b), "r"(scale_d), "n"(int{kA}), "n"(int{kB}));                         \
  }                                                                                                   \
  template <Major kB = kMajorK>                                                                       \
  __device__ static __forceinline__ void issue(float (&c)[FRAGMENTS][4], const u32 (&a)[4], u64 b,    \
                                               int scale_d) {                                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64" SHAPE    \
                 " {" D "}, {" P0 "," P1 "," P2 "," P3 "}, " P4 ", p, 1, 1" MAJOR_B(P6) ";}"          \
                 : C                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(int{kB}));   \
  }
#define CONVGRAD_MAJORS(A, B) ", " A ", " B
#define CONVGRAD_MAJOR_B(B) ", " B
#define CONVGRAD_NO_MAJORS(A, B) ""
#define CONVGRAD_NO_MAJOR_B(B) ""
#define CONVGRAD_WGMMA_16(TYPE, NAME, FRAGMENTS, COLUMNS, ...)                                       \
  template <>                                                                                        \
  struct Wgmma<TYPE, FRAGMENTS> {                                                                    \
    CONVGRAD_ISSUE("n" COLUMNS "k16.f32." NAME "." NAME, CONVGRAD_D##FRAGMENTS,                      \
                   CONVGRAD_C##FRAGMENTS, FRAGMENTS, __VA_ARGS__, CONVGRAD_MAJORS, CONVGRAD_MAJOR_B) \
  };
#define CONVGRAD_WGMMA(FRAGMENTS, COLUMNS, ...)                                                  \
  CONVGRAD_WGMMA_16(f16, "f16", FRAGMENTS, COLUMNS, __VA_ARGS__)                                 \
  CONVGRAD_WGMMA_16(bf16, "bf16", FRAGMENTS, COLUMNS, __VA_ARGS__)                               \
  template <>                                                                                    \
  struct Wgmma<float, FRAGMENTS> {                                                               \
    CONVGRAD_ISSUE("n" COLUMNS "k8.f32.tf32.tf32", CONVGRAD_D##FRAGMENTS, CONVGRAD_C##FRAGMENTS, \
                   FRAGMENTS, __VA_ARGS__, CONVGRAD_NO_MAJORS, CONVGRAD_NO_MAJOR_B)              \
  };
CONVGRAD_WGMMA(1, "8", "%4", "%5", "%6", "%7", "%8", "%9", "%10")
CONVGRAD_WGMMA(2, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CONVGRAD_WGMMA(3, "24", "%12", "%13", "%14", "%15", "%16", "%17", "%18")
CONVGRAD_WGMMA(4, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CONVGRAD_WGMMA(5, "40", "%20", "%21", "%22", "%23", "%24", "%25", "%26")
CONVGRAD_WGMMA(6, "48", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CONVGRAD_WGMMA(7, "56", "%28", "%29", "%30", "%31", "%32", "%33", "%34")
CONVGRAD_WGMMA(8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CONVGRAD_WGMMA(10, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CONVGRAD_WGMMA(12, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CONVGRAD_WGMMA(13, "104", "%52", "%53", "%54", "%55", "%56", "%57", "%58")
CONVGRAD_WGMMA(14, "112", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CONVGRAD_WGMMA(16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CONVGRAD_WGMMA(18, "144", "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CONVGRAD_WGMMA(20, "160", "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CONVGRAD_WGMMA(22, "176", "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CONVGRAD_WGMMA(24, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CONVGRAD_WGMMA(26, "208", "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CONVGRAD_WGMMA(28, "224", "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CONVGRAD_WGMMA(30, "240", "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CONVGRAD_WGMMA(32, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// Issues c = a * b, or c += a * b where `scale_d`.
template <class T, Major kA = kMajorK, Major kB = kMajorK, int kFragments>
__device__ __forceinline__ void wgmma(float (&c)[kFragments][4], u64 a, u64 b, int scale_d) {
  static_assert(sizeof(T) == 2 || (kA == kMajorK && kB == kMajorK), "TF32 operands are K-major");
  Wgmma<T, kFragments>::template issue<kA, kB>(c, a, b, scale_d);
}
// The same with A in registers, which must not change until the wgmma has been waited for.
template <class T, Major kB = kMajorK, int kFragments>
__device__ __forceinline__ void wgmma(float (&c)[kFragments][4], const u32 (&a)[4], u64 b,
                                         int scale_d) {
  static_assert(sizeof(T) == 2 || kB == kMajorK, "TF32 operands are K-major");
  Wgmma<T, kFragments>::template issue<kB>(c, a, b, scale_d);
}

}  // namespace convgrad

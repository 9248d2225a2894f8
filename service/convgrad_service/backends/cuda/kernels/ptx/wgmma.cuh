// wgmma, once for each number of columns: 8 to 64 by 8, on to 256 by 16, and 104. Part of
// warpgroup.cuh.
//
// The assembler wants every register by its number: of n fragments of c they are CONVGRAD_D<n>, the
// fragments themselves CONVGRAD_C<n>, and the numbers that follow are those of the other operands.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

// What lies side by side of an operand in shared memory: its elements along the reduction (K), or
// along a's rows or b's columns (M, N). The latter with 16-bit types alone.
enum Major : int { kAlongK = 0, kAlongMn = 1 };

// c = a * b, or c += a * b where `add`: a has 64 rows, b so many columns as c has fragments of 8, the
// reduction 32 bytes: 16 elements, or 8 of float32 taken as TF32, whose low bits are cut off. The
// warp's 16 rows of c lie as those of mma's fragments (mma.cuh), and so do those of a where
// it comes from registers. Operands in shared memory are descriptors (warpgroup.cuh).
template <class T, int kFragments>
struct WarpgroupMma;

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

// SHAPE is "n<columns>k<depth>.f32.<type>.<type>"; P0 to P6 are the numbers after those of c. TURNS
// and TURN_B are the operands of the majors' bits, with their constraints, which TF32 has not.
#define CONVGRAD_START(SHAPE, D, C, FRAGMENTS, P0, P1, P2, P3, P4, P5, P6, TURNS, TURN_B)           \
  template <Major kA = kAlongK, Major kB = kAlongK>                                                \
  __device__ static __forceinline__ void start(float (&c)[FRAGMENTS][4], u64 a, u64 b, int add) {  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P2 ", 0; wgmma.mma_async.sync.aligned.m64" SHAPE  \
                 " {" D "}, " P0 ", " P1 ", p, 1, 1" TURNS(P3, P4) ";}"                            \
                 : C                                                                               \
                 : "l"(a), "l"(b), "r"(add), "n"(int{kA}), "n"(int{kB}));                          \
  }                                                                                                \
  template <Major kB = kAlongK>                                                                    \
  __device__ static __forceinline__ void start(float (&c)[FRAGMENTS][4], const u32 (&a)[4], u64 b, \
                                               int add) {                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P5 ", 0; wgmma.mma_async.sync.aligned.m64" SHAPE  \
                 " {" D "}, {" P0 "," P1 "," P2 "," P3 "}, " P4 ", p, 1, 1" TURN_B(P6) ";}"         \
                 : C                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int{kB}));     \
  }
#define CONVGRAD_TURNS(A, B) ", " A ", " B
#define CONVGRAD_TURN_B(B) ", " B
#define CONVGRAD_NO_TURNS(A, B) ""
#define CONVGRAD_NO_TURN_B(B) ""
#define CONVGRAD_16(TYPE, NAME, FRAGMENTS, COLUMNS, ...)                                           \
  template <>                                                                                      \
  struct WarpgroupMma<TYPE, FRAGMENTS> {                                                           \
    CONVGRAD_START("n" COLUMNS "k16.f32." NAME "." NAME, CONVGRAD_D##FRAGMENTS,                    \
                   CONVGRAD_C##FRAGMENTS, FRAGMENTS, __VA_ARGS__, CONVGRAD_TURNS, CONVGRAD_TURN_B) \
  };
#define CONVGRAD_PRODUCTS(FRAGMENTS, COLUMNS, ...)                                                 \
  CONVGRAD_16(f16, "f16", FRAGMENTS, COLUMNS, __VA_ARGS__)                                         \
  CONVGRAD_16(bf16, "bf16", FRAGMENTS, COLUMNS, __VA_ARGS__)                                       \
  template <>                                                                                      \
  struct WarpgroupMma<float, FRAGMENTS> {                                                          \
    CONVGRAD_START("n" COLUMNS "k8.f32.tf32.tf32", CONVGRAD_D##FRAGMENTS, CONVGRAD_C##FRAGMENTS,   \
                   FRAGMENTS, __VA_ARGS__, CONVGRAD_NO_TURNS, CONVGRAD_NO_TURN_B)                  \
  };
CONVGRAD_PRODUCTS(1, "8", "%4", "%5", "%6", "%7", "%8", "%9", "%10")
CONVGRAD_PRODUCTS(2, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
CONVGRAD_PRODUCTS(3, "24", "%12", "%13", "%14", "%15", "%16", "%17", "%18")
CONVGRAD_PRODUCTS(4, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
CONVGRAD_PRODUCTS(5, "40", "%20", "%21", "%22", "%23", "%24", "%25", "%26")
CONVGRAD_PRODUCTS(6, "48", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
CONVGRAD_PRODUCTS(7, "56", "%28", "%29", "%30", "%31", "%32", "%33", "%34")
CONVGRAD_PRODUCTS(8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
CONVGRAD_PRODUCTS(10, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
CONVGRAD_PRODUCTS(12, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
CONVGRAD_PRODUCTS(13, "104", "%52", "%53", "%54", "%55", "%56", "%57", "%58")
CONVGRAD_PRODUCTS(14, "112", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
CONVGRAD_PRODUCTS(16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
CONVGRAD_PRODUCTS(18, "144", "%72", "%73", "%74", "%75", "%76", "%77", "%78")
CONVGRAD_PRODUCTS(20, "160", "%80", "%81", "%82", "%83", "%84", "%85", "%86")
CONVGRAD_PRODUCTS(22, "176", "%88", "%89", "%90", "%91", "%92", "%93", "%94")
CONVGRAD_PRODUCTS(24, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
CONVGRAD_PRODUCTS(26, "208", "%104", "%105", "%106", "%107", "%108", "%109", "%110")
CONVGRAD_PRODUCTS(28, "224", "%112", "%113", "%114", "%115", "%116", "%117", "%118")
CONVGRAD_PRODUCTS(30, "240", "%120", "%121", "%122", "%123", "%124", "%125", "%126")
CONVGRAD_PRODUCTS(32, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef CONVGRAD_PRODUCTS
#undef CONVGRAD_16
#undef CONVGRAD_NO_TURN_B
#undef CONVGRAD_NO_TURNS
#undef CONVGRAD_TURN_B
#undef CONVGRAD_TURNS
#undef CONVGRAD_START
#undef CONVGRAD_C32
#undef CONVGRAD_C30
#undef CONVGRAD_C28
#undef CONVGRAD_C26
#undef CONVGRAD_C24
#undef CONVGRAD_C22
#undef CONVGRAD_C20
#undef CONVGRAD_C18
#undef CONVGRAD_C16
#undef CONVGRAD_C14
#undef CONVGRAD_C13
#undef CONVGRAD_C12
#undef CONVGRAD_C10
#undef CONVGRAD_C8
#undef CONVGRAD_C7
#undef CONVGRAD_C6
#undef CONVGRAD_C5
#undef CONVGRAD_C4
#undef CONVGRAD_C3
#undef CONVGRAD_C2
#undef CONVGRAD_C1
#undef CONVGRAD_C
#undef CONVGRAD_D32
#undef CONVGRAD_D30
#undef CONVGRAD_D28
#undef CONVGRAD_D26
#undef CONVGRAD_D24
#undef CONVGRAD_D22
#undef CONVGRAD_D20
#undef CONVGRAD_D18
#undef CONVGRAD_D16
#undef CONVGRAD_D14
#undef CONVGRAD_D13
#undef CONVGRAD_D12
#undef CONVGRAD_D10
#undef CONVGRAD_D8
#undef CONVGRAD_D7
#undef CONVGRAD_D6
#undef CONVGRAD_D5
#undef CONVGRAD_D4
#undef CONVGRAD_D3
#undef CONVGRAD_D2
#undef CONVGRAD_D1

// Starts c = a * b, or c += a * b where `add`, by the majors of the operands in shared memory.
template <class T, Major kA = kAlongK, Major kB = kAlongK, int kFragments>
__device__ __forceinline__ void multiply(float (&c)[kFragments][4], u64 a, u64 b, int add) {
  static_assert(sizeof(T) == 2 || (kA == kAlongK && kB == kAlongK), "TF32 lies along K");
  WarpgroupMma<T, kFragments>::template start<kA, kB>(c, a, b, add);
}
// The same with a from registers, which stay as they are until the product is waited for.
template <class T, Major kB = kAlongK, int kFragments>
__device__ __forceinline__ void multiply(float (&c)[kFragments][4], const u32 (&a)[4], u64 b,
                                         int add) {
  static_assert(sizeof(T) == 2 || kB == kAlongK, "TF32 lies along K");
  WarpgroupMma<T, kFragments>::template start<kB>(c, a, b, add);
}

}  // namespace convgrad

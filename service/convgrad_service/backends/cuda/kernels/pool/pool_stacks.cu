// The gradient of max pooling from its input, for cubic windows of stride 1 with padding such that
// there are as many windows as positions, channels last, with a 32-bit word of channels per thread.
// The host's side is pool_stacks.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. The maximum of a window is the
// maximum over its planes, theirs the maximum over rows. Its gradient is routed back the same way: to
// the first plane with that maximum, its first row, and that row's first position (of several NaNs,
// to the last). ptx/word_keys.cuh compares words.
//
// A block processes a stack of planes, one warp each: 32 words of channels, ROWS rows, and a strip of
// columns, along which it walks from window to window. If not all planes of the image fit, the
// outermost ones are halo. A thread holds the keys of the last KERNEL columns, of all rows in windows
// that overlap its own rows, and the sums of its own rows. At each step warps exchange, through shared
// memory, the maxima of their planes, and the gradients of the windows centred on them.
// Block: one warp per plane, at most MOST_PLANES; shared memory: two steps of (warps + 2*(KERNEL - 1))
// * windows * 32 * 8 bytes. Relies on its launcher for contiguous channels in whole words, and an
// image's extent below 2^31 bytes. Deterministic, no atomics, sums in float32.
#include "pool/pool_words.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kPer = kPerWord<T>, kBytes = sizeof(T);

constexpr int KERNEL = 3, kPad = 1;
constexpr int kWindows = ROWS + KERNEL - 1;  // rows of windows that overlap the thread's own rows
constexpr int kReached = kWindows + KERNEL - 1;
constexpr int kOwn = KERNEL - 1;  // index of the first own row
constexpr int kBeside = KERNEL - 1;  // planes on each side that contribute
static_assert(kReached < 32 && kReached + MOST_PLANES <= 127, "NaN has so many keys");

struct StackArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[4];  // N D H W, in elements
  i64 grad_stride[4];
  i64 grad_x_stride[4];
  int words;  // of channels
  int groups;  // of 32 words
  int size[3];
  int stacks;  // in an image
  int planes;  // planes that a stack owns
  int halo;    // planes before and after those
  int tiles;   // along H
  int strips;  // along W
  int strip;   // columns
};

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * MOST_PLANES, blocks_here(BLOCKS))
    pool_stacks(const __grid_constant__ StackArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint2* const given = reinterpret_cast<uint2*>(shared);  // maxima and gradients

  u32 block = blockIdx.x;
  const int group = block % args.groups;
  block /= args.groups;
  const int tile = block % args.tiles;
  block /= args.tiles;
  const int strip = block % args.strips;
  block /= args.strips;
  const int stack = block % args.stacks;
  const i64 n = block / args.stacks;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int word = group * 32 + lane;
  const int d = stack * args.planes - args.halo + warp;
  const bool there = word < args.words && d >= 0 && d < args.size[0];
  const bool owned = there && warp >= args.halo && warp < args.halo + args.planes;
  const int h0 = tile * ROWS, w0 = strip * args.strip;
  const int w1 = min(w0 + args.strip, args.size[2]);
  const int p0 = h0 - (KERNEL - 1 - kPad), q0 = w0 - (KERNEL - 1 - kPad), q1 = w1 - 1 + kPad;
  const int top = p0 - kPad;  // the first row read
  const int one = opaque_one(args.words);
  // Strides in bytes.
  const int x_row = static_cast<int>(args.x_stride[2] * kBytes);
  const int x_step = static_cast<int>(args.x_stride[3] * kBytes);
  const int grad_row = static_cast<int>(args.grad_stride[2] * kBytes);
  const int grad_step = static_cast<int>(args.grad_stride[3] * kBytes);
  const int out_row = static_cast<int>(args.grad_x_stride[2] * kBytes);
  const int out_step = static_cast<int>(args.grad_x_stride[3] * kBytes);
  const char* const x = reinterpret_cast<const char*>(static_cast<const T*>(args.x) +
                                                      n * args.x_stride[0] +
                                                      d * args.x_stride[1] + word * kPer) +
                        static_cast<i64>(top) * x_row;
  const char* const grad = reinterpret_cast<const char*>(static_cast<const T*>(args.grad) +
                                                         n * args.grad_stride[0] +
                                                         d * args.grad_stride[1] + word * kPer) +
                           static_cast<i64>(p0) * grad_row;
  char* const grad_x = reinterpret_cast<char*>(static_cast<T*>(args.grad_x) +
                                               n * args.grad_x_stride[0] +
                                               d * args.grad_x_stride[1] + word * kPer) +
                       static_cast<i64>(h0) * out_row;
  // Valid rows: of those read, of windows, and of this thread's own.
  const int height = there ? args.size[1] : 0;
  const u32 x_rows = there ? bits_between(-top, min(height - top, kReached)) : 0;
  const u32 y_rows = there ? bits_between(-p0, min(height - p0, kWindows)) : 0;
  const u32 own_rows = owned ? bits_between(0, min(height - h0, ROWS)) : 0;

  // Planes without a warp contribute nothing.
  const int slots = (warps + 2 * kBeside) * kWindows * 32;
  for (int i = threadIdx.x; i < 2 * kBeside * kWindows * 32; i += blockDim.x) {
    const int at = i < kBeside * kWindows * 32 ? i : i + warps * kWindows * 32;
    given[at] = given[slots + at] = uint2{kNoKeys<kPer>, 0};
  }
  const u32 plane_nan = nan_of_rank<kPer>(kReached + MOST_PLANES - 1 - warp);

  u32 keys[KERNEL][kReached], coming[kReached], gradients[kWindows];
  float sums[KERNEL][ROWS][kPer] = {};
  const auto fetch = [&](int w) {
    const bool inside = w >= 0 && w < args.size[2];
    fetch_rows(inside ? x_rows : 0, x + static_cast<i64>(w) * x_step, x_row, one, coming);
  };
  const auto fetch_gradients = [&](int q) {
    const bool inside = q >= 0 && q < args.size[2];
    fetch_rows(inside ? y_rows : 0, grad + static_cast<i64>(q) * grad_step, grad_row, one, gradients);
  };
  const auto take = [&](u32 (&column)[kReached], int w) {
    keys_of_rows<T>(w >= 0 && w < args.size[2] ? x_rows : 0, coming, column);
  };

#pragma unroll
  for (int j = 0; j < KERNEL - 1; ++j) {
    fetch(q0 - kPad + j);
    take(keys[j], q0 - kPad + j);
  }
  fetch(q0 - kPad + KERNEL - 1);
  fetch_gradients(q0);
  int half = 0;  // half of shared memory
  UnusedResult unneeded;
  for (int q = q0; q <= q1;) {
    // Unrolled until the ring of columns repeats.
#pragma unroll
    for (int base = 0; base < KERNEL; ++base) {
      if (q > q1) break;
      const int w = q - kPad;
      take(keys[(base + KERNEL - 1) % KERNEL], w + KERNEL - 1);
      u32 most[kReached];  // maximum of each row
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        most[r] = keys[(base + KERNEL - 1) % KERNEL][r];
#pragma unroll
        for (int j = KERNEL - 2; j >= 0; --j) {
          most[r] = max_keys<kPer>(keys[(base + j) % KERNEL][r], most[r]);
        }
        // The last NaN is the greatest.
        most[r] = rank_nan<kPer>(most[r], kReached - 1 - r);
      }
      uint2* const own = given + half + (warp + kBeside) * kWindows * 32 + lane;
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        const u32 plane = max_keys<kPer>(max_keys<kPer>(most[p], most[p + 1]), most[p + 2]);
        own[p * 32] = uint2{min_keys<kPer>(plane, plane_nan), gradients[p]};
      }
      if (q < q1) {
        fetch(w + KERNEL);
        fetch_gradients(q + 1);
      }
      __syncthreads();
      half = slots - half;
      if (owned) {
        // Route the gradients of windows to this plane, then to its rows, then to positions.
        float rows[ROWS][kPer];
#pragma unroll
        for (int p = 0; p < kWindows; ++p) {
          constexpr int kPlane = kWindows * 32;
          const uint2 before = own[p * 32 - kPlane], after = own[p * 32 + kPlane];
          const uint2 here = own[p * 32];
          const u32 first = own[p * 32 - 2 * kPlane].x, last = own[p * 32 + 2 * kPlane].x;
          bool kept[kPer], as_first[kPer], not_last[kPer];
          ge_keys<kPer>(here.x, max_keys_after<kPer>(before.x, after.x), kept, unneeded);
          ge_keys<kPer>(here.x, max_keys<kPer>(after.x, last), as_first, unneeded);
          ge_keys<kPer>(max_keys<kPer>(first, before.x), here.x, not_last, unneeded);
          float rest[kPer], gave_before[kPer], gave_after[kPer];
          widen_word<T>(here.y, rest);
          widen_word<T>(before.y, gave_before);
          widen_word<T>(after.y, gave_after);
#pragma unroll
          for (int c = 0; c < kPer; ++c) {
            if (!kept[c]) rest[c] = 0;
            if (as_first[c]) rest[c] += gave_after[c];
            if (!not_last[c]) rest[c] += gave_before[c];
          }
          u32 of[KERNEL];
#pragma unroll
          for (int r = 0; r < KERNEL; ++r) of[r] = most[p + r];
          route<kPer>(of, 0, KERNEL, rest, unneeded, [&](int tap, int c, bool taken, float value) {
            const int row = p + tap - kOwn;
            if (row < 0 || row >= ROWS) return;
            add_taken(p == 0 || tap == KERNEL - 1, taken, value, rows[row][c]);
          });
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          u32 of[KERNEL];
#pragma unroll
          for (int j = 0; j < KERNEL; ++j) {
            of[j] = rank_nan<kPer>(keys[(base + j) % KERNEL][kOwn + r], KERNEL - 1 - j);
          }
          route<kPer>(of, 0, KERNEL, rows[r], unneeded, [&](int tap, int c, bool taken, float value) {
            add_taken(tap == KERNEL - 1, taken, value, sums[(base + tap) % KERNEL][r][c]);
          });
        }
        store_rows<T>(w >= w0 && w < w1 ? own_rows : 0, grad_x + static_cast<i64>(w) * out_step,
                      out_row, one, sums[base]);
      }
      ++q;
    }
  }
  unneeded.use();
}

// The gradient of max pooling from its input, for overlapping windows of KERNEL x KERNEL or, with DEPTH 3,
// of three planes of these, channels last. Launched by pool_strips.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. The maximum of a window is the
// maximum over its planes, theirs that over rows. Its gradient is routed back the same way: to the first
// plane with that maximum, its first row, and that row's first position (of several NaNs, to the last).
// ptx/word_keys.cuh compares words.
//
// A thread owns ROWS rows of a strip of the input, in a word of PER channels, and walks along W from
// window to window. It holds the keys of the last KERNEL columns, of all rows in windows that overlap its
// own rows, and the sums of its own rows. Adjacent threads hold adjacent channels, and the next columns
// are prefetched.
// DEPTH 1: 128 threads; the warps of a block have adjacent tiles along H, whose common rows are in the L1
// cache. Grid: ceil(threads / 128). Shared memory: none.
// DEPTH 3: a block processes a stack of planes, one warp each, at most MOST_PLANES; if not all planes of
// the image fit, the outermost ones are halo. Planes after the image may have windows centred on them. At
// each step warps exchange, through shared memory, the
// maxima of their planes and the gradients of the windows centred on them: two steps of (warps + 4) *
// windows * 32 * 8 bytes.
// Preconditions: contiguous channels in whole words, strips and tiles that start at multiples
// of STRIDE, a padding along H that is PHASE modulo STRIDE, and an image's extent below 2^31 bytes.
// Deterministic, no atomics, sums in float32.
#include "pool/pool_words.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using W = Word<T, PER>;
constexpr int kBytes = sizeof(T);

constexpr int kFirstWindow = -((KERNEL - 1 - PHASE) / STRIDE);
constexpr int kLastWindow = (ROWS - 1 + PHASE) / STRIDE;
constexpr int kWindows = kLastWindow - kFirstWindow + 1;  // rows of windows that overlap own rows
constexpr int kFirstRow = kFirstWindow * STRIDE - PHASE;
constexpr int kReached = (kWindows - 1) * STRIDE + KERNEL;  // rows
constexpr int kOwn = -kFirstRow;                            // index of the first own row
constexpr int kBeside = DEPTH - 1;  // planes on each side that contribute
constexpr int kPlane = kWindows * 32;  // what a warp exchanges
static_assert(DEPTH == 1 || DEPTH == 3, "a window's centre is a plane");
static_assert(ROWS % STRIDE == 0 && kReached < 32, "rows are bits of a word");
static_assert(kReached + MOST_PLANES <= 127, "NaN has so many keys");

// Rounds down.
__device__ __forceinline__ int by_stride(int position) {
  return (position < 0 ? position - STRIDE + 1 : position) / STRIDE;
}

struct StripArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[4];  // N D H W, in elements; of grad_x too
  i64 grad_stride[4];
  i64 threads;  // DEPTH 1
  int words;    // of channels
  int groups;   // of 32 words
  int x_size[3];
  int y_size[3];
  int pad[2];       // H W
  int planes;       // that a stack owns
  int halo;         // planes before and after those
  int plane_step;   // between planes with a window centred on them
  int centre;       // of window 0 along D
  int stacks;       // in an image
  int tiles;        // along H
  int strips;       // along W
  int strip;        // columns
};

}  // namespace

extern "C" __global__ void __launch_bounds__(DEPTH == 1 ? 128 : 32 * MOST_PLANES, blocks_here(BLOCKS))
    pool_strips(const __grid_constant__ StripArgs args) {
#if DEPTH == 1
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 word, strip, tile, d;
  index = divide(index, args.words, word);
  index = divide(index, args.tiles, tile);
  index = divide(index, args.strips, strip);
  const i64 n = divide(index, args.x_size[0], d);
  const i64 window_d = d;
  constexpr bool there = true, owned = true, centred = true;
#else
  extern __shared__ __align__(16) unsigned char shared[];
  uint2* const given = reinterpret_cast<uint2*>(shared);  // maxima and gradients
  u32 block = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int word = block % args.groups * 32 + lane;
  block /= args.groups;
  const int tile = block % args.tiles;
  block /= args.tiles;
  const int strip = block % args.strips;
  block /= args.strips;
  const int stack = block % args.stacks;
  const i64 n = block / args.stacks;
  const int d = stack * args.planes - args.halo + warp;
  const int window_d = (d - args.centre) / args.plane_step;
  const bool there = word < args.words && d >= 0 && d < args.x_size[0];
  const bool owned = there && warp >= args.halo && warp < args.halo + args.planes;
  const bool centred = word < args.words && d >= args.centre && window_d < args.y_size[0] &&
                       window_d * args.plane_step + args.centre == d;
#endif

  const int h0 = static_cast<int>(tile) * ROWS, w0 = static_cast<int>(strip) * args.strip;
  const int w1 = min(w0 + args.strip, args.x_size[2]);
  const int p0 = h0 / STRIDE + by_stride(args.pad[0]) + kFirstWindow;
  // The first window that overlaps column w0: ceil((w0 + pad - (KERNEL - 1)) / STRIDE).
  const int q0 = w0 / STRIDE + by_stride(args.pad[1] - KERNEL + STRIDE);
  const int q1 = by_stride(w1 - 1 + args.pad[1]);
  const int one = opaque_one(args.words);
  // Strides in bytes.
  const int x_row = static_cast<int>(args.x_stride[2] * kBytes);
  const int x_step = static_cast<int>(args.x_stride[3] * kBytes);
  const int grad_row = static_cast<int>(args.grad_stride[2] * kBytes);
  const int grad_step = static_cast<int>(args.grad_stride[3] * kBytes);
  // Addresses of the first row read and the first row of windows; may be outside.
  const char* const x =
      reinterpret_cast<const char*>(static_cast<const T*>(args.x) + n * args.x_stride[0] +
                                    d * args.x_stride[1] + word * PER) +
      static_cast<i64>(h0 + kFirstRow) * x_row;
  const char* const grad =
      reinterpret_cast<const char*>(static_cast<const T*>(args.grad) + n * args.grad_stride[0] +
                                    window_d * args.grad_stride[1] + word * PER) +
      static_cast<i64>(p0) * grad_row;
  char* const grad_x =
      reinterpret_cast<char*>(static_cast<T*>(args.grad_x) + n * args.x_stride[0] +
                              d * args.x_stride[1] + word * PER) +
      static_cast<i64>(h0) * x_row;
  // Valid rows: of those read, of windows, and of this thread's own.
  const int top = h0 + kFirstRow;
  const u32 x_rows = there ? bits_between(-top, min(args.x_size[1] - top, kReached)) : 0;
  const u32 y_rows = centred ? bits_between(-p0, min(args.y_size[1] - p0, kWindows)) : 0;
  const u32 own_rows = owned ? bits_between(0, min(args.x_size[1] - h0, ROWS)) : 0;

#if DEPTH > 1
  // Planes without a warp contribute nothing.
  const int slots = (warps + 2 * kBeside) * kPlane;
  for (int i = threadIdx.x; i < 2 * kBeside * kPlane; i += blockDim.x) {
    const int at = i < kBeside * kPlane ? i : i + warps * kPlane;
    given[at] = given[slots + at] = uint2{kNoKeys<PER>, 0};
  }
  const u32 plane_nan = nan_of_rank<PER>(kReached + MOST_PLANES - 1 - warp);
  int half = 0;  // half of shared memory
#endif

  u32 keys[KERNEL][kReached];
  float sums[KERNEL][ROWS][PER] = {};
  W coming[STRIDE][kReached], gradients[kWindows];
  const auto fetch = [&](int first, int count) {
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (i >= count) continue;
      const int w = first + i;
      const bool inside = w >= 0 && w < args.x_size[2];
      fetch_rows(inside ? x_rows : 0, x + static_cast<i64>(w) * x_step, x_row, one, coming[i]);
    }
  };
  const auto fetch_gradients = [&](int q) {
    const bool inside = q >= 0 && q < args.y_size[2];
    fetch_rows(inside ? y_rows : 0, grad + static_cast<i64>(q) * grad_step, grad_row, one, gradients);
  };
  // Convert the words that have arrived to a column of keys.
  const auto take = [&](u32 (&column)[kReached], int w, const W (&words)[kReached]) {
    keys_of_rows<PER>(w >= 0 && w < args.x_size[2] ? x_rows : 0, words, column);
  };

  // Columns that the first window shares with the previous one.
  const int first = q0 * STRIDE - args.pad[1];
#pragma unroll
  for (int start = 0; start < KERNEL - STRIDE; start += STRIDE) {
    fetch(first + start, min(STRIDE, KERNEL - STRIDE - start));
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (start + i < KERNEL - STRIDE) take(keys[start + i], first + start + i, coming[i]);
    }
  }
  fetch(first + KERNEL - STRIDE, STRIDE);
  fetch_gradients(q0);
  UnusedResult unneeded;
  for (int q = q0; q <= q1;) {
    // Unrolled until the ring of columns repeats.
#pragma unroll
    for (int turn = 0; turn < KERNEL; ++turn) {
      if (q > q1) break;
      const int base = turn * STRIDE;
      const int w = q * STRIDE - args.pad[1];
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) {
        const int j = KERNEL - STRIDE + i;
        take(keys[(base + j) % KERNEL], w + j, coming[i]);
      }
#if DEPTH == 1
      W here[kWindows];
#pragma unroll
      for (int p = 0; p < kWindows; ++p) here[p] = gradients[p];
      if (q < q1) {
        fetch(w + KERNEL, STRIDE);
        fetch_gradients(q + 1);
      }
#endif
      u32 most[kReached];  // maximum of each row
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        most[r] = keys[(base + KERNEL - 1) % KERNEL][r];
#pragma unroll
        for (int j = KERNEL - 2; j >= 0; --j) {
          most[r] = max_keys<PER>(keys[(base + j) % KERNEL][r], most[r]);
        }
        // The last NaN is the greatest.
        most[r] = rank_nan<PER>(most[r], kReached - 1 - r);
      }
#if DEPTH > 1
      uint2* const own = given + half + (warp + kBeside) * kPlane + lane;
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        u32 plane = most[p * STRIDE];
#pragma unroll
        for (int r = 1; r < KERNEL; ++r) plane = max_keys<PER>(plane, most[p * STRIDE + r]);
        own[p * 32] = uint2{min_keys<PER>(plane, plane_nan), gradients[p].raw};
      }
      if (q < q1) {
        fetch(w + KERNEL, STRIDE);
        fetch_gradients(q + 1);
      }
      __syncthreads();
      half = slots - half;
#endif
      if (owned) {
        // Route each window's gradient to this plane and to a row, then each row's to its positions.
        float rows[ROWS][PER];
#pragma unroll
        for (int p = 0; p < kWindows; ++p) {
          float rest[PER];
#if DEPTH == 1
          here[p].get(rest);
#else
          const uint2 before = own[p * 32 - kPlane], after = own[p * 32 + kPlane];
          const uint2 here = own[p * 32];
          const u32 centre = here.x;
          W{static_cast<decltype(W::raw)>(here.y)}.get(rest);
          const u32 first_of = own[p * 32 - 2 * kPlane].x, last_of = own[p * 32 + 2 * kPlane].x;
          bool kept[PER], as_first[PER], not_last[PER];
          ge_keys<PER>(centre, max_keys_after<PER>(before.x, after.x), kept, unneeded);
          ge_keys<PER>(centre, max_keys<PER>(after.x, last_of), as_first, unneeded);
          ge_keys<PER>(max_keys<PER>(first_of, before.x), centre, not_last, unneeded);
          float gave_before[PER], gave_after[PER];
          W{static_cast<decltype(W::raw)>(before.y)}.get(gave_before);
          W{static_cast<decltype(W::raw)>(after.y)}.get(gave_after);
#pragma unroll
          for (int c = 0; c < PER; ++c) {
            if (!kept[c]) rest[c] = 0;
            if (as_first[c]) rest[c] += gave_after[c];
            if (!not_last[c]) rest[c] += gave_before[c];
          }
#endif
          u32 of[KERNEL];
#pragma unroll
          for (int r = 0; r < KERNEL; ++r) of[r] = most[p * STRIDE + r];
          route<PER>(of, 0, KERNEL, rest, unneeded, [&](int tap, int c, bool taken, float value) {
            const int row = p * STRIDE + tap - kOwn;
            if (row < 0 || row >= ROWS) return;
            add_taken(p == 0 || tap + STRIDE >= KERNEL, taken, value, rows[row][c]);
          });
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          u32 of[KERNEL];
#pragma unroll
          for (int j = 0; j < KERNEL; ++j) {
            of[j] = rank_nan<PER>(keys[(base + j) % KERNEL][kOwn + r], KERNEL - 1 - j);
          }
          route<PER>(of, 0, KERNEL, rows[r], unneeded, [&](int tap, int c, bool taken, float value) {
            add_taken(tap >= KERNEL - STRIDE, taken, value, sums[(base + tap) % KERNEL][r][c]);
          });
        }
#pragma unroll
        for (int i = 0; i < STRIDE; ++i) {
          const u32 rows_here = w + i >= w0 && w + i < w1 ? own_rows : 0;
          store_rows<W>(rows_here, grad_x + static_cast<i64>(w + i) * x_step, x_row, one,
                        sums[(base + i) % KERNEL]);
        }
      }
      ++q;
    }
  }
  unneeded.use();
}

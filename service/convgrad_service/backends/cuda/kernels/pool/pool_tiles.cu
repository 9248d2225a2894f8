// The gradient of max pooling from its input, for overlapping square windows of stride 1, channels
// last, with a 32-bit word of channels per thread. Launched by pool_tiles.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. The maximum of a window is the
// maximum of its rows' maxima. Its gradient is routed back the same way: to the first row with that
// maximum, then to the first position of that row (of several NaNs, to the last). ptx/word_keys.cuh
// compares words.
//
// A block owns a tile of an input plane: WORDS words of channels by TILE x TILE positions, inside a
// box of LINES x LINES (the rest is halo). If LINES is TILE, the box is the whole plane, and the
// padding PAD is a constant.
//   1. Along W, one thread per line, whose keys are in registers: row maxima to shared memory.
//   2. Along H, one thread per column: window maxima, and gradients to the rows that they come from.
//   3. Along W: the rows' sums to positions.
// Adjacent threads hold adjacent channels. Shared memory: 4 bytes per channel for each row of a
// window, first its maximum (16-bit ones alternate between the halves to avoid bank conflicts within
// a warp), then its sum. Preconditions: contiguous channels in a multiple of WORDS words,
// and an image's extent below 2^31 bytes. Deterministic, no atomics, sums in float32.
#include "pool/pool_words.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kPer = kPerWord<T>, kBytes = sizeof(T);

constexpr bool kFull = LINES == TILE;
static_assert(2 * LINES <= 127, "NaN has so many keys");
// Shared memory has a slot for each row of a window, of as many words as the sums have.
constexpr int kPlaces = 32 / kPer;  // over all banks
// Lines whose slots fill the banks.
constexpr int kTogether = WORDS < kPlaces ? kPlaces / WORDS : 1;
// Slots between rows, so that lines are in adjacent banks.
constexpr int kRow =
    WINDOWS * WORDS + ((WORDS - WINDOWS * WORDS) % kPlaces + kPlaces) % kPlaces;
// The word of a slot that holds a row's maxima; it alternates to avoid bank conflicts in a warp.
constexpr int kHalves = kPer - 1;
constexpr int kAhead = 4;  // rows
// Gradients of a column in flight, as many as registers allow.
constexpr int kGiven = WINDOWS < 14 ? WINDOWS : 14;

// What lies in shared memory after the second pass; one access.
struct alignas(4 * kPer) Sums {
  u32 bits[kPer];
  __device__ __forceinline__ explicit Sums(const float (&sums)[kPer]) {
#pragma unroll
    for (int c = 0; c < kPer; ++c) bits[c] = __float_as_uint(sums[c]);
  }
  __device__ __forceinline__ void get(float (&sums)[kPer]) const {
    const Sums all = *this;
#pragma unroll
    for (int c = 0; c < kPer; ++c) sums[c] = __uint_as_float(all.bits[c]);
  }
};

struct TileArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[4];  // N D H W, in elements; of grad_x too
  i64 grad_stride[4];
  int channel_tiles;
  int planes;      // in an image
  int x_size[2];   // H W
  int y_size[2];
  int tiles[2];
  int box_offset[2];     // H W: the first position of tile 0's box
  int window_offset[2];  // H W: the first window of tile 0
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, blocks_here(BLOCKS))
    pool_tiles(const __grid_constant__ TileArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  u32* const slots = reinterpret_cast<u32*>(shared);

  u32 block = blockIdx.x;
  const int channel_tile = block % args.channel_tiles;
  block /= args.channel_tiles;
  const int tile_w = block % args.tiles[1];
  block /= args.tiles[1];
  const int tile_h = block % args.tiles[0];
  block /= args.tiles[0];
  const i64 n = block / args.planes, d = block % args.planes;

  const int own_h = tile_h * TILE, own_w = tile_w * TILE;
  const int box_h = own_h + args.box_offset[0], box_w = own_w + args.box_offset[1];
  const int window_h = own_h + args.window_offset[0], window_w = own_w + args.window_offset[1];
  const int line = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
  const int channel = (channel_tile * WORDS + word) * kPer;

  const int one = opaque_one(args.channel_tiles);

  // Pass along W: this thread's line of the input.
  const int h = box_h + line;
  const bool there = line < LINES && h >= 0 && h < args.x_size[0];
  u32 keys[LINES];
  const int low = kFull ? 0 : -box_w;
  const int high = there ? args.x_size[1] - box_w : low;
  {
    const char* from = reinterpret_cast<const char*>(
        static_cast<const T*>(args.x) + n * args.x_stride[0] + d * args.x_stride[1] + channel +
        static_cast<i64>(h) * args.x_stride[2] + static_cast<i64>(box_w) * args.x_stride[3]);
    const int step = static_cast<int>(args.x_stride[3] * kBytes);
    if (low <= 0 && high >= LINES) {
#pragma unroll
      for (int j = 0; j < LINES; ++j) {
        load_if(true, from, keys[j]);
        advance_pointer(from, step, one);
      }
    } else {
#pragma unroll
      for (int j = 0; j < LINES; ++j) {
        load_if(j >= low && j < high, from, keys[j]);
        advance_pointer(from, step, one);
      }
    }
  }
  // Pass along H: the first windows of this thread's column of the gradient.
  u32 given[kGiven];
  const bool column_there =
      line < WINDOWS && window_w + line >= 0 && window_w + line < args.y_size[1];
  const int column_low = kFull ? 0 : -window_h;
  const int column_high = column_there ? args.y_size[0] - window_h : column_low;
  const char* column = reinterpret_cast<const char*>(
      static_cast<const T*>(args.grad) + n * args.grad_stride[0] + d * args.grad_stride[1] +
      channel + static_cast<i64>(window_h) * args.grad_stride[2] +
      static_cast<i64>(window_w + line) * args.grad_stride[3]);
  const int column_step = static_cast<int>(args.grad_stride[2] * kBytes);
  const auto give = [&](int p) {
    if (p >= WINDOWS) return;
    load_if(p >= column_low && p < column_high, column, given[p % kGiven]);
    advance_pointer(column, column_step, one);
  };
#pragma unroll
  for (int p = 0; p < kGiven; ++p) give(p);

#pragma unroll
  for (int j = 0; j < LINES; ++j) {
    // The last NaN in a line is the greatest.
    keys[j] = rank_nan<kPer>(keys_of<T>(keys[j]), LINES - 1 - j);
  }
  if (!(low <= 0 && high >= LINES)) {
#pragma unroll
    for (int j = 0; j < LINES; ++j) {
      if (j < low || j >= high) keys[j] = kNoKeys<kPer>;
    }
  }
  const int own_half = line / kTogether & kHalves;
  u32* const line_slots = slots + (line * kRow + word) * kPer;
  u32* const column_slots = slots + (line * WORDS + word) * kPer;
  if (line < LINES) {
    u32* const halves[2] = {line_slots + own_half, line_slots + (own_half ^ kHalves)};
#pragma unroll
    for (int q = 0; q < WINDOWS; ++q) {
      u32 most = kNoKeys<kPer>;
#pragma unroll
      for (int s = 0; s < KERNEL; ++s) {
        const int j = q + s - PAD;
        if (j >= 0 && j < LINES) most = max_keys<kPer>(most, keys[j]);
      }
      halves[q / kTogether & kHalves][q * WORDS * kPer] = most;
    }
  }
  __syncthreads();

  UnusedResult unneeded;
  if (line < WINDOWS) {
    u32* const halves[2] = {column_slots + own_half, column_slots + (own_half ^ kHalves)};
    u32 most[LINES];
    // Read ahead explicitly: the compiler does not move reads before writes.
    const auto read = [&](int row) {
      if (row < LINES) most[row] = halves[row / kTogether & kHalves][row * kRow * kPer];
    };
#pragma unroll
    for (int row = 0; row < KERNEL - 1 - PAD + kAhead; ++row) read(row);
    float sums[LINES][kPer];
#pragma unroll
    for (int p = 0; p < WINDOWS; ++p) {
      read(p + KERNEL - 1 - PAD + kAhead);
      u32 of[KERNEL];
      int begin = KERNEL, end = 0;
#pragma unroll
      for (int r = KERNEL - 1; r >= 0; --r) {
        const int row = p + r - PAD;
        if (row < 0 || row >= LINES) continue;
        begin = r;
        end = end > r ? end : r + 1;
        // The NaN of the last row is the greatest.
        if (p == 0 || r == KERNEL - 1) {
          most[row] = rank_nan<kPer>(most[row], 2 * LINES - 1 - row);
        }
        of[r] = most[row];
      }
      float rest[kPer];
      widen_word<T>(given[p % kGiven], rest);
      give(p + kGiven);
      route<kPer>(of, begin, end, rest, unneeded, [&](int tap, int c, bool taken, float value) {
        add_taken(p == 0 || tap == KERNEL - 1, taken, value, sums[p + tap - PAD][c]);
      });
#pragma unroll
      for (int row = 0; row < LINES; ++row) {
        // Rows that no later window contains.
        if (p + 1 == WINDOWS ? row >= p - PAD : row == p - PAD) {
          *reinterpret_cast<Sums*>(column_slots + row * kRow * kPer) = Sums(sums[row]);
        }
      }
    }
  }
  __syncthreads();

  const bool owned = line < LINES && h >= own_h && h < own_h + TILE && h < args.x_size[0];
  if (!owned) return;
  char* to = reinterpret_cast<char*>(
      static_cast<T*>(args.grad_x) + n * args.x_stride[0] + d * args.x_stride[1] +
      channel + static_cast<i64>(h) * args.x_stride[2] +
      static_cast<i64>(box_w) * args.x_stride[3]);
  const int step = static_cast<int>(args.x_stride[3] * kBytes);
  const int first = kFull ? 0 : own_w - box_w;
  const int last = min(own_w + TILE, args.x_size[1]) - box_w;
  float sums[LINES][kPer];
#pragma unroll
  for (int q = 0; q < WINDOWS; ++q) {
    u32 of[KERNEL];
    int begin = KERNEL, end = 0;
#pragma unroll
    for (int s = KERNEL - 1; s >= 0; --s) {
      const int j = q + s - PAD;
      if (j < 0 || j >= LINES) continue;
      begin = s;
      end = end > s ? end : s + 1;
      of[s] = keys[j];
    }
    float rest[kPer];
    reinterpret_cast<const Sums*>(line_slots + q * WORDS * kPer)->get(rest);
    route<kPer>(of, begin, end, rest, unneeded, [&](int tap, int c, bool taken, float value) {
      add_taken(q == 0 || tap == KERNEL - 1, taken, value, sums[q + tap - PAD][c]);
    });
#pragma unroll
    for (int j = 0; j < LINES; ++j) {
      if (q + 1 == WINDOWS ? j < q - PAD : j != q - PAD) continue;
      store_if(j >= first && j < last, to, narrow_word<T>(sums[j]));
      advance_pointer(to, step, one);
    }
  }
  unneeded.use();
}

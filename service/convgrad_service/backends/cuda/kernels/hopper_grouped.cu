// A grouped convolution of 4, 8, 16 or 32 channels a group in 3 x 3 taps, forward or the gradient of
// the input, on Hopper: rows of the source stream through shared memory, each of them once.
// The host's side is hopper_grouped.py.
//
// y[n, k, m] = sum over taps j and channels c of k's group of x[n, c, m + from + j] * w[k, c, tap(j)].
// GEMM, of one tap: M = 8 positions of two rows, N = 8 or 16 result channels, K = a chunk of 8
// source channels or several; two chunks a product, of two taps where a group has but one. Groups of
// 4 go in twos, their weights block-diagonal.
//
// Block: 64 channels on both sides, whose weights its warps keep in registers, and units (pieces of
// images) one after another. A warp has 8 or 16 result channels, all columns of a unit in STRIPS
// strips of 8, and goes down the rows by twos: of the four that two rows of results meet it has two
// from before, at each of the three taps along W. One thread more starts all copies: boxes of pairs
// of rows into a ring (tiles over C W H N, zeros outside), and results out of another.
// Dynamic shared memory: 1,024 bytes to align it by, the source's ring, the results', barriers.
// Relies on its launcher for channels side by side in whole 16-byte chunks, and for rings as long as
// what a slot of results needs. Needs sm_90a.
// Deterministic: one order of additions for each result, however the units are cut.
// Positions outside the source and other groups' channels enter as products with zero, which an
// infinity makes NaN: results that are not finite are taken again by the definition.
// Index limits: a group's weights below 2^31 elements; elsewhere 64-bit.
#include "hopper_grouped.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kChannels = CHANNELS, kStrips = STRIPS;
constexpr int kChunks = kChannels < 8 ? 1 : kChannels / 8;  // of the source, that a result meets
constexpr int kFrags = kChannels < 16 ? 1 : 2;              // of 8 result channels, of a warp
constexpr int kWorkers = 8 / kFrags, kThreads = (kWorkers + 1) * 32;
constexpr int kTogether = kFrags == 1 ? 2 : 1;            // strips, whose results are stored at once
constexpr bool kAhead = BLOCKS == 1;
constexpr int kSums = kChunks < 4 ? 1 : 2;  // chains of additions for each result
constexpr int kPixelBytes = 128, kStripBytes = 8 * kPixelBytes;

// Two rows of the source at the three taps along W.
struct Rows {
  u32 of[kStrips][2][3][kChunks];
};
struct Ring {
  int at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(int size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

// Where a chunk of a pixel lies from where rows begin, which is a multiple of 1,024.
__device__ __forceinline__ u32 swizzled(int pixel, int chunk) {
  return pixel * kPixelBytes + ((chunk ^ (pixel & 7)) << 4);
}

struct Shared {
  u32 ring, slots, full, done, empty;  // barriers: a box is there, results are there, or gone

  __device__ __forceinline__ Shared(const HopperGroupedArgs& args, u32 base) {
    ring = base, slots = base + args.slots_at;
    full = base + args.barriers_at, done = full + 8 * args.stages, empty = done + 8 * args.slots;
  }
};

// One thread: starts all copies.
__device__ void copy_all(const HopperGroupedArgs& args, const Shared& shared) {
  const int channel = blockIdx.x * 64;
  Ring stage;
  GroupedUnit next = unit_at(args, blockIdx.y);
  int next_unit = blockIdx.y, next_box = 0, room = args.stages;
  const auto load = [&] {
    for (; room > 0 && next_unit < args.units; --room, stage.advance(args.stages)) {
      const int corner[4] = {channel, next.column + args.first[1],
                             next.row + args.first[0] + next_box * args.box_pairs * 2, next.image};
      const u32 full = shared.full + 8 * stage.at;
      arrive_expecting(full, args.box_bytes);
      load_tile(shared.ring + stage.at * args.stage_bytes, args.x_map, full, corner);
      if (++next_box * args.box_pairs > next.pairs) {
        next_box = 0;
        next_unit += gridDim.y;
        if (next_unit < args.units) next = unit_at(args, next_unit);
      }
    }
  };
  load();

  Ring slot;
  for (int unit = blockIdx.y; unit < args.units; unit += gridDim.y) {
    const GroupedUnit at = unit_at(args, unit);
    int consumed = 0;
    for (int pair = 0; pair < at.pairs; pair += args.slot_pairs, slot.advance(args.slots)) {
      wait_for(shared.done + 8 * slot.at, slot.parity);
      const int corner[4] = {channel, at.column, at.row + pair * 2, at.image};
      store_tile(args.y_map, shared.slots + slot.at * args.slot_bytes, corner);
      commit_stores();
      // Boxes that were read wholly for these results and those before.
      const int pairs = pair + args.slot_pairs;
      const int now = pairs < at.pairs ? (pairs + 1) / args.box_pairs
                                       : at.pairs / args.box_pairs + 1;
      room += now - consumed;
      consumed = now;
      load();
      wait_stores_read<0>();
      arrive(shared.empty + 8 * slot.at);
    }
  }
}

// A warp's part of the slice: its first chunks on both sides.
struct Part {
  int x_chunk, y_chunk;

  __device__ __forceinline__ Part(int warp) {
    y_chunk = warp * kFrags;
    x_chunk = y_chunk / kChunks * kChunks;
  }
};

__device__ __forceinline__ void load_weights(const HopperGroupedArgs& args, const Part& part,
                                             u32 (&w)[9][kChunks][kFrags]) {
  const int lane = threadIdx.x & 31, slice = blockIdx.x * 64;
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int r = ACROSS ? 2 - tap / 3 : tap / 3, s = ACROSS ? 2 - tap % 3 : tap % 3;
    const int at = r * args.w_stride[2] + s * args.w_stride[3];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
        const int x = (part.x_chunk + c) * 8, y = (part.y_chunk + f) * 8;
        w[tap][c][f] = two_weights<T, kChannels>(args, slice + (ACROSS ? x : y) + lane / 4,
                                                 slice + (ACROSS ? y : x) + lane % 4 * 2, at);
      }
    }
  }
#if ACROSS
  // Neighbours are to be source channels.
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) w[tap][c][f] = transposed(w[tap][c][f]);
    }
  }
#endif
}

// Where a lane finds rows of matrices, from the first of two rows on.
struct Places {
  u32 source[kChunks == 1 ? 1 : 3], third, result, last_result;

  __device__ __forceinline__ Places(const Part& part, int row_bytes) {
    const int lane = threadIdx.x & 31, pixel = lane & 7, row = lane >> 3 & 1, half = lane >> 4;
    if constexpr (kChunks == 1) {
      source[0] = row * row_bytes + swizzled(pixel + half, part.x_chunk);
      third = row * row_bytes + half * kStripBytes + swizzled(pixel + 2, part.x_chunk);
    } else {
#pragma unroll
      for (int s = 0; s < 3; ++s) source[s] = row * row_bytes + swizzled(pixel + s, part.x_chunk + half);
    }
    last_result = row * kStrips * kStripBytes +
                  swizzled(pixel, part.y_chunk + (kFrags == 2 ? half : 0));
    result = last_result + (kFrags == 1 ? half * kStripBytes : 0);
  }
};

// The rows' part in kTogether strips from i on, those that there are.
template <int i>
__device__ __forceinline__ void load_strips(Rows& rows, const Places& places, u32 from) {
  if constexpr (i < kStrips) {
    constexpr bool kTwo = kTogether == 2 && i + 1 < kStrips;
    const u32 strip = from + i * kStripBytes;
    u32(&to)[2][3][kChunks] = rows.of[i];
    u32(&next)[2][3][kChunks] = rows.of[kTwo ? i + 1 : i];
    u32 four[4];
    if constexpr (kChunks == 1) {
      load_matrices(four, strip + places.source[0]);
      to[0][0][0] = four[0], to[1][0][0] = four[1], to[0][1][0] = four[2], to[1][1][0] = four[3];
      if constexpr (kTwo) {
        load_matrices(four, strip + kStripBytes + places.source[0]);
        next[0][0][0] = four[0], next[1][0][0] = four[1];
        next[0][1][0] = four[2], next[1][1][0] = four[3];
        load_matrices(four, strip + places.third);
        to[0][2][0] = four[0], to[1][2][0] = four[1];
        next[0][2][0] = four[2], next[1][2][0] = four[3];
      } else {
        u32 two[2];
        load_matrices(two, strip + places.third);
        to[0][2][0] = two[0], to[1][2][0] = two[1];
      }
    } else {
#pragma unroll
      for (int s = 0; s < 3; ++s) {
#pragma unroll
        for (int c = 0; c < kChunks; c += 2) {
          // Chunk c of the group: the group's first one is a multiple of kChunks.
          load_matrices(four, strip + (places.source[s] ^ c << 4));
          to[0][s][c] = four[0], to[1][s][c] = four[1];
          to[0][s][c + 1] = four[2], to[1][s][c + 1] = four[3];
        }
      }
    }
    (void)next;
  }
}
template <int i = 0>
__device__ __forceinline__ void load_rows(Rows& rows, const Places& places, u32 from) {
  load_strips<i>(rows, places, from);
  if constexpr (i + kTogether < kStrips) load_rows<i + kTogether>(rows, places, from);
}

// Sums of one strip of two rows, from the two rows before and the two that follow.
__device__ __forceinline__ void multiply(float (&sum)[kSums][kFrags][4],
                                         const u32 (&before)[2][3][kChunks],
                                         const u32 (&after)[2][3][kChunks],
                                         const u32 (&w)[9][kChunks][kFrags]) {
  const auto row = [&](int r, int s, int c) { return r < 2 ? before[r][s][c] : after[r - 2][s][c]; };
  if constexpr (kChunks == 1) {
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      const int r = t / 3, s = t % 3, next_r = (t + 1) / 3, next_s = (t + 1) % 3;
      const u32 a[4] = {row(r, s, 0), row(r + 1, s, 0), row(next_r, next_s, 0),
                        row(next_r + 1, next_s, 0)};
      mma<T>(sum[0][0], a, w[t][0][0], w[t + 1][0][0]);
    }
    const u32 a[2] = {row(2, 2, 0), row(3, 2, 0)};
    mma<T>(sum[0][0], a, w[8][0][0]);
  } else {
#pragma unroll
    for (int t = 0; t < 9; ++t) {
      const int r = t / 3, s = t % 3;
#pragma unroll
      for (int c = 0; c < kChunks; c += 2) {
        const u32 a[4] = {row(r, s, c), row(r + 1, s, c), row(r, s, c + 1), row(r + 1, s, c + 1)};
#pragma unroll
        for (int f = 0; f < kFrags; ++f) {
          mma<T>(sum[c / 2 % kSums][f], a, w[t][c][f], w[t][c + 1][f]);
        }
      }
    }
  }
}

// Goes on by two rows: loads them, and puts two rows of results to shared memory, from strip i on.
// Marks what is not finite.
template <int i = 0>
__device__ __forceinline__ void advance_rows(const Rows& before, Rows& after,
                                             const u32 (&w)[9][kChunks][kFrags],
                                             const Places& places, u32 from, u32 to, int columns,
                                             u32& marked) {
  // Those of the next strips are on their way meanwhile.
  if constexpr (i == 0 || !kAhead) load_strips<i>(after, places, from);
  if constexpr (kAhead) load_strips<i + kTogether>(after, places, from);
  const int column = (threadIdx.x & 31) / 4;
  u32 both[kTogether][kFrags][2];
#pragma unroll
  for (int j = 0; j < kTogether && i + j < kStrips; ++j) {
    float sum[kSums][kFrags][4] = {};
    multiply(sum, before.of[i + j], after.of[i + j], w);
#pragma unroll
    for (int f = 0; f < kFrags; ++f) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int other = 1; other < kSums; ++other) sum[0][f][e] += sum[other][f][e];
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        both[j][f][row] = narrow_two<T>(sum[0][f][row * 2], sum[0][f][row * 2 + 1]);
        mark_odd_if<T>((i + j) * 8 + column < columns, marked, both[j][f][row]);
      }
    }
  }
  constexpr bool kWhole = i + kTogether <= kStrips;
  constexpr int kOther = kTogether == 2 && kWhole ? 1 : 0;
  const u32 four[4] = {both[0][0][0], both[0][0][1], both[kOther][kFrags - 1][0],
                       both[kOther][kFrags - 1][1]};
  store_matrices(to + i * kStripBytes + (kWhole ? places.result : places.last_result), four);
  if constexpr (i + kTogether < kStrips) {
    advance_rows<i + kTogether>(before, after, w, places, from, to, columns, marked);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    hopper_grouped(const __grid_constant__ HopperGroupedArgs args) {
  extern __shared__ uint4 memory[];
  const int thread = threadIdx.x, lane = thread & 31;
  // The same in all lanes, which the compiler knows of a shuffle alone.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const u32 start = shared_address(memory), base = (start + 1023) & ~1023u;
  const Shared shared(args, base);
  char* const bytes = reinterpret_cast<char*>(memory) + (base - start);
  if (warp == kWorkers) {
    if (args.zeroes) {
      // What rows at the end of a box read beyond it, before the next one is there.
      for (int i = lane; i < (args.stages + 1) * 8; i += 32) {
        *reinterpret_cast<uint4*>(bytes + i / 8 * args.stage_bytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
      }
      publish_shared();
    }
    for (int i = lane; i < args.stages; i += 32) make_barrier(shared.full + 8 * i, 1);
    for (int i = lane; i < args.slots; i += 32) {
      make_barrier(shared.done + 8 * i, kWorkers);
      make_barrier(shared.empty + 8 * i, 1);
    }
    publish_barriers();
    __syncthreads();
    if (elected()) copy_all(args, shared);
    return;
  }
  const Part part(warp);
  u32 w[9][kChunks][kFrags];
  load_weights(args, part, w);
  const int row_bytes = args.row_pixels * kPixelBytes;
  const Places places(part, row_bytes);
  __syncthreads();

  Ring stage, slot;
  int box_left = 0, slot_left = 0;  // pairs of rows, in this box and in this slot
  u32 next_from = 0, to = 0;
  // Where the next two rows of the source are.
  const auto source = [&] {
    if (box_left == 0) {
      wait_for(shared.full + 8 * stage.at, stage.parity);
      next_from = shared.ring + stage.at * args.stage_bytes;
      stage.advance(args.stages);
      box_left = args.box_pairs;
    }
    const u32 from = next_from;
    next_from += 2 * row_bytes;
    --box_left;
    return from;
  };
  for (int unit = blockIdx.y; unit < args.units; unit += gridDim.y) {
    const GroupedUnit at = unit_at(args, unit);
    const int columns = min(args.piece[1], args.y_size[1] - at.column);
    int pair = 0;
    const auto advance = [&](const Rows& before, Rows& after) {
      const u32 from = source();
      if (slot_left == 0) {
        wait_for(shared.empty + 8 * slot.at, slot.parity ^ 1);
        to = shared.slots + slot.at * args.slot_bytes;
        slot_left = args.slot_pairs;
      }
      u32 marked = 0;
      advance_rows(before, after, w, places, from, to, columns, marked);
      if (__any_sync(~0u, marked != 0)) {
        take_again<T, kChannels, ACROSS>(args, at, pair, bytes + (to - base), kStrips * 8,
                                         blockIdx.x, part.y_chunk * 8, kFrags * 8);
      }
      to += 2 * kStrips * kStripBytes;
      ++pair;
      if (--slot_left == 0 || pair == at.pairs) {
        publish_shared();
        __syncwarp();
        if (lane == 0) arrive(shared.done + 8 * slot.at);
        slot.advance(args.slots);
        slot_left = 0;
      }
    };
    Rows even, odd;
    load_rows(even, places, source());
    while (true) {
      advance(even, odd);
      if (pair == at.pairs) break;
      advance(odd, even);
      if (pair == at.pairs) break;
    }
    box_left = 0;
  }
}

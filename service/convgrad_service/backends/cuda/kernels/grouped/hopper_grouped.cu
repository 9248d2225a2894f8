// A grouped convolution of 4, 8, 16 or 32 channels per group with 3 x 3 taps, forward or the gradient
// of the input, on Hopper: rows of the source stream through shared memory once. Launched by
// hopper_grouped.py.
//
// y[n, k, m] = sum over taps j and channels c of k's group of x[n, c, m + first + j] * w[k, c, tap(j)].
// GEMM of one tap: M = 16 positions of a row (or 8 of each of two images), N = 8 or 16 result
// channels, K = one or more chunks of 8 source channels; two chunks per product, of two taps if a
// group has only one chunk. Groups of 4 are merged in pairs, with block-diagonal weights.
//
// Block: 64 channels on both sides, whose weights are in registers, and units (pieces of one or two
// images) one after another. A warp has 8 or 16 result channels of all columns of a unit, of its
// team's images, and walks down their rows: each row of the source is read at the three taps along W
// and added to the three rows of results that it meets. A producer thread starts all copies: boxes of
// rows into a ring (TMA tiles over C W H N, zeros outside), and results out of another ring, in slots
// of several rows.
// Dynamic shared memory: 1,024 bytes for alignment, the rings of the source and of results, weights to
// be loaded to registers (from 16 channels on), mbarriers.
// Preconditions: contiguous channels in whole 16-byte chunks, and rings that hold what
// a slot of results needs. Needs sm_90a.
// Deterministic: one order of additions for each result, independent of units.
// Positions outside the source, and the other one of two groups of 4, are multiplied as zeros.
// Index limits: a group's weights below 2^31 elements; elsewhere 64-bit.
#include "grouped/hopper_grouped.cuh"
#include "grouped/hopper_grouped_weights.cuh"
#include "core/opaque.cuh"
#include "core/pipeline_state.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kChannels = CHANNELS, kTiles = TILES;         // tiles of 16 positions
constexpr int kChunks = kChannels < 8 ? 1 : kChannels / 8;  // chunks of the source that a result meets
constexpr int kFrags = kChannels < 16 ? 1 : 2;              // fragments of 8 result channels in a warp
constexpr int kParts = 8 / kFrags;                          // warps that share an image's channels
constexpr int kWorkers = kParts * TEAMS, kThreads = (kWorkers + 1) * 32;
constexpr int kReady = 1;  // barrier
constexpr int kPixelBytes = 128, kTileBytes = 16 * kPixelBytes;
constexpr bool kCopied = kChunks > 1;  // weights are copied through shared memory
// Tiles of which a warp loads the last tap, or stores the results, at once.
constexpr int kTogether = kFrags == 1 && kTiles > 1 ? 2 : 1;

using Weights = u32[9][kChunks][kFrags];
using Sums = float[kTiles][kFrags][4];

// Offset of a chunk of a pixel from the start of rows, which is a multiple of 1,024.
__device__ __forceinline__ u32 swizzled(int pixel, int chunk) {
  return pixel * kPixelBytes + ((chunk ^ (pixel & 7)) << 4);
}

struct Shared {
  u32 ring, slots, weights;
  u32 full, done, empty;  // mbarriers: box full, results full, results empty

  __device__ __forceinline__ Shared(const HopperGroupedArgs& args, u32 base) {
    ring = base, slots = base + args.slots_at, weights = base + args.weights_at;
    full = base + args.barriers_at;
    done = full + 8 * args.stages, empty = done + 8 * args.slots;
  }
};

// Producer thread: starts copies of boxes while stages are free.
struct Loader {
  PipelineState stage;
  GroupedUnit next;
  int unit, row = 0, room;

  __device__ __forceinline__ Loader(const HopperGroupedArgs& args)
      : next(unit_at(args, blockIdx.y)), unit(blockIdx.y), room(args.stages) {}

  __device__ __forceinline__ void load(const HopperGroupedArgs& args, const Shared& shared) {
    while (room > 0 && unit < args.units) {
      if (row < next.source_rows) {
        const int corner[4] = {static_cast<int>(blockIdx.x) * 64, next.column + args.first[1],
                               next.source_row + row, next.image};
        const u32 full = shared.full + 8 * stage.index;
        mbarrier_arrive_expect_tx(full, args.stage_bytes);
        tma_load(shared.ring + stage.index * args.stage_bytes, args.x_map, full, corner);
        stage.advance(args.stages);
        --room;
        row += args.box_rows;
      }
      if (row >= next.source_rows) {
        row = 0;
        unit += gridDim.y;
        if (unit < args.units) next = unit_at(args, unit);
      }
    }
  }
};

// Producer thread: stores results when they are complete, and starts copies into freed stages.
__device__ __forceinline__ void copy_all(const HopperGroupedArgs& args, const Shared& shared,
                                         Loader& loader) {
  PipelineState slot;
  for (int unit = blockIdx.y; unit < args.units; unit += gridDim.y) {
    const GroupedUnit at = unit_at(args, unit);
    const int boxes = (at.source_rows + args.box_rows - 1) / args.box_rows;
    int consumed = 0;
    for (int row = 0; row < at.rows; row += args.slot_rows, slot.advance(args.slots)) {
      mbarrier_wait(shared.done + 8 * slot.index, slot.parity);
      const int corner[4] = {static_cast<int>(blockIdx.x) * 64, at.column, at.row + row, at.image};
      tma_store(args.y_map, shared.slots + slot.index * args.slot_bytes, corner);
      tma_store_commit();
      // Boxes of which all rows have been read for these results and earlier ones.
      const int rows = row + args.slot_rows, read = at.row + args.first[0] + rows + 2 - at.source_row;
      const int now = rows < at.rows ? max(min(read / args.box_rows, boxes), 0) : boxes;
      loader.room += now - consumed;
      consumed = now;
      loader.load(args, shared);
      tma_store_wait_read<0>();
      mbarrier_arrive(shared.empty + 8 * slot.index);
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

// Offsets for ldmatrix, relative to a row's first pixel: the first and last 8 positions of a product,
// of two chunks (or of two taps if there is one chunk), or of two tiles.
struct Places {
  u32 source[kChunks == 1 ? 1 : 3], third = 0, result;

  __device__ __forceinline__ Places(const HopperGroupedArgs& args, const Part& part, int team) {
    const int lane = threadIdx.x & 31, pixel = lane & 7, half = lane >> 3 & 1, other = lane >> 4;
    const u32 first = half * args.source_half + team * args.source_team;
    if constexpr (kChunks == 1) {
      source[0] = first + swizzled(pixel + other, part.x_chunk);
      third = first + other * kTileBytes + swizzled(pixel + 2, part.x_chunk);
    } else {
#pragma unroll
      for (int s = 0; s < 3; ++s) source[s] = first + swizzled(pixel + s, part.x_chunk + other);
    }
    result = half * args.result_half + team * args.result_team +
             swizzled(pixel, part.y_chunk + (kFrags == 2 ? other : 0)) +
             (kTogether == 2 ? other * kTileBytes : 0);
#pragma unroll
    for (u32& place : source) place = opaque_value(place);
    if constexpr (kChunks == 1) third = opaque_value(third);
    result = opaque_value(result);
  }
};

// Adds the products of a row of the source to the three rows of results that meet it: at its last tap,
// its second, and its first, which initializes a sum.
__device__ __forceinline__ void add_row(Sums& last, Sums& middle, Sums& first, const Weights& w,
                                        const Places& places, u32 from) {
#pragma unroll
  for (int i = 0; i < kTiles; i += kTogether) {
    const u32 tile = from + i * kTileBytes;
#pragma unroll
    for (int j = i; j < i + kTogether; ++j) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
#pragma unroll
        for (int e = 0; e < 4; ++e) first[j][f][e] = 0;
      }
    }
    if constexpr (kChunks == 1) {
      u32 pair[kTogether][4], third[kTogether * 2];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        ldmatrix(pair[j], tile + j * kTileBytes + places.source[0]);
      }
      ldmatrix(third, tile + places.third);
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        Sums& sum = r == 0 ? first : r == 1 ? middle : last;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          mma<T>(sum[i + j][0], pair[j], w[r * 3][0][0], w[r * 3 + 1][0][0]);
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const u32 one[2] = {third[j * 2], third[j * 2 + 1]};
          mma<T>(sum[i + j][0], one, w[r * 3 + 2][0][0]);
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < 3; ++s) {
#pragma unroll
        for (int c = 0; c < kChunks; c += 2) {
          u32 a[4];
          // A group's first chunk is a multiple of kChunks.
          ldmatrix(a, tile + (places.source[s] ^ c << 4));
#pragma unroll
          for (int r = 0; r < 3; ++r) {
            Sums& sum = r == 0 ? first : r == 1 ? middle : last;
#pragma unroll
            for (int f = 0; f < kFrags; ++f) {
              mma<T>(sum[i][f], a, w[r * 3 + s][c][f], w[r * 3 + s][c + 1 < kChunks ? c + 1 : c][f]);
            }
          }
        }
      }
    }
  }
}

// Stores a row of results to shared memory.
__device__ __forceinline__ void put_row(const Sums& sum, const Places& places, u32 to) {
#pragma unroll
  for (int i = 0; i < kTiles; i += kTogether) {
    u32 both[kTogether][kFrags][2];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
        const float(&four)[4] = sum[i + j][f];
        both[j][f][0] = narrow_x2<T>(four[0], four[1]);
        both[j][f][1] = narrow_x2<T>(four[2], four[3]);
      }
    }
    const u32(&other)[2] = both[kTogether - 1][kFrags - 1];
    const u32 four[4] = {both[0][0][0], both[0][0][1], other[0], other[1]};
    stmatrix(to + i * kTileBytes + places.result, four);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    hopper_grouped(const __grid_constant__ HopperGroupedArgs args) {
  extern __shared__ uint4 memory[];
  const int thread = threadIdx.x, lane = thread & 31;
  // Uniform in a warp; a shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const u32 start = shared_address(memory), base = (start + 1023) & ~1023u;
  const Shared shared(args, base);
  char* const bytes = reinterpret_cast<char*>(memory) + (base - start);
  if (warp == kWorkers) {
    const bool chosen = elect_one();
    Loader loader(args);
    if (chosen) {
      for (int i = 0; i < args.stages; ++i) mbarrier_init(shared.full + 8 * i, 1);
      fence_mbarrier_init();
      loader.load(args, shared);
      for (int i = 0; i < args.slots; ++i) {
        mbarrier_init(shared.done + 8 * i, kWorkers);
        mbarrier_init(shared.empty + 8 * i, 1);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
    named_barrier_arrive(kReady, kThreads);
    if (chosen) copy_all(args, shared, loader);
    return;
  }
  if (thread == 0) {
    prefetch_tensor_map(args.x_map);
    prefetch_tensor_map(args.y_map);
  }
  const int team = warp / kParts;
  const Part part(warp % kParts);
  Weights w;
  if constexpr (kCopied) {
    copy_weights<kChannels, kWorkers * 32>(args, shared.weights);
  } else {
    const int x = blockIdx.x * 64 + part.x_chunk * 8, y = blockIdx.x * 64 + part.y_chunk * 8;
    if (args.w_pairs) {
      load_weights<kChannels, true>(args, x, y, w);
    } else {
      load_weights<kChannels, false>(args, x, y, w);
    }
  }
  if (args.zeroes) {
    // Rows at the end of a box read past it, before the next box arrives, which also starts with
    // zeros.
    for (int i = thread; i < (args.stages + 1) * 8; i += kWorkers * 32) {
      *reinterpret_cast<uint4*>(bytes + i / 8 * args.stage_bytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  const Places places(args, part, team);
  const int row_bytes = args.row_pixels * kPixelBytes;
  if constexpr (kCopied) cp_async_wait<0>();
  named_barrier_sync(kReady, kThreads);
  if constexpr (kCopied) {
    if (args.backward) {
      take_weights<kChannels, true>(part.x_chunk, part.y_chunk, shared.weights, w);
    } else {
      take_weights<kChannels, false>(part.x_chunk, part.y_chunk, shared.weights, w);
    }
  }

  PipelineState stage, slot;
  int box_left = 0, slot_left = args.slot_rows;  // rows left in this box and in this slot
  u32 from = 0, to = shared.slots;
  const auto next_box = [&] {
    mbarrier_wait(shared.full + 8 * stage.index, stage.parity);
    from = shared.ring + stage.index * args.stage_bytes;
    stage.advance(args.stages);
    box_left = args.box_rows;
  };
  for (int unit = blockIdx.y; unit < args.units; unit += gridDim.y) {
    const GroupedUnit at = unit_at(args, unit);
    const int rows = at.rows;
    // The row of results that the next row of the source finishes.
    int row = at.source_row - (at.row + args.first[0]) - 2, source_left = at.source_rows;
    const auto put = [&](const Sums& sum) {
      put_row(sum, places, to);
      to += args.result_row;
      if (--slot_left == 0 || row + 1 == rows) {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared.done + 8 * slot.index);
        slot.advance(args.slots);
        mbarrier_wait(shared.empty + 8 * slot.index, slot.parity ^ 1);
        to = shared.slots + slot.index * args.slot_bytes;
        slot_left = args.slot_rows;
      }
    };
    const auto advance = [&](Sums& last, Sums& middle, Sums& first) {
      add_row(last, middle, first, w, places, from);
      from += row_bytes;
      if (row >= 0) put(last);
      ++row;
      if (--source_left == 0) return false;
      if (--box_left == 0) next_box();
      return true;
    };
    // Rows that the last rows of the source leave unfinished, if there is padding below.
    const auto finish = [&](const Sums& last, const Sums& middle) {
      if (row >= 0 && row < rows) put(last);
      if (++row < rows) put(middle);
    };
    Sums a, b, c;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][f][e] = b[i][f][e] = c[i][f][e] = 0;
      }
    }
    next_box();
    while (true) {
      if (!advance(a, b, c)) {
        finish(b, c);
        break;
      }
      if (!advance(b, c, a)) {
        finish(c, a);
        break;
      }
      if (!advance(c, a, b)) {
        finish(a, b);
        break;
      }
    }
  }
}

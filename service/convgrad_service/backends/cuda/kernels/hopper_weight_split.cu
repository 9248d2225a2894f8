// The gradient of a dense convolution's weight from float32 on Hopper, each product in three of
// bfloat16: factors are split in two, a = high + low, and a*b = high*high + high*low + low*high up to
// 3 * 2^-16 of it. The host's side is hopper_weight.py; the GEMM view, tiles, units and results are
// those of hopper_weight.cu. (TF32 products read operands along K alone, and here pixels lie apart.)
//
// Some threads copy float32 boxes (TMA, im2col) of 32 pixels. Others split x, from shared to shared
// memory, in rows of CHANNELS with the swizzle that products read. The warpgroups that multiply split
// y in registers, as each needs it: y's boxes of 32 channels are swizzled so that a warp's reads of
// eight channels and four pixels meet no bank twice. Dynamic shared memory: 1,024 bytes to align it
// by, a ring of `stages` steps: y, x as copied, its high parts and its low parts.
// Relies on its launcher as hopper_weight.cu does, for channels in multiples of 4.
// Deterministic: one order of additions for each result and number of shares. Zeros beyond the
// input's and y's rows times an infinity are NaN, and so are both parts of an infinity together:
// sums that are not finite are taken again by the definition.
// Index limits: pixels, with the halo, below 2^31; elements 64-bit.
#include "hopper_weight_copies.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

namespace {

using Layout = Step<(SPREAD ? ROWS : ROWS * WARPGROUPS) * 2, 32, 4>;
constexpr int kWideRowBytes = CHANNELS * 4, kRowBytes = CHANNELS * 2;  // of a pixel in a box of x
constexpr int kFragments = COLUMNS / 8, kBlocks = COLUMNS / CHANNELS;
constexpr int kMostBoxes = kBlocks * PRODUCTS * (SPREAD ? WARPGROUPS : 1);
// A warpgroup of threads that split, and one of whose warps each one thread copies; or one warpgroup
// where there are three that multiply: then its first warp copies.
constexpr int kSplitters = WARPGROUPS == 2 ? 128 : 96, kTurns = WARPGROUPS == 2 ? 4 : 1;
constexpr int kMostCopied = (Layout::kYBoxes + kMostBoxes + kTurns - 1) / kTurns;
constexpr int kThreads = WARPGROUPS * 128 + (WARPGROUPS == 2 ? 256 : 128);

// Two values rounded to bfloat16, and what that left of them, rounded too.
struct Halves {
  u32 high, low;
};
__device__ __forceinline__ Halves halves_of(float first, float second) {
  Halves of;
  of.high = narrow_two<bf16>(first, second);
  of.low = narrow_two<bf16>(first - __uint_as_float(of.high << 16),
                            second - __uint_as_float(of.high & 0xffff0000));
  return of;
}

// Splits what came of x: from rows of float32, `wide` bytes a box, to two of bfloat16, `box` bytes,
// the low parts `low` further on.
__device__ __forceinline__ void split_boxes(const char* from, char* to, int boxes, int rows, u32 wide,
                                            u32 box, u32 low, int splitter) {
  constexpr int kVectors = CHANNELS / 4;  // of a row
  constexpr int kPass = kSplitters / kVectors, kBatch = 4;
  static_assert(kPass * kBatch % 8 == 0, "rows of a batch see whole patterns of the swizzle");
  const int vector = splitter % kVectors, first = splitter / kVectors;
  u32 put[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const int row = first + j * kPass;
    const int chunk = vector / 2 ^ (row * kRowBytes / 128 & (kRowBytes / 16 - 1));
    put[j] = row * kRowBytes + chunk * 16 + vector % 2 * 8;
  }
#pragma unroll 1
  for (int i = 0; i < boxes; ++i, from += wide, to += box) {
#pragma unroll 1
    for (int batch = 0; batch < rows; batch += kPass * kBatch) {
      const char* const wide_rows = from + (batch + first) * kWideRowBytes + vector * 16;
      char* const split_rows = to + batch * kRowBytes;
      // Reads first: the compiler may not move them over writes.
      float4 four[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (batch + first + j * kPass >= rows) continue;
        four[j] = *reinterpret_cast<const float4*>(wide_rows + j * kPass * kWideRowBytes);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (batch + first + j * kPass >= rows) continue;
        const Halves one = halves_of(four[j].x, four[j].y), two = halves_of(four[j].z, four[j].w);
        *reinterpret_cast<uint2*>(split_rows + put[j]) = make_uint2(one.high, two.high);
        *reinterpret_cast<uint2*>(split_rows + low + put[j]) = make_uint2(one.low, two.low);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_weight_split(const __grid_constant__ HopperWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[3 * kMostStages];
  __shared__ Copied copied[kTurns][kMostCopied];  // of each thread that copies
  const int thread = threadIdx.x, warpgroup = thread / 128, warp = thread / 32, lane = thread & 31;
  const WeightResult& of = args.result;
  const u32 padding = -shared_address(shared) & 1023;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const int box_rows = kPixels + args.halo;
  const u32 wide_box = box_rows * kWideRowBytes, full = shared_address(barriers);
  const u32 high_at = Layout::kXAt + (of.boxes * wide_box + 1023) / 1024 * 1024;
  const u32 low_at = high_at + of.boxes * args.box_bytes;
  Ring ring = {shared_address(base), low_at + of.boxes * args.box_bytes, full,
               full + kMostStages * 8, args.stages};
  const u32 ready = full + 2 * kMostStages * 8;
  if (thread == 0) {
    for (int i = 0; i < args.stages; ++i) {
      make_barrier(ring.filled(i), 1);
      make_barrier(ring.emptied(i), WARPGROUPS * 4);
      make_barrier(ready + i * 8, kSplitters / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  start_next();
  wait_for_previous();
  const int steps = steps_of(args);
  const int units = of.whole + (of.row_tiles * of.column_tiles - of.whole) * of.shares;

  if (warpgroup >= WARPGROUPS) {
    leave_registers<PRODUCER_REGISTERS>();
    const int helper = thread - WARPGROUPS * 128;
    const bool splits = WARPGROUPS == 2 ? helper < 128 : helper >= 32;
    if (splits) {
      for (int index = blockIdx.x; index < units; index += gridDim.x) {
        const Unit unit = unit_at(of, index, steps);
        for (int step = unit.step; step < unit.end; ++step) {
          char* const at = base + ring.stage * ring.stage_bytes;
          wait_for(ring.filled(ring.stage), ring.parity);
          split_boxes(at + Layout::kXAt, at + high_at, of.boxes, box_rows, wide_box, args.box_bytes,
                      low_at - high_at, WARPGROUPS == 2 ? helper : helper - 32);
          publish_shared();
          __syncwarp();
          if (lane == 0) arrive(ready + ring.stage * 8);
          ring.next();
        }
      }
    } else if (elected()) {
      const int turn = kTurns == 1 ? 0 : warp % 4;
      if (turn == 0) prefetch_map(args.x_map), prefetch_map(args.y_map);
      const u32 bytes = Layout::kXAt + of.boxes * wide_box;
      for (int index = blockIdx.x; index < units; index += gridDim.x) {
        copy_steps<Layout, 1, kTurns>(args, unit_at(of, index, steps), ring, turn, 0, wide_box, bytes,
                                      copied[turn]);
      }
    }
    return;
  }

  take_registers<CONSUMER_REGISTERS>();
  const bool shares_box = of.shared_taps > 1;
  const u32 next_box = shares_box ? args.source.dilation[2] * kRowBytes : args.box_bytes;
  const int boxes_each = shares_box ? 1 : kBlocks;  // of one product
  const int own_box = SPREAD ? warpgroup * PRODUCTS * boxes_each : 0;
  const int own_row = SPREAD ? 0 : warpgroup * ROWS;
  // A lane's elements of y: of each 16 pixels two neighbours and the two 8 further on, `even` and the
  // next; of each 64 channels one and the one 8 further on.
  const int even = lane % 4 * 2, in_box = warp % 2 * 16 + lane / 4;
  auto y_from = [&](int channel, int pixel) {
    return pixel * 128 + (channel / 4 ^ pixel) * 16 + channel % 4 * 4;
  };
  const int box_from = (own_row * 2 + warp % 4 / 2) * Layout::kYBoxBytes;
  const int from[2][2] = {{box_from + y_from(in_box, even), box_from + y_from(in_box, even + 1)},
                          {box_from + y_from(in_box + 8, even),
                           box_from + y_from(in_box + 8, even + 1)}};
  float sum[ROWS][PRODUCTS][kFragments][4];
  auto hold = [&]() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < PRODUCTS; ++j) hold_sums(sum[i][j]);
    }
  };
  u32 a_high[2][ROWS][4] = {}, a_low[2][ROWS][4] = {};
  auto hold_y = [&](int set) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) hold_words(a_high[set][i]), hold_words(a_low[set][i]);
  };
  for (int index = blockIdx.x; index < units; index += gridDim.x) {
    const Unit unit = unit_at(of, index, steps);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < PRODUCTS; ++j) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][f][e] = 0;
        }
      }
    }
    int last = -1;
    hold();
#pragma unroll 1
    for (int step = unit.step; step < unit.end; ++step) {
      const char* const y = base + ring.stage * ring.stage_bytes;
      const u32 at = ring.here() + own_box * args.box_bytes;
      const u64 high = operand_along_mn<kRowBytes>(at + high_at, next_box);
      const u64 low = operand_along_mn<kRowBytes>(at + low_at, next_box);
      wait_for(ring.filled(ring.stage), ring.parity);
#pragma unroll
      for (int k = 0; k < kPixels / 16; ++k) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            // Of fragments' words, the odd ones are 8 rows further on, the upper two 8 pixels.
            const char* const here = y + i * 2 * Layout::kYBoxBytes + (k * 16 + word / 2 * 8) * 128;
            const Halves of_y =
                halves_of(*reinterpret_cast<const float*>(here + from[word % 2][0]),
                          *reinterpret_cast<const float*>(here + from[word % 2][1]));
            a_high[k % 2][i][word] = of_y.high;
            a_low[k % 2][i][word] = of_y.low;
          }
        }
        if (k == 0) wait_for(ready + ring.stage * 8, ring.parity);
        hold_y(k % 2);
        begin_products();
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
          for (int j = 0; j < PRODUCTS; ++j) {
            const u32 on = j * boxes_each * args.box_bytes + k * 16 * kRowBytes;
            multiply<bf16, kAlongMn>(sum[i][j], a_low[k % 2][i], advance(high, on), 1);
            multiply<bf16, kAlongMn>(sum[i][j], a_high[k % 2][i], advance(low, on), 1);
            multiply<bf16, kAlongMn>(sum[i][j], a_high[k % 2][i], advance(high, on), 1);
          }
        }
        commit_products();
        wait_products<1>();
        hold_y((k + 1) % 2);  // free again
        if (k == 0 && last >= 0 && lane == 0) arrive(ring.emptied(last));
      }
      last = ring.stage;
      ring.next();
    }
    wait_products<0>();
    hold();
    if (last >= 0 && lane == 0) arrive(ring.emptied(last));
    put_sums<T>(args, unit, warpgroup, thread % 128, sum);
  }
}

// The gradient of a grouped convolution's weight, few channels a group, on tensor cores: M = taps x
// input channels, N = output channels, K = pixels of grad_output, of one group or of as many groups,
// merged, as fill whole 16-byte chunks of channels on both sides (products between different groups
// are discarded). The host's side is grouped_weight.py.
//
// w[g, k, c, r] = sum over pixels (n, o) of y[n, g, k, o] * x[n, g, c, o*stride + r*dilation - pad].
// Along each dimension, output y0 + m*y_step (m in [0, count)) of a phase meets, at tap r, input
// position x0 + (m*x_step + r*x_tap)*lattice.
//
// Block: a slice of adjacent channels on both sides and its share of all boxes of pixels. A box of y,
// and of x with its halo, is copied to shared memory once, double-buffered. Each warp has an item,
// MT * 16 rows x NF * 8 columns of one merge, and every KSPLITth step of its pixels, with all sums in
// registers. At the end the KSPLIT warps of an item add their sums through shared memory, and the
// block stores them to its part of `partials`, in the order (g, k, t, r, s, c); core/lane_sum.cu adds
// the parts.
// Dynamic shared memory: two stages of both boxes, then offsets of pixels in x's box and of rows, as
// grouped_weight.py computes them. With EXACT, for exact float32, products are FMAs, and each lane has
// the same sums as with tensor cores. WINDOWS is for 3 x 3 taps without dilation and 8 channels on
// both sides: boxes then have an even number of rows and a multiple of eight columns.
// Relies on its launcher for the grid (slices, groups of items, splits), and for tensors whose
// channels, of all merged groups, are contiguous in whole 16-byte chunks.
// Deterministic: one order of additions for each result and number of splits. Missing pixels of a box
// are read as zeros.
// Index limits: 64-bit offsets; positions and strides of D, H, W in bytes below 2^31.
#include "grouped/gw2_sums.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

namespace {

constexpr int kWarps = WARPS, kThreads = kWarps * 32;
constexpr int kSize = static_cast<int>(sizeof(ELEMENT));
constexpr int kChunk = 16 / kSize;
constexpr int kDepth = 32 / kSize;  // pixels of one product
constexpr int kSums = MT * NF * 4;
// On Blackwell two blocks would need one register more if words are read for three columns.
constexpr int kBlocks = kBlackwell && kSize == 4 && NF == 3 ? 1 : BLOCKS;

#ifdef STAMPS
#define STAMP(i) if (threadIdx.x == 0) { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); long long c; asm volatile("mov.u64 %0, %clock64;" : "=l"(c)); reinterpret_cast<long long*>(args.stamps)[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 32 + (i) * 2] = t; reinterpret_cast<long long*>(args.stamps)[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 32 + (i) * 2 + 1] = c; }
#else
#define STAMP(i)
#endif
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    gw2(const __grid_constant__ GroupedWeightArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  int* const source_at = reinterpret_cast<int*>(base + args.sources_at);
  const u32 boxes_at = shared_address(base);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;

  STAMP(0)
  const int tap_plane = quick_divide(blockIdx.y, args.item_groups);
  const int item_group = blockIdx.y - tap_plane * args.item_groups, split = blockIdx.z, splits = gridDim.z;
  u32* const word = args.met + blockIdx.y * gridDim.x + blockIdx.x;
  if (thread == 0 && splits > 1) rendezvous_begin(word);
  const int first_merge = blockIdx.x * args.slice, first_group = first_merge * args.merged;
  const int merges = min(args.slice, args.groups / args.merged - first_merge);
  const int x_merge = args.merged * args.in_channels, y_merge = args.merged * args.out_channels;
  // This block's taps: all, or the row of one position along D and H.
  const int taps = args.kernel[0] * args.kernel[1] * args.kernel[2] / args.tap_planes, rows = taps * x_merge;
  const int tap_t = quick_divide(tap_plane, args.kernel[1]), tap_r = tap_plane - tap_t * args.kernel[1];
  const int tap_at[3] = {tap_t * args.x_tap[0] * args.lattice[0], tap_r * args.x_tap[1] * args.lattice[1], 0};
  const T* const x = static_cast<const T*>(args.x) + first_group * args.x_group;
  const T* const y = static_cast<const T*>(args.y) + first_group * args.y_group;
  const int x_chunks = (args.groups - first_group) * args.in_channels / kChunk;
  const int y_chunks = (args.groups - first_group) * args.out_channels / kChunk;

  // The block's boxes.
  const int begin = split * args.boxes + min(split, args.more);
  const int end = begin + args.boxes + (split < args.more);
  const int phases = args.phases[0] * args.phases[1] * args.phases[2];
  const u32 in_phase = args.tiles[0] * args.tiles[1] * args.tiles[2] * args.tiles[3];
  // A box: its image, and its first pixel in x and y.
  struct Place {
    int image, x[3], y[3];
  };
  auto place_at = [&](const Walk& box, int phase) {
    u32 number = phase;
    int part[3] = {}, at[3] = {box.d, box.h, box.w};
    if (phases > 1) {
      part[2] = digit(number, args.phases[2]);
      part[1] = digit(number, args.phases[1]);
      part[0] = number;
    }
    Place place;
    place.image = box.n * args.tile[0];
#pragma unroll
    for (int dim = 0; dim < 3; ++dim) {
      const Phase& of = args.phase[part[dim]][dim];
      const int first = at[dim] * args.tile[dim + 1];
      place.x[dim] = of.x0 + tap_at[dim] + first * args.x_step[dim] * args.lattice[dim];
      place.y[dim] = of.y0 + first * args.y_step[dim];
    }
    return place;
  };
  const Copier copier_x(args.x_box, reinterpret_cast<const char*>(x), args.x_stride,
                                  args.lattice, x_chunks);
  const Copier copier_y(args.y_box, reinterpret_cast<const char*>(y), args.y_stride,
                                  args.y_step, y_chunks);
  int phase = phases > 1 ? static_cast<u32>(begin) / in_phase : 0;
  Walk walk(args.tiles, begin - phase * in_phase);
  auto copy = [&](int index, int stage) {
    if (index < end) {
      const Place at = place_at(walk, phase);
      const u32 to = boxes_at + stage * args.stage_bytes;
      copier_x.copy(to, args.x_box, args.x_stride, at.image, args.batch, at.x, args.lattice,
                    args.x_size);
      copier_y.copy(to + args.y_at, args.y_box, args.y_stride, at.image, args.batch, at.y,
                    args.y_step, args.y_size);
      walk.next(args.tiles);
      if (walk.n >= args.tiles[0]) walk.n -= args.tiles[0], ++phase;
    }
    cp_async_commit();
  };
  STAMP(1)
#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) copy(begin + i, i);
  STAMP(2)

  // Offsets in x's box: of a pixel at the first tap, and of a row's tap and channel.
  const int pixels = args.tile[0] * args.tile[1] * args.tile[2] * args.tile[3];
  const int steps = (pixels + kDepth - 1) / kDepth;
  Walk at(args.tile, thread, kThreads);
  for (int i = thread; i < steps * kDepth; i += kThreads, at.next(args.tile)) {
    const int row = (at.n * args.x_box.extent[1] + at.d * args.x_step[0]) * args.x_box.extent[2] +
                    at.h * args.x_step[1];
    const int source = (row * args.x_box.extent[3] + at.w * args.x_step[2]) * args.x_box.pitch;
    source_at[i] = i < pixels ? source : 0;
  }
  // Pixels past the box are read if their number is not a whole step; they are zeroed once.
  for (int stage = 0; stage < args.stages; ++stage) {
    char* const tail = base + stage * args.stage_bytes + args.y_at + pixels * args.y_box.pitch;
    const int bytes = (steps * kDepth - pixels) * args.y_box.pitch;
    for (int i = thread * 16; i < bytes; i += kThreads * 16) {
      *reinterpret_cast<uint4*>(tail + i) = make_uint4(0, 0, 0, 0);
    }
  }

  // This warp's item.
  const int k_splits = quick_divide(kWarps, args.items);
  const int k_split = quick_divide(warp, args.items), item = warp - k_split * args.items;
  u32 number = item_group * args.items + item;
  const int column_block = digit(number, args.column_blocks);
  const int row_block = digit(number, args.row_blocks);
  const int merge = number;
  const bool busy = merge < merges && k_split < k_splits;
  [[maybe_unused]] int row_offset[MT][kSize == 4 ? 2 : 1];
  const int mine = merge * x_merge * kSize;
  auto offset_of = [&](int row) {
    const int real = row < rows ? row : 0, tap = quick_divide(real, x_merge);
    const int above = quick_divide(tap, args.kernel[2]), t = quick_divide(above, args.kernel[1]);
    return ((t * args.x_tap[0] * args.x_box.extent[2] + (above - t * args.kernel[1]) * args.x_tap[1]) *
                args.x_box.extent[3] + (tap - above * args.kernel[2]) * args.x_tap[2]) * args.x_box.pitch +
           (real - tap * x_merge) * kSize + mine;
  };
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int row = (row_block * MT + i) * 16;
    if constexpr (kSize == 2) {
      row_offset[i][0] = offset_of(row + (lane >> 3 & 1) * 8);
    } else {
      row_offset[i][0] = offset_of(row + lane / 4);
      row_offset[i][1] = offset_of(row + 8 + lane / 4);
    }
  }
  const int column_offset = (merge * y_merge + column_block * NF * 8) * kSize;
  float sum[MT][NF][4] = {};

  int stage = 0;
  STAMP(3)
#pragma unroll 1
  for (int index = begin; index < end; ++index) {
    if (args.stages == 2) {
      cp_async_wait<0>();
    } else if (args.stages == 3) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<2>();
    }
    if (index == begin) { STAMP(4) }
    // All warps have multiplied the previous box, whose place the next copy takes.
    __syncthreads();
    copy(index + args.stages - 1, stage == 0 ? args.stages - 1 : stage - 1);
    if (busy) {
      const u32 x_box = boxes_at + stage * args.stage_bytes;
      const u32 y_box = x_box + args.y_at + column_offset;
#if WINDOWS
      // Eight columns of pixels, two rows per product, with each row of x loaded once: the two new rows
      // of x at taps 0 and 1 of a row, then at tap 2 together with y's rows.
      const int across = args.tile[3] / 8, eighth = lane >> 3;
      const int x_row = args.x_box.extent[3] * args.x_box.pitch, y_row = args.tile[3] * args.y_box.pitch;
      const bool of_y = eighth > 1;
      const int next = 2 * (of_y ? y_row : x_row);
#pragma unroll 1
      for (int window = k_split; window < args.tile[0] * args.tile[1] * across; window += k_splits) {
        const int plane = quick_divide(window, across), column = (window - plane * across) * 8 + (lane & 7);
        // A plane of x's box for each of y's: images and, because D has one tap, positions along D.
        const u32 x_at = x_box + plane * args.x_box.extent[2] * x_row + column * args.x_box.pitch + mine;
        const u32 y_at = y_box + plane * args.tile[2] * y_row + column * args.y_box.pitch;
        u32 near_at = x_at + (eighth >> 1) * x_row + (eighth & 1) * args.x_box.pitch;
        u32 far_at = of_y ? y_at + (eighth - 2) * y_row
                          : x_at + eighth * x_row + 2 * args.x_box.pitch;
        u32 rows_x[4][3];
        u32 near[4], far[4];
        ldmatrix_trans(near, near_at);
        ldmatrix_trans(far, of_y ? x_at : far_at);
        rows_x[2][0] = near[0], rows_x[2][1] = near[1], rows_x[2][2] = far[0];
        rows_x[3][0] = near[2], rows_x[3][1] = near[3], rows_x[3][2] = far[1];
        near_at += 2 * x_row;
        if (!of_y) far_at += next;
#pragma unroll 2
        for (int h = 0; h < args.tile[2]; h += 2) {
#pragma unroll
          for (int tap = 0; tap < 3; ++tap) {
            rows_x[0][tap] = rows_x[2][tap], rows_x[1][tap] = rows_x[3][tap];
          }
          ldmatrix_trans(near, near_at);
          ldmatrix_trans(far, far_at);
          near_at += 2 * x_row;
          far_at += next;
          rows_x[2][0] = near[0], rows_x[2][1] = near[1], rows_x[2][2] = far[0];
          rows_x[3][0] = near[2], rows_x[3][1] = near[3], rows_x[3][2] = far[1];
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            // The last product has one tap; its other half is unused.
            const int first = i * 2, second = first < 8 ? first + 1 : first;
            const u32 a[4] = {rows_x[first / 3][first % 3], rows_x[second / 3][second % 3],
                              rows_x[first / 3 + 1][first % 3], rows_x[second / 3 + 1][second % 3]};
            mma<T>(sum[i][0], a, far[2], far[3]);
          }
        }
      }
#else
#pragma unroll(EXACT ? 1 : 2)
      for (int step = k_split; step < steps; step += k_splits) {
        const int pixel = step * kDepth;
#if EXACT
#pragma unroll 2
        for (int next = pixel; next < pixel + kDepth; ++next) {
          const char* const x_at = base + (x_box - boxes_at) + source_at[next];
          const char* const y_at = base + (y_box - boxes_at) + next * args.y_box.pitch + lane % 4 * 8;
          float2 y_two[NF];
#pragma unroll
          for (int j = 0; j < NF; ++j) y_two[j] = *reinterpret_cast<const float2*>(y_at + j * 32);
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            const float low = *reinterpret_cast<const float*>(x_at + row_offset[i][0]);
            const float high = *reinterpret_cast<const float*>(x_at + row_offset[i][1]);
#pragma unroll
            for (int j = 0; j < NF; ++j) {
              sum[i][j][0] = fmaf(low, y_two[j].x, sum[i][j][0]);
              sum[i][j][1] = fmaf(low, y_two[j].y, sum[i][j][1]);
              sum[i][j][2] = fmaf(high, y_two[j].x, sum[i][j][2]);
              sum[i][j][3] = fmaf(high, y_two[j].y, sum[i][j][3]);
            }
          }
        }
#else
        u32 b[NF][2];
        if constexpr (kSize == 2) {
          const u32 y_lane = y_box + (pixel + (lane & 15)) * args.y_box.pitch;
#pragma unroll
          for (int j = 0; j < NF - 1; j += 2) {
            u32 four[4];
            ldmatrix_trans(four, y_lane + (j + (lane >> 4)) * 16);
            b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
          }
          if constexpr (NF % 2 == 1) ldmatrix_trans(b[NF - 1], y_lane + (NF - 1) * 16);
        } else {
          const u32 y_lane = y_box + (pixel + (lane & 3)) * args.y_box.pitch + (lane >> 2) * 4;
#pragma unroll
          for (int j = 0; j < NF; ++j) {
            b[j][0] = to_tf32(ld_shared_u32(y_lane + j * 32));
            b[j][1] = to_tf32(ld_shared_u32(y_lane + j * 32 + 4 * args.y_box.pitch));
          }
        }
        u32 x_lane[kSize == 4 ? 2 : 1];
        if constexpr (kSize == 2) {
          x_lane[0] = x_box + source_at[pixel + (lane & 7) + (lane >> 4) * 8];
        } else {
          x_lane[0] = x_box + source_at[pixel + (lane & 3)];
          x_lane[1] = x_box + source_at[pixel + (lane & 3) + 4];
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          u32 a[4];
          if constexpr (kSize == 2) {
            ldmatrix_trans(a, x_lane[0] + row_offset[i][0]);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              a[e] = to_tf32(ld_shared_u32(x_lane[e >> 1] + row_offset[i][e & 1]));
            }
          }
#pragma unroll
          for (int j = 0; j < NF; ++j) mma<T>(sum[i][j], a, b[j][0], b[j][1]);
        }
#endif
      }
#endif
    }
    if (++stage == args.stages) stage = 0;
  }
  STAMP(5)
  u32 begun = 0;
  if (thread == 0 && splits > 1) begun = rendezvous_begun(word);
  cp_async_wait<0>();
  __syncthreads();

  // The warps' sums, transposed: rows are adjacent.
  float* const slabs = reinterpret_cast<float*>(base);
  if (busy) {
    float* const slab = slabs + warp * kSlab + lane % 4 * 2 * kSlabPitch + lane / 4;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int j = 0; j < NF; ++j) {
        float* const to = slab + j * 8 * kSlabPitch + i * 16;
        to[0] = sum[i][j][0], to[kSlabPitch] = sum[i][j][1];
        to[8] = sum[i][j][2], to[kSlabPitch + 8] = sum[i][j][3];
      }
    }
  }
  __syncthreads();
  STAMP(6)
  const Part part{first_group, merges, tap_plane * taps, rows};
  sum_items<T>(args, part, item_group * args.items, k_splits, slabs, splits, split, word, begun);
  STAMP(7)
}

// The gradient of a grouped convolution's weight, few channels per group, on tensor cores: M = taps x
// input channels, N = output channels, K = pixels of grad_output, of one group or of as many groups,
// merged, as fill whole 16-byte chunks of channels on both sides (products between different groups
// are discarded); else zeros fill them up in shared memory. Launched by grouped_weight.py.
//
// w[g, k, c, r] = sum over pixels (n, o) of y[n, g, k, o] * x[n, g, c, o*stride + r*dilation - pad].
// Along each dimension, output y0 + m*y_step (m in [0, count)) of a phase meets, at tap r, input
// position x0 + (m*x_step + r*x_tap)*lattice.
//
// Block: a slice of adjacent channels on both sides, all taps or those of one position along D, or D and H,
// and a share of all boxes of pixels. A box of y, and of x with its halo, is copied into a ring in
// shared memory: on Hopper (COPY_ENGINE) by a thread of its own (TMA tiles of C W H D N, swizzled), else by
// all threads. A stride along W then becomes as many boxes of x, each with every stride-th column, so that
// the pixels of a product are adjacent at each tap. Each warp has an item, FRAGMENTS * 16 rows x NF * 8 columns of one merge, and every KSPLITth step
// of its pixels, with all sums in registers. At the end the KSPLIT warps of an item add their sums
// through shared memory, and blocks that share a slice in a cluster or through `partials` (weight_sums.cuh).
// Dynamic shared memory: the ring, later a slab of sums for each warp; then tables of the offsets of
// pixels in x's box and of rows, as grouped_weight_shares.py computes them. With EXACT, for exact
// float32, products are FMAs, and each lane has the same sums as with tensor cores.
// Grid: slices, groups of items x positions of taps, splits (at most 255).
// Preconditions: channels, of all merged groups, are contiguous; with COPY_ENGINE in whole 16-byte chunks.
// Deterministic: one order of additions for each result and share. Missing pixels of a box are read as
// zeros.
// Index limits: 64-bit offsets; positions and strides of D, H, W in bytes below 2^31.
#include "grouped/grouped_weight.cuh"

using namespace convgrad;

namespace {

constexpr int kWarps = WARPS, kThreads = (kWarps + COPY_ENGINE) * 32, kMostStages = 8;
constexpr int kSize = static_cast<int>(sizeof(ELEMENT));
constexpr int kDepth = 32 / kSize;  // pixels of one product
// Whether boxes may be swizzled; without, addresses take fewer instructions.
constexpr bool kSwizzles = COPY_ENGINE && kSize == 2;
// On Blackwell two blocks would need one register more if words are read for three columns.
constexpr int kBlocks = kBlackwell && kSize == 4 && NF == 3 ? 1 : BLOCKS;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    grouped_weight(const __grid_constant__ GroupedWeightArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
#if COPY_ENGINE
  __shared__ u64 barriers[2 * kMostStages + 1];
  const u32 full = shared_address(barriers), empty = full + 8 * kMostStages,
            received_barrier = empty + 8 * kMostStages;
  const bool in_cluster = args.in_cluster != 0;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
#else
  constexpr u32 received_barrier = 0;
  constexpr bool in_cluster = false;
  char* const base = reinterpret_cast<char*>(shared);
#endif
  const u32 boxes_at = shared_address(base);
  const int thread = threadIdx.x, lane = thread & 31, warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int tap_plane = divide(blockIdx.z, args.by_item_groups);
  const int item_group = blockIdx.z - tap_plane * args.item_groups, split = blockIdx.x, splits = gridDim.x;
  const BlockPart part(args.walk, tap_plane, split);
#if COPY_ENGINE
  if (warp == kWarps) {
    Boxes box(args.walk, part);
    auto copy = [&](int stage) {
      const u32 to = boxes_at + stage * args.stage_bytes, barrier = full + stage * 8;
      mbarrier_arrive_expect_tx(barrier, args.box_bytes);
      const int first[2] = {static_cast<int>(blockIdx.y) * args.slice_channels[0],
                            static_cast<int>(blockIdx.y) * args.slice_channels[1]};
      const int y_at[5] = {first[1], box.y[2], box.y[1], box.y[0], box.image};
      tma_load(to + args.y_at, args.y_map, barrier, y_at);
#pragma unroll 1
      for (int i = 0; i < args.sub_boxes; ++i) {
        const int x_at[5] = {first[0], box.x[2] + i * args.sub_next, box.x[1], box.x[0], box.image};
        tma_load(to + i * args.sub_bytes, args.x_map, barrier, x_at);
      }
    };
    const bool copies = elect_one();
    int index = part.begin;
    if (copies) {
#pragma unroll 1
      for (int i = 0; i < args.stages; ++i) {
        mbarrier_init(full + i * 8, 1);
        mbarrier_init(empty + i * 8, kWarps);
        fence_mbarrier_init();
        if (index >= part.end) continue;
        if (i > 0) box.next();
        copy(i);
        ++index;
      }
    }
    __syncwarp();
    if (in_cluster) cluster_arrive();
    __syncthreads();
    if (copies) {
      int stage = 0;
      u32 parity = 0;
#pragma unroll 1
      for (; index < part.end; ++index) {
        box.next();
        mbarrier_wait(empty + stage * 8, parity);
        copy(stage);
        if (++stage == args.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (in_cluster) cluster_wait();
    return;
  }
  if (in_cluster) {
    if (thread == 0) {
      mbarrier_init(received_barrier, kSummers);
      fence_mbarrier_init();
    }
    __syncwarp();
    cluster_arrive();
  }
#endif
  int* const source_at = reinterpret_cast<int*>(base + args.sources_at);
  Row* const row_at = reinterpret_cast<Row*>(base + args.rows_at);
  u32* const word = args.result.met + blockIdx.z * gridDim.y + blockIdx.y;
  const bool meets = splits > 1 && !in_cluster;
  if (thread == 0 && meets) rendezvous_begin(word);
  const int first_merge = blockIdx.y * args.slice, first_group = first_merge * args.merged;
#if !COPY_ENGINE
  const T* const x = static_cast<const T*>(args.x) + first_group * args.x_group;
  const T* const y = static_cast<const T*>(args.y) + first_group * args.y_group;
  const Copier copier_x(args.x_box, reinterpret_cast<const char*>(x), args.x_stride, args.lattice,
                        (args.groups - first_group) * args.result.in_channels * kSize);
  const Copier copier_y(args.y_box, reinterpret_cast<const char*>(y), args.y_stride, args.y_step,
                        (args.groups - first_group) * args.result.out_channels * kSize);
  if (args.padded) {
    clear<kThreads>(base, args.stages * args.stage_bytes);
    __syncthreads();
  }
  Boxes box(args.walk, part);
  auto copy = [&](int index, int stage) {
    if (index < part.end) {
      const u32 to = boxes_at + stage * args.stage_bytes;
      copier_x.copy(to, args.x_box, args.x_stride, box.image, args.batch, box.x, args.lattice, args.x_size);
      copier_y.copy(to + args.y_at, args.y_box, args.y_stride, box.image, args.batch, box.y, args.y_step,
                    args.y_size);
      box.next();
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < args.stages - 1; ++i) copy(part.begin + i, i);
#endif
  const int pixels = args.tile[0] * args.tile[1] * args.tile[2] * args.tile[3];
  const int steps = (pixels + kDepth - 1) / kDepth;
  fill_tables<kSize>(args, steps * kDepth, source_at, row_at);
  // Pixels past the box are read if their number is not a whole step; they are zeroed once.
  const int tail = (steps * kDepth - pixels) * args.y_pitch;
#pragma unroll 1
  for (int i = thread * 16; i < args.stages * tail; i += kSummers * 16) {
    const int stage = quick_divide(i, tail);
    char* const to = base + stage * args.stage_bytes + args.y_at + pixels * args.y_pitch;
    *reinterpret_cast<uint4*>(to + (i - stage * tail)) = make_uint4(0, 0, 0, 0);
  }

  // This warp's item.
  const int k_splits = divide(kWarps, args.by_items);
  const int k_split = divide(warp, args.by_items), number = warp - k_split * args.result.items;
  const int all = item_group * args.result.items + number, of_merge = divide(all, args.by_column_blocks);
  const int merge = divide(of_merge, args.by_row_blocks), column_block = all - of_merge * args.column_blocks;
  const int merges = min(args.slice, args.groups / args.merged - first_merge);
  const Item item = {merge, (of_merge - merge * args.row_blocks) * kRows, column_block * kColumns,
                     merge < merges && k_split < k_splits};
  __syncthreads();
  [[maybe_unused]] int row_offset[FRAGMENTS][kSize == 4 ? 2 : 1];
  const int mine = merge * args.merge_channels[0] * kSize;
#pragma unroll
  for (int i = 0; i < FRAGMENTS; ++i) {
    const Row* const first = row_at + item.row + i * 16;
    if constexpr (kSize == 2) {
      row_offset[i][0] = first[(lane >> 3 & 1) * 8].x + mine;
    } else {
      row_offset[i][0] = first[lane / 4].x + mine;
      row_offset[i][1] = first[8 + lane / 4].x + mine;
    }
  }
  const int column_offset = (merge * args.merge_channels[1] + item.column) * kSize;
  float sum[FRAGMENTS][NF][4] = {};

  int stage = 0;
  [[maybe_unused]] u32 parity = 0;
#pragma unroll 1
  for (int index = part.begin; index < part.end; ++index) {
#if COPY_ENGINE
    mbarrier_wait(full + stage * 8, parity);
#else
    if (args.stages == 2) {
      cp_async_wait<0>();
    } else if (args.stages == 3) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<2>();
    }
    // All warps have multiplied the previous box, whose place the next copy takes.
    __syncthreads();
    copy(index + args.stages - 1, stage == 0 ? args.stages - 1 : stage - 1);
#endif
    if (item.is_there) {
      const u32 x_box = boxes_at + stage * args.stage_bytes;
      const u32 y_box = x_box + args.y_at + column_offset;
      // Loops of their own: mma of a type that is chosen by a predicate takes up to 1.4 times as long.
      const auto multiply = [&](auto like, auto is_swizzled) {
        using E [[maybe_unused]] = decltype(like);
        constexpr bool kSwizzled = decltype(is_swizzled)::value;
        [[maybe_unused]] const u32 x_bits = kSwizzled ? args.x_swizzle : 0, y_bits = kSwizzled ? args.y_swizzle : 0;
#pragma unroll(EXACT ? 1 : 2)
        for (int step = k_split; step < steps; step += k_splits) {
          const int pixel = step * kDepth;
#if EXACT
#pragma unroll 2
          for (int next = pixel; next < pixel + kDepth; ++next) {
            const char* const x_at = base + (x_box - boxes_at) + source_at[next];
            const char* const y_at = base + (y_box - boxes_at) + next * args.y_pitch + lane % 4 * 8;
            float2 y_two[NF];
#pragma unroll
            for (int j = 0; j < NF; ++j) y_two[j] = *reinterpret_cast<const float2*>(y_at + j * 32);
#pragma unroll
            for (int i = 0; i < FRAGMENTS; ++i) {
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
            const u32 y_lane = y_box + (pixel + (lane & 15)) * args.y_pitch;
#pragma unroll
            for (int j = 0; j < NF - 1; j += 2) {
              u32 four[4];
              ldmatrix_trans(four, swizzled(y_lane + (j + (lane >> 4)) * 16, y_bits));
              b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
            }
            if constexpr (NF % 2 == 1) ldmatrix_trans(b[NF - 1], swizzled(y_lane + (NF - 1) * 16, y_bits));
          } else {
            const u32 y_lane = y_box + (pixel + (lane & 3)) * args.y_pitch + (lane >> 2) * 4;
#pragma unroll
            for (int j = 0; j < NF; ++j) {
              b[j][0] = to_tf32(ld_shared_u32(y_lane + j * 32));
              b[j][1] = to_tf32(ld_shared_u32(y_lane + j * 32 + 4 * args.y_pitch));
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
          for (int i = 0; i < FRAGMENTS; ++i) {
            u32 a[4];
            if constexpr (kSize == 2) {
              ldmatrix_trans(a, swizzled(x_lane[0] + row_offset[i][0], x_bits));
            } else {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                a[e] = to_tf32(ld_shared_u32(x_lane[e >> 1] + row_offset[i][e & 1]));
              }
            }
#pragma unroll
            for (int j = 0; j < NF; ++j) mma<E>(sum[i][j], a, b[j][0], b[j][1]);
          }
#endif
        }
      };
      as_type<T>(args.result.bfloat16, [&](auto like) {
        if (kSwizzles && (args.x_swizzle | args.y_swizzle) != 0) {
          multiply(like, Constant<kSwizzles>{});
        } else {
          multiply(like, Constant<false>{});
        }
      });
    }
#if COPY_ENGINE
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
#endif
    if (++stage == args.stages) stage = 0, parity ^= 1;
  }
  u32 begun = 0;
  if (thread == 0 && meets) begun = rendezvous_begun(word);
#if !COPY_ENGINE
  cp_async_wait<0>();
#endif
  named_barrier_sync(1, kSummers);

  float* const slabs = reinterpret_cast<float*>(base);
  if (item.is_there) leave_sums<Sums>(sum, slabs, warp);
  named_barrier_sync(1, kSummers);
  const i64(&stride)[6] = args.result.w_stride;
  // Computed again in 16-bit types, whose loop would spill it.
  const BlockPart taps =
      kSize == 2 ? BlockPart(args.walk, divide(blockIdx.z, args.by_item_groups), split) : part;
  const i64 merge_w = (first_group + merge * args.merged) * stride[0] + taps.t * stride[3] + taps.r * stride[4];
  sum_items<T, Sums>(args.result, item, number, k_split, k_splits, row_at, merge_w, slabs,
               Meeting{split, splits, in_cluster, received_barrier,
                       reinterpret_cast<float4*>(base + args.received_at), word, begun});
}

// A depthwise convolution and a pointwise one after it, with the intermediate kept on the chip:
//   y[p, k] = activation1(bias1[k] + sum_c w1[k, c] * m[p, c]),
//   m[p, c] = activation0(bias0[c] + sum_taps w0[c, tap] * x[p + tap, c]), rounded once.
// GEMM view of the second: M = output channels, N = pixels, K = channels. The host's side is
// fused_separable.py.
//
// Block: tiles of PIXELS pixels x kOutputs output channels, one tile after another, in steps of 64
// channels. While the tensor cores multiply one chunk of the intermediate, the same threads compute
// the next one (the next tile's first after the last): float32 sums, a strip of pixels x 8 channels
// a thread, from x by way of L1, the depthwise weights widened in shared memory. Where a block has
// several passes, kOutputs channels each, the tile's whole intermediate stays for all of them.
// WARPGROUP: products by wgmma, which runs by itself; else by mma.sync, and one half of the warps
// multiplies while the other computes.
// Rows of w1 in shared memory are permuted so that a thread ends with neighbouring output channels.
//
// Dynamic shared memory, from the first multiple of 1024 on: `stages` tiles of w1, `slots` chunks of
// the intermediate, two chunks of widened depthwise weights and three as they come, and the tiles'
// strips and pixels.
// Relies on its launcher for the grid (blocks, each taking every gridDim.x-th tile; parts of the
// output channels) and for what FusedArgs says of operands.
// Deterministic: one order of additions for each result.
// Index limits: pixels below 2^31; 64-bit offsets.
#include "fused/fused_tile.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    fused_separable(const __grid_constant__ FusedArgs args) {
  extern __shared__ uint4 memory[];
  const Shared shared = shared_of(args, reinterpret_cast<unsigned char*>(memory));
  const int taps = taps_of(args);
  const int chunks = SINGLE ? 1 : args.chunks, passes = SINGLE ? 1 : args.passes;
  const int a_tile = passes * chunks, slots = SINGLE ? 2 : args.slots;
  const int stages = SINGLE ? 1 : args.stages;
  const bool resident = SINGLE || args.resident != 0;
  const int tiles = (args.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);
  const int steps = tiles * a_tile;
  const bool kept = chunks <= 2;  // the widened weights
  const int first_output = blockIdx.y * passes * kOutputs;
  auto store = [&](Sums& sums, int tile, int pass) {
    const int output = first_output + pass * kOutputs + own_output();
    finish_sums(sums, args.bias1, args.activation1, output, args.outputs);
    store_sums(sums, args.y, shared.outputs + tile % kTables * kPixels, output, args.outputs,
               args.wide_stores != 0);
  };
  auto publish = [] {
#if WARPGROUP
    publish_shared();
#endif
  };
  auto tile_of = [&](int i) { return static_cast<int>(blockIdx.x + i * gridDim.x); };
  auto raw_at = [&](int i) { return shared.raw + i % kRaw * taps * kChunk * 2; };
  auto taps_at = [&](int i) { return shared.taps + (i & 1) * taps * kChunk; };

  auto make_table = [&](int i) {
    find_places(args, shared.outputs + i % kTables * kPixels, tile_of(i));
    find_strips(args, shared, tile_of(i), i % kTables);
  };

  // Copies of w1's tiles run ahead of the steps.
  const int ahead = resident ? a_tile : stages - 1;
  int copy_pass = 0, copy_chunk_index = 0, copy_stage = 0;
  auto copy_next = [&] {
    copy_weights(args.w1, args.w1_stride, args.channels, args.outputs,
                 first_output + copy_pass * kOutputs,
                 shared.weights + copy_stage * kWeightBytes, copy_chunk_index);
    if (++copy_chunk_index == chunks) {
      copy_chunk_index = 0;
      if (++copy_pass == passes) copy_pass = 0;
    }
    if (++copy_stage == stages) copy_stage = 0;
  };

#pragma unroll 1
  for (int i = 0; i < kRaw && i < (kept ? chunks : tiles * chunks); ++i) {
    copy_taps(args, raw_at(i), i % chunks);
  }
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < 2 && i < tiles; ++i) make_table(i);
  __syncthreads();
  Inputs inputs;
  if (AHEAD) fetch_inputs(args, shared, inputs, 0, 0);
#pragma unroll 1
  for (int i = 0; i < ahead && i < steps; ++i) copy_next();
  commit_copies();
  wait_copies<1>();
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2 && i < tiles * chunks; ++i) {
    if (i < chunks || !kept) widen_taps(args, taps_at(i), raw_at(i), i % chunks);
  }
  __syncthreads();
  // The next chunk to compute: of which tile, and how many there were.
  int made = 0, made_tile = 0, made_chunk = 0, made_slot = 0;
  auto compute_next = [&] {
    const float* const weights = taps_at(kept ? made_chunk : made);
    compute_middle(args, shared, inputs, made_tile % kTables, made_chunk, made_slot, weights);
    const int tile = made_tile, chunk = made_chunk;
    if (++made_slot == slots) made_slot = 0;
    if (++made_chunk == chunks) {
      made_chunk = 0;
      ++made_tile;
    }
    ++made;
    if (AHEAD && made_tile < tiles) {
      fetch_inputs(args, shared, inputs, made_tile % kTables, made_chunk);
    }
    if (chunk == 0 && tile + 2 < tiles) {
      make_table(tile + 2);
    }
    if (!kept && made > 1 && made < tiles * chunks) {
      widen_taps(args, taps_at(made), raw_at(made), made_chunk);
    }
  };
  if (!kept && 3 < tiles * chunks) copy_taps(args, raw_at(3), 3 % chunks);
  commit_copies();
  wait_copies<0>();
#if SINGLE
  publish();
  __syncthreads();
#endif

  Product product(shared.weights, shared.middle);
  Sums sums;
#if SINGLE
  // Several blocks share a multiprocessor: they overlap, and no sums wait while a chunk is computed.
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    compute_next();
    publish();
    __syncthreads();
    const int depth = (args.channels + kDepth - 1) / kDepth;
    product.start(sums, 0, (tile & 1) * kMiddleBytes, depth, true);
    product.finish(sums);
    store(sums, tile, 0);
  }
#else
  int pass = 0, chunk = 0, tile = 0, stage = 0, base = 0;
#pragma unroll 1
  for (int step = -1; step < steps; ++step) {
    // The first time round there is nothing to multiply yet.
    const bool starts = step < 0;
    const bool ends = pass == passes - 1 && chunk == chunks - 1;
    const bool makes =
        starts || (step + 1 < steps && (ends || (pass == 0 && chunk + 1 < chunks)));
    if (!starts && !resident && step + ahead < steps) copy_next();
    if (!starts && makes && !kept && made + 3 < tiles * chunks) {
      const int next = made_chunk + 3;
      copy_taps(args, raw_at(made + 3), next < chunks ? next : next - chunks);
    }
    commit_copies();

    const int slot = slots == 2 ? (base + chunk) & 1 : chunk;
    const int left = args.channels - chunk * kChunk;
    const int depth = (left + kDepth - 1) / kDepth;
    auto multiply = [&] {
      product.start(sums, stage * kWeightBytes, slot * kMiddleBytes, depth, chunk == 0);
    };
    const bool before = threadIdx.x < kThreads / 2;
    if (!starts && before) multiply();
    if (makes) compute_next();
    if (!starts) {
      if (!before) multiply();
      product.finish(sums);
      if (chunk == chunks - 1) store(sums, tile, pass);
      if (++stage == stages) stage = 0;
      if (++chunk == chunks) {
        chunk = 0;
        if (++pass == passes) {
          pass = 0;
          ++tile;
          base = (base + chunks) & 1;
        }
      }
    }
    if (stages > 2 && !resident) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    publish();
    __syncthreads();
  }
#endif
}

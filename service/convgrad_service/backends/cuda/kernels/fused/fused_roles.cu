// A depthwise convolution and a pointwise one after it, as fused_separable.cu, on Hopper: half of the
// threads compute the intermediate, the other half copy weights, multiply and store, so that neither
// waits for the other's instructions. The host's side is fused_separable.py.
//
// Chunks of the intermediate pass through a ring of kRing places, or stay for several passes. Those
// who compute fill the place of step s once step s - kRing has been multiplied; those who multiply
// free it. Each four warps of the latter copy the weights that they alone need, some steps ahead.
// Named barriers: 1 + place where it is full, 1 + kRing + place where it is free, 8 + group among the
// warps of a group that multiplies, 15 among those who compute.
//
// Shared memory, what the launcher is relied on for, order of additions and limits are those of
// fused_separable.cu; where the intermediate stays there are at least kRing chunks.
#include "fused/fused_tile.cuh"

using namespace convgrad;

static_assert(kPixels <= 128 && 2 * kGroups <= kTables, "each group finds its places, twice");

constexpr int kRing = 3, kAll = 2 * kThreads, kOwn = 15;

extern "C" __global__ void __launch_bounds__(kAll, BLOCKS)
    fused_roles(const __grid_constant__ FusedArgs args) {
  extern __shared__ uint4 memory[];
  const Shared shared = shared_of(args, reinterpret_cast<unsigned char*>(memory));
  const int chunks = args.chunks, passes = args.passes, a_tile = passes * chunks;
  const int tiles = (args.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);
  const int steps = tiles * a_tile;
  const int first_output = blockIdx.y * passes * kOutputs;
  auto tile_of = [&](int i) { return static_cast<int>(blockIdx.x + i * gridDim.x); };
  auto full = [](int place) { return 1 + place; };
  auto free = [](int place) { return 1 + kRing + place; };

  if (threadIdx.x < kThreads) {
#if MULTIPLIERS != COMPUTERS
    take_registers<MULTIPLIERS>();
#endif
    const int group = threadIdx.x / 128;
    int copy_pass = 0, copy_chunk = 0, copy_stage = 0;
    const int stages = args.resident ? a_tile : kRing;
    auto copy_next = [&] {
      copy_own_weights(args.w1, args.w1_stride, args.channels, args.outputs,
                       first_output + copy_pass * kOutputs,
                       shared.weights + copy_stage * kWeightBytes, copy_chunk);
      if (++copy_stage == stages) copy_stage = 0;
      if (++copy_chunk < chunks) return;
      copy_chunk = 0;
      if (++copy_pass == passes) copy_pass = 0;
    };
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (i < steps) copy_next();
      commit_copies();
    }
    Product product(shared.weights, shared.middle);
    Sums sums;
    int place = 0, pass = 0, chunk = 0, tile = 0, at_tile = 0;
    // Each group has places of its own, for two tiles.
    auto places_of = [&](int i) {
      return shared.outputs + ((i & 1) * kGroups + group) * kPixels;
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (args.resident) {
        wait_copies<0>();
      } else {
        wait_copies<kRing - 1>();
      }
      publish_shared();
      if (at_tile == 0) {
        const Rows rows = rows_of(args, tile_of(tile), kPixels);
        const int i = threadIdx.x % 128;
        if (i < kPixels) places_of(tile)[i] = output_at(args, rows, i);
      }
      wait_at(8 + group, 128);
      wait_at(full(place), kAll);
      const int left = args.channels - chunk * kChunk;
      const int stage = args.resident ? at_tile : place;
      product.start(sums, stage * kWeightBytes, (passes == 1 ? place : chunk) * kMiddleBytes,
                    (left + kDepth - 1) / kDepth, chunk == 0);
      product.finish(sums);
      pass_by(free(place), kAll);
      if (!args.resident && step + kRing < steps) {
        // The other warps of the group have read the weights too.
        wait_at(8 + group, 128);
        copy_next();
      }
      commit_copies();
      if (++place == kRing) place = 0;
      ++at_tile;
      if (++chunk < chunks) continue;
      chunk = 0;
      const int output = first_output + pass * kOutputs + own_output();
      finish_sums(sums, args.bias1, args.activation1, output, args.outputs);
      store_sums(sums, args.y, places_of(tile), output, args.outputs,
                 args.wide_stores != 0);
      if (++pass < passes) continue;
      pass = at_tile = 0;
      ++tile;
    }
    return;
  }

#if MULTIPLIERS != COMPUTERS
  leave_registers<COMPUTERS>();
#endif
  auto meet = [] { wait_at(kOwn, kThreads); };
  auto raw_at = [&](int i) { return shared.raw + i % kRaw * taps_of(args) * kChunk * 2; };
  auto taps_at = [&](int i) { return shared.taps + (i & 1) * taps_of(args) * kChunk; };
  const bool kept = chunks <= 2;  // the widened weights
  const int all = tiles * chunks;

#pragma unroll 1
  for (int i = 0; i < kRaw && i < (kept ? chunks : all); ++i) copy_taps(args, raw_at(i), i % chunks);
  commit_copies();
#pragma unroll 1
  for (int i = 0; i < 2 && i < tiles; ++i) find_strips(args, shared, tile_of(i), i);
  meet();
  wait_copies<0>();
  meet();
#pragma unroll 1
  for (int i = 0; i < 2 && i < all; ++i) {
    if (i < chunks || !kept) widen_taps(args, taps_at(i), raw_at(i), i % chunks);
  }
  meet();

  Inputs inputs;
  if (AHEAD) fetch_inputs(args, shared, inputs, 0, 0);
  int place = 0, pass = 0, chunk = 0, tile = 0, table = 0, made = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step >= kRing) wait_at(free(place), kAll);
    if (pass == 0 && !kept && made + 3 < all) {
      int next = chunk + 3;
      if (next >= chunks) next -= chunks;
      copy_taps(args, raw_at(made + 3), next);
    }
    commit_copies();
    if (pass == 0) {
      compute_middle(args, shared, inputs, table, chunk, passes == 1 ? place : chunk,
                     taps_at(kept ? chunk : made));
      if (AHEAD && chunk + 1 < chunks) {
        fetch_inputs(args, shared, inputs, table, chunk + 1);
      } else if (AHEAD && tile + 1 < tiles) {
        fetch_inputs(args, shared, inputs, table + 1 < kTables ? table + 1 : 0, 0);
      }
      if (chunk == 0 && tile + 2 < tiles) {
        int later = table + 2;
        if (later >= kTables) later -= kTables;
        find_strips(args, shared, tile_of(tile + 2), later);
      }
      ++made;
      if (!kept && made > 1 && made < all) {
        widen_taps(args, taps_at(made), raw_at(made), chunk + 1 == chunks ? 0 : chunk + 1);
      }
    }
    wait_copies<1>();
    publish_shared();
    meet();
    pass_by(full(place), kAll);
    if (++place == kRing) place = 0;
    if (++chunk < chunks) continue;
    chunk = 0;
    if (++pass < passes) continue;
    pass = 0;
    ++tile;
    if (++table == kTables) table = 0;
  }
  // Nobody leaves a barrier half full.
  if (steps < kRing) place = 0;
  for (int i = min(steps, kRing); i > 0; --i) {
    wait_at(free(place), kAll);
    if (++place == kRing) place = 0;
  }
}

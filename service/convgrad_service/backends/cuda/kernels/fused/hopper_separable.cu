// A depthwise 3x3 convolution followed by a pointwise one, on Hopper, with the intermediate in shared
// memory only:
//
// m[p, c] = activation0(bias0[c] + sum over (r, s) of x[p*STRIDE + (r, s) - pad, c] * w0[c, r, s]),
// rounded once, and y[p, k] = activation1(bias1[k] + sum over c of m[p, c] * w1[k, c])
//
// Launched by hopper_separable.py. GEMM: M = kOutputs of the outputs, N = the COLUMNS pixels
// of a tile, K = the channels, in chunks of ROW_BYTES / 2.
// Item: a tile of TILE_H x TILE_W pixels, and a slice of the outputs; slices
// of one tile are consecutive. A persistent block computes every gridDim-th item. It is warp
// specialized: GROUPS consumer warpgroups multiply, each PARTS x 64 outputs, and SHARERS of them have
// the same outputs and different rows of the tile. Two warpgroups are teams that compute a chunk of
// the intermediate each at a time, by FMA, each lane two channels of UNIT_H x UNIT_W pixels
// (hopper_separable_middle.cuh). In the last one, a thread loads boxes of the input with their halo,
// zeros outside, and another the weights of a chunk. They communicate through rings of boxes, of
// weights (or all weights, loaded once), and of MIDDLES stages of the intermediate.
// Dynamic shared memory: 1,024 bytes for alignment; the rings of weights and of the intermediate; for
// each group COLUMNS rows of 128 bytes of staged results; the boxes; barriers. See
// hopper_separable_tiles.py.
// Preconditions: contiguous channels in whole 16-byte chunks, and contiguous taps and
// channels of w0. Needs sm_90a.
// Deterministic: one order of additions for each result, independent of the tile.
// Index limits: items below 2^31; positions are those of tensor maps.
#include "fused/hopper_separable_middle.cuh"

using namespace convgrad;

namespace {

// One thread starts the copies of the input and of the depthwise weights.
__device__ __forceinline__ void load_boxes(const HopperSeparableArgs& args, const Place& place) {
  const char* const taps = static_cast<const char*>(args.w0);
  const char* const biases = static_cast<const char*>(args.bias0);
  PipelineState ring{0, 1};
#pragma unroll 1
  for (int item = blockIdx.x; item < args.items; item += gridDim.x) {
    const ItemAt at(args, item);
    const int top = at.row * kStride - args.pad[0], left = at.column * kStride - args.pad[1];
#pragma unroll 1
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      mbarrier_wait(place.x_free(ring.index), ring.parity);
      const int first = chunk * kChunk, channels = min(kChunk, args.channels - first);
      const u32 to = place.boxes + ring.index * kBoxStage, barrier = place.x_full(ring.index);
      mbarrier_arrive_expect_tx(barrier, kBoxBytes + channels * (kTapBytes + (biases != nullptr ? 2 : 0)));
      tma_load<4>(to, args.x_map, barrier, {first, left, top, at.n});
      bulk_load(to + kTapsAt, taps + first * kTapBytes, channels * kTapBytes, barrier);
      if (biases != nullptr) bulk_load(to + kBiasesAt, biases + first * 2, channels * 2, barrier);
      ring.advance(place.x_stages);
    }
  }
}

// One thread starts the copies of w1.
__device__ __forceinline__ void load_weights(const HopperSeparableArgs& args, const Place& place) {
  PipelineState ring{0, 1};
  auto load = [&](int chunk, int slice) {
    mbarrier_arrive_expect_tx(place.w_full(ring.index), kWeightBytes);
    tma_load<2>(place.weights + ring.index * kWeightBytes, args.w1_map, place.w_full(ring.index),
                 {chunk * kChunk, slice * kOutputs}, kEvictLast);
    ring.advance(place.w_stages);
  };
  if (args.resident) {
#pragma unroll 1
    for (int chunk = 0; chunk < args.chunks; ++chunk) load(chunk, 0);
    return;
  }
#pragma unroll 1
  for (int item = blockIdx.x; item < args.items; item += gridDim.x) {
    const int slice = ItemAt(args, item).slice;
#pragma unroll 1
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      mbarrier_wait(place.w_free(ring.index), ring.parity);
      load(chunk, slice);
    }
  }
}

// Computes the intermediate: each team computes every other chunk.
__device__ __forceinline__ void make_middles(const HopperSeparableArgs& args, const Place& place,
                                             int warp) {
  const Maker maker(args, place, warp % kMakers);
  const int lane = threadIdx.x & 31, team = warp / kMakers;
  PipelineState ring, middle{0, 1};
  int turn = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < args.items; item += gridDim.x) {
#pragma unroll 1
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      if (turn == team) {
        mbarrier_wait(place.middle_free(middle.index), middle.parity);
        mbarrier_wait(place.x_full(ring.index), ring.parity);
        maker.make(chunk, ring.index, middle.index);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          mbarrier_arrive(place.x_free(ring.index));
          mbarrier_arrive(place.made(middle.index));
        }
      }
      if (++turn == kTeams) turn = 0;
      ring.advance(place.x_stages);
      middle.advance(kMiddles);
    }
  }
}

using Sums = float[kParts][kFragments][4];

template <Activation kActivation>
__device__ __forceinline__ void change_sums(float (&sum)[kFragments][4], const float (&bias)[2]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[j][e] = activate(sum[j][e] + bias[e / 2], kActivation);
  }
}

__device__ __forceinline__ void consume(const HopperSeparableArgs& args, const Place& place,
                                        int group) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const bool first = threadIdx.x % 128 == 0;  // it starts the stores
  const u64 weights =
      k_major_descriptor<kRowBytes>(place.weights + group / kSharers * kParts * 64 * kRowBytes);
  const u64 middles =
      k_major_descriptor<kRowBytes>(place.middle + group % kSharers * kOwnPixels * kRowBytes);
  const u32 staging = place.staging + group * kStagingBytes;
  const T* const bias1 = static_cast<const T*>(args.bias1);
  PipelineState ring, middle;
#pragma unroll 1
  for (int item = blockIdx.x; item < args.items; item += gridDim.x) {
    Sums sums;
    int w_before = 0, middle_before = 0;  // of the products in flight
    bool under_way = false;
    auto release = [&] {
      if (lane != 0) return;
      if (!args.resident) mbarrier_arrive(place.w_free(w_before));
      mbarrier_arrive(place.middle_free(middle_before));
    };
#pragma unroll 1
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      mbarrier_wait(place.w_full(ring.index), ring.parity);
      const u32 made = place.made(middle.index);
      // Producers of the next chunk may wait for this one's stage.
      if (under_way && __shfl_sync(0xffffffff, mbarrier_test_wait(made, middle.parity), 0) == 0) {
        wgmma_wait<0>();
        release();
        under_way = false;
      }
      mbarrier_wait(made, middle.parity);
      wgmma_fence();
      const u64 a = advance_descriptor(weights, ring.index * kWeightBytes);
      const u64 b = advance_descriptor(middles, middle.index * kMiddleBytes);
#pragma unroll
      for (int i = 0; i < kRowBytes / 32; ++i) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          wgmma<T>(sums[part], advance_descriptor(a, part * 64 * kRowBytes + i * 32),
                   advance_descriptor(b, i * 32), i > 0 ? 1 : chunk > 0);
        }
      }
      wgmma_commit();
      if (under_way) {
        wgmma_wait<1>();
        release();
      }
      under_way = true;
      w_before = ring.index, middle_before = middle.index;
      ring.advance(place.w_stages);
      // All weights stay resident after the first item.
      if (args.resident) ring.parity = 0;
      middle.advance(kMiddles);
    }
    const ItemAt at(args, item);
    wgmma_wait<0>();
    fence_accumulators(sums);
    release();
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int channel = at.slice * kOutputs + (group / kSharers * kParts + part) * 64;
      if (channel >= args.outputs) break;
      if (__builtin_expect(bias1 != nullptr || args.activation1 != kNone, false)) {
        float bias[2] = {};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int own = channel + warp * 16 + e * 8 + lane / 4;
          if (bias1 != nullptr && own < args.outputs) bias[e] = widen(bias1[own]);
        }
        switch (args.activation1) {
          case kNone: change_sums<kNone>(sums[part], bias); break;
          case kRelu: change_sums<kRelu>(sums[part], bias); break;
          case kRelu6: change_sums<kRelu6>(sums[part], bias); break;
          default: change_sums<kSilu>(sums[part], bias);
        }
      }
      if (first) tma_store_wait_read<0>();  // the previous staged part
      named_barrier_sync(1 + group, 128);
      stage_columns<T, kFragments>(staging, sums[part], 0);
      fence_proxy_async();
      named_barrier_sync(1 + group, 128);
      if (first) {
        const int row = at.row + group % kSharers * (kTileH / kSharers);
        tma_store<4>(args.y_map, staging, {channel, at.column, row, at.n});
        tma_store_commit();
      }
      __syncwarp();
    }
  }
  if (first) tma_store_wait_read<0>();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_separable(const __grid_constant__ HopperSeparableArgs args) {
  extern __shared__ uint4 shared[];
  const Place place(args, shared_address(shared));
  // Uniform in a warp; a shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int group = warp / 4;
  if (warp == kThreads / 32 - 1) {
    if (elect_one()) {
      prefetch_tensor_map(args.x_map);
      prefetch_tensor_map(args.w1_map);
      prefetch_tensor_map(args.y_map);
      for (int i = 0; i < kMiddles; ++i) {
        mbarrier_init(place.made(i), kMakers);
        mbarrier_init(place.middle_free(i), kConsumers);
      }
      for (int i = 0; i < args.x_stages; ++i) {
        mbarrier_init(place.x_full(i), 1);
        mbarrier_init(place.x_free(i), kMakers);
      }
      for (int i = 0; i < args.w_stages; ++i) {
        mbarrier_init(place.w_full(i), 1);
        mbarrier_init(place.w_free(i), kConsumers);
      }
      fence_mbarrier_init();
    }
    __syncwarp();
  }
  __syncthreads();
  if (group < kGroups) {
    setmaxnreg_inc<CONSUMERS>();
    consume(args, place, group);
  } else if (group < kGroups + 2) {
    setmaxnreg_dec<MAKERS>();
    make_middles(args, place, warp - kConsumers);
  } else {
    setmaxnreg_dec<LOADERS>();
    if (warp % 4 == 0 && elect_one()) load_boxes(args, place);
    if (warp % 4 == 1 && elect_one()) load_weights(args, place);
  }
}

// The mainloops of pointwise_gemm.cu: by wgmma, A from shared memory or from registers, or by mma.sync.
#pragma once

#include "conv/pointwise_gemm_load.cuh"

namespace {

// The mainloop of one tile: this warpgroup's accumulators over `steps` k-tiles. With PINGPONG, the other one's may
// start when the last wgmmas are issued.
__device__ __forceinline__ void mainloop(const SharedLayout& smem, PipelineState& state,
                                               int steps, Accumulators& accum, u32 next_order_barrier = 0) {
  const int first_row = CONSUMERS == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * kNextRows;
  const int lane = threadIdx.x & 31, sharers = kMulticast ? smem.sharing : 1;
  int previous = -1;  // the stage that wgmmas in flight read
  if constexpr (kMmaSync) {
    const Tf32Products<kMmasM, kFragmentsN, DEPTH, B_BYTES> by_mma(threadIdx.x);
    const u32 own = first_row / 32 * OperandA::kBoxBytes;
    clear(accum);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      by_mma.add(smem.a(state.index) + own, smem.b(state.index),
                 [&](int i, int f) -> float(&)[4] { return accum[i][f]; });
      __syncwarp();
      if (lane < sharers) smem.release(state.index, lane);
      state.advance(smem.stages);
    }
  } else if constexpr (kRegistersA) {
    const Tf32Rows<DEPTH> rows(threadIdx.x);
    const u32 own = first_row / 32 * OperandA::kBoxBytes;
    constexpr int kMmas = DEPTH / OperandB::kMmaDepth;
    u32 next[kMmas][kMmasM][4], a[kMmas][kMmasM][4];  // of the next k-tile, and those of wgmmas in flight
    const auto load = [&]() {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
#pragma unroll
        for (int part = 0; part < kMmasM; ++part) {
          rows.load(smem.a(state.index) + own + part * 2 * OperandA::kBoxBytes + i * 1024, next[i][part]);
        }
      }
    };
    if (steps > 0) load();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wgmma_wait<0>();
      fence_accumulators(accum);
      if (previous >= 0 && lane < sharers) smem.release(previous, lane);
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
#pragma unroll
        for (int part = 0; part < kMmasM; ++part) Tf32Rows<DEPTH>::give(a[i][part], next[i][part]);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kMmas; ++i) {
        const u64 b = OperandB::descriptor(smem.b(state.index), 0, i);
#pragma unroll
        for (int part = 0; part < kMmasM; ++part) wgmma<T>(accum[part], a[i][part], b, i > 0 || step > 0);
      }
      wgmma_commit();
      previous = state.index;
      state.advance(smem.stages);
      if (step + 1 < steps) load();
    }
    wgmma_wait<0>();
    fence_accumulators(accum);
    if (previous >= 0 && lane < sharers) smem.release(previous, lane);
  } else {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      const u32 b_from = RESIDENT ? smem.resident + step * OperandB::kBytes : smem.b(state.index);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < DEPTH / OperandB::kMmaDepth; ++i) {
        const u64 b = OperandB::descriptor(b_from, 0, i);
#pragma unroll
        for (int part = 0; part < kMmasM; ++part) {
          const u64 a = OperandA::descriptor(smem.a(state.index), first_row + part * 64, i);
          wgmma<T, OperandA::kMajor, OperandB::kMajor>(accum[part], a, b, i > 0 || step > 0);
        }
      }
      wgmma_commit();
      if (kPingPong && step == steps - 1 && lane == 0) mbarrier_arrive(next_order_barrier);
      wgmma_wait<1>();
      if (previous >= 0 && lane < sharers) smem.release(previous, lane);
      previous = state.index;
      state.advance(smem.stages);
    }
    wgmma_wait<0>();
    fence_accumulators(accum);
    if (previous >= 0 && lane < sharers) smem.release(previous, lane);
  }
}

// The mainloop of one tile, of unaligned rows; with PLANES, B is `image`.
template <int kParts, int kFragments>
__device__ __forceinline__ void unaligned_mainloop(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                                   const BlockWork& work, PipelineState& state, int image,
                                                   float (&accum)[kParts][kFragments][4]) {
  using Products = UnalignedProducts<T, UnalignedA, UnalignedB, A_MN != 0, B_MN != 0, kStraddles, kParts, kFragments, DEPTH>;
  const int image_tiles = kImages ? args.image_tiles : 1, a_image = static_cast<int>(args.a_image);
  const int b_image = static_cast<int>(args.b_image);
  ImageStep at(kImages ? work.begin : 0, image_tiles);
  const ImageStep each(kImages ? work.k_step : 0, image_tiles);
  const u32 own = threadIdx.x / 128 * kNextRows * (A_MN ? static_cast<u32>(sizeof(T)) : UnalignedA::kPitch);
  Products products(threadIdx.x, args.a_channel, 0, args.b_channel, PLANES ? image * b_image : 0);
  clear(accum);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    if constexpr (kImages) {
      products = Products(threadIdx.x, args.a_channel, at.image * a_image, args.b_channel, at.image * b_image);
      at.add(each, image_tiles);
    }
    mbarrier_wait(smem.full_barrier(state.index), state.parity);
    products.add(smem.a(state.index) + own, smem.b(state.index), accum);
    __syncwarp();
    if (threadIdx.x % 32 == 0) smem.release(state.index, 0);
    state.advance(smem.stages);
  }
}

// Either of them.
__device__ __forceinline__ void mainloop(const PointwiseGemmArgs& args, const SharedLayout& smem, const BlockWork& work,
                                         PipelineState& state, int image, Accumulators& accum,
                                         u32 next_order_barrier = 0) {
  if constexpr (kUnaligned) {
    unaligned_mainloop(args, smem, work, state, image, accum);
  } else {
    mainloop(smem, state, work.steps, accum, next_order_barrier);
  }
}

}  // namespace

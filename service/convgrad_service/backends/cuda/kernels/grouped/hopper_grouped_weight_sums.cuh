// Reductions in hopper_grouped_weight.cu: from the registers of warps to the sums of the block, then to
// those of all blocks of a slice, and to results.
//
// A vector is four sums of a lane, as in a wgmma accumulator: two adjacent channels of y, for a channel
// of x and for the channel eight further. A warp has vectors of two kinds of products. For the pair of
// taps s = 0 and 1, both warpgroups have each vector, so each owns every other one; for the last tap,
// each row of x has one, so each of four warps owns every fourth. Vectors of other owners are passed
// through shared memory.
#pragma once

#include "grouped/hopper_grouped_weight.cuh"
#include "core/partial_sums.cuh"
#include "core/rendezvous.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// NEAR: channels of a group, 8 at least.
constexpr int kWidth = 32, kTaps = 3, kMet = 4;
constexpr int kFragments = kWidth / 8;                 // of a row of y
constexpr int kOfTap = NEAR / 8, kEach = kTaps * kOfTap;  // vectors of a warp with used sums
constexpr int kOwnPairs = (kEach + 1) / 2, kOwn = kOwnPairs + (kEach + 3) / 4;
constexpr int kSummers = 256, kSumWarps = kSummers / 32;  // consumer threads and warps
constexpr int kVectors = kSummers * kOwn;                 // of a block

struct Sums {
  float pairs[kTaps * kFragments][4];  // rows: 32 channels at s = 0, and at 1
  float last[kMet * kFragments][4];    // rows: 32 channels of a row of x, and of the next
};

// A consumer warp: its warpgroup, its 32 rows of products (`row`), and its half of these.
struct Summer {
  int group, row, half;

  __device__ __forceinline__ Summer(int warp) : group(warp >> 2), row(warp >> 1 & 1), half(warp & 1) {}
};

// One of a warp's own vectors: its tap, and its index among that tap's.
struct Vector {
  int half, tap, of_tap;
  bool is_there;

  __device__ __forceinline__ Vector(const Summer& of, int own) : half(of.half) {
    const bool is_pair = own < kOwnPairs;
    const int index = is_pair ? own * 2 + of.group : (own - kOwnPairs) * 4 + of.group * 2 + of.row;
    const int r = index / kOfTap;
    tap = r * kTaps + (is_pair ? of.row : kTaps - 1);
    of_tap = index - r * kOfTap;
    is_there = index < kEach;
  }
};

// Fragments of a row of y, four sums each.
template <int kHalf>
__device__ __forceinline__ float4 vector_of(const float (*row)[4], int of_tap) {
  if constexpr (NEAR == 8) {
    return make_float4(row[kHalf * 2][0], row[kHalf * 2][1], row[kHalf * 2 + 1][2],
                       row[kHalf * 2 + 1][3]);
  }
  const float(&of)[4] = row[of_tap + (NEAR == 16 ? kHalf * 2 : 0)];
  return make_float4(of[0], of[1], of[2], of[3]);
}
template <int kHalf>
__device__ __forceinline__ float4 pair_of(const Sums& sum, int index) {
  return vector_of<kHalf>(sum.pairs + (kTaps - 1 - index / kOfTap) * kFragments, index % kOfTap);
}
template <int kHalf>
__device__ __forceinline__ float4 last_of(const Sums& sum, int row, int index) {
  return vector_of<kHalf>(sum.last + (row + kTaps - 1 - index / kOfTap) * kFragments, index % kOfTap);
}

// Offset in shared memory of a vector for its owner.
__device__ __forceinline__ float4* pair_at(float4* room, const Summer& of, int index) {
  return room + ((of.row * 2 + of.half) * kEach + index) * 32 + (threadIdx.x & 31);
}
__device__ __forceinline__ float4* last_at(float4* room, const Summer& of, int index, int slot) {
  return room + (4 * kEach + (of.half * kEach + index) * 3 + slot) * 32 + (threadIdx.x & 31);
}

template <int kGroup, int kRow, int kHalf>
__device__ __forceinline__ void leave(const Sums& sum, const Summer& of, float4* room,
                                      float4 (&own)[kOwn]) {
  constexpr int kMember = kGroup * 2 + kRow;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i % 2 != kGroup) *pair_at(room, of, i) = pair_of<kHalf>(sum, i);
    if (i % 4 != kMember) {
      *last_at(room, of, i, kMember - (kMember > i % 4)) = last_of<kHalf>(sum, kRow, i);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int pair = i * 2 + kGroup, last = (i - kOwnPairs) * 4 + kMember;
    if (i < kOwnPairs && pair < kEach) own[i] = pair_of<kHalf>(sum, pair);
    if (i >= kOwnPairs && last < kEach) own[i] = last_of<kHalf>(sum, kRow, last);
  }
}
template <int kGroup, int kRow>
__device__ __forceinline__ void leave(const Sums& sum, const Summer& of, float4* room,
                                      float4 (&own)[kOwn]) {
  // The half must be known statically if only a part of the fragments is used.
  if (NEAR == 32 || of.half == 0) {
    leave<kGroup, kRow, 0>(sum, of, room, own);
  } else {
    leave<kGroup, kRow, 1>(sum, of, room, own);
  }
}

// Adds the block's sums, each warp its own vectors. `room` is shared memory that is free now.
__device__ __forceinline__ void sum_block(const Sums& sum, const Summer& of, float4* room,
                                          float4 (&own)[kOwn]) {
  switch (of.group * 2 + of.row) {
    case 0: leave<0, 0>(sum, of, room, own); break;
    case 1: leave<0, 1>(sum, of, room, own); break;
    case 2: leave<1, 0>(sum, of, room, own); break;
    default: leave<1, 1>(sum, of, room, own);
  }
  named_barrier_sync(1, kSummers);
#pragma unroll
  for (int i = 0; i < kOwnPairs; ++i) {
    const int index = i * 2 + of.group;
    if (index < kEach) add(own[i], *pair_at(room, of, index));
  }
#pragma unroll
  for (int i = kOwnPairs; i < kOwn; ++i) {
    const int index = (i - kOwnPairs) * 4 + of.group * 2 + of.row;
    if (index >= kEach) continue;
#pragma unroll
    for (int slot = 0; slot < 3; ++slot) add(own[i], *last_at(room, of, index, slot));
  }
}

// The result of one of a vector's four sums.
struct Result {
  int k, c;     // channels of the slice
  bool wanted;  // false if the channels are in two groups

  __device__ __forceinline__ Result(const HopperGroupedWeightArgs& args, const Vector& vector, int of) {
    const int lane = threadIdx.x & 31, high = of >> 1, half = vector.half;
    const int f = vector.of_tap + (NEAR == 32 ? 0 : NEAR == 16 ? half * 2 : half * 2 + high);
    c = half * 16 + high * 8 + lane / 4;
    k = f * 8 + lane % 4 * 2 + (of & 1);
    wanted = NEAR > 8 || args.group_channels == 8 || (lane >> 4) == (lane >> 1 & 1);
  }
};

// Stores the results of a vector, of the slice from channel `first` on.
template <class T>
__device__ __forceinline__ void put_vector(const HopperGroupedWeightArgs& args, int first,
                                           const Vector& vector, const float4& sum) {
  const Result result(args, vector, 0);
  const int of = NEAR == 8 ? args.group_channels : NEAR, k = first + result.k;
  const int group = NEAR == 8 && of == 4 ? k / 4 : k / NEAR, r = vector.tap / kTaps;
  const i64 at = group * args.w_stride[0] + (k - group * of) * args.w_stride[1] +
                 (result.c & (of - 1)) * args.w_stride[2] + r * args.w_stride[4] +
                 (vector.tap - r * kTaps) * args.w_stride[5];
  // Eight channels further: of x in the same group, or on both sides.
  const i64 high = NEAR == 8 ? (of == 4 ? 2 : 1) * args.w_stride[0] : 8 * args.w_stride[2];
  const int log = args.wide ? 2 : 1;  // log2 of an element's bytes
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!result.wanted || k + (NEAR == 8 ? i / 2 * 8 : 0) >= args.channels) continue;
    const i64 to = (at + i % 2 * args.w_stride[1] + i / 2 * high) << log;
    float done = sums[i] * args.alpha;
    if (args.accumulate != nullptr) {
      const char* const more = static_cast<const char*>(args.accumulate) + to;
      done += args.beta * (args.wide ? *reinterpret_cast<const float*>(more)
                                     : widen(*reinterpret_cast<const T*>(more)));
    }
    char* const w = static_cast<char*>(args.w) + to;
    if (args.wide) {
      *reinterpret_cast<float*>(w) = done;
    } else {
      *reinterpret_cast<T*>(w) = narrow<T>(done);
    }
  }
}

// ---- The blocks of a slice reduce their partial sums, each a part of the vectors, in order of shares.
// They synchronize at a word of the slice (core/rendezvous.cuh).

// Adds vectors of all shares; several vectors of several shares are loaded at once.
template <class T, int kTogether, int kShares>
__device__ __forceinline__ void add_shares(const HopperGroupedWeightArgs& args,
                                           const float4* partials, int shares, int first, int warp,
                                           const ReducerRank& met) {
  const int lane = threadIdx.x & 31, apart = met.blocks * kSumWarps;
#pragma unroll 1
  for (int row = met.rank + met.blocks * warp; row < kVectors / 32; row += apart * kTogether) {
    float4 sum[kTogether] = {};
    const float4* from = partials + row * 32 + lane;
#pragma unroll 1
    for (int share = 0; share < shares; share += kShares, from += kShares * kVectors) {
      add_splits<kTogether, kShares>(
          from, apart * 32, kVectors,
          [&](int i, int j) { return share + i < shares && row + j * apart < kVectors / 32; }, sum);
    }
    // Not unrolled: instruction cache misses would cost more.
    int now = row;
#pragma unroll 1
    for (int j = 0; j < kTogether && now < kVectors / 32; ++j, now += apart) {
      const Vector vector(Summer(now / kOwn), now % kOwn);
      if (vector.is_there) put_vector<T>(args, first, vector, sum[0]);
#pragma unroll
      for (int i = 1; i < kTogether; ++i) sum[i - 1] = sum[i];
    }
  }
}

// All consumer threads: reduces blocks' sums to the slice's.
template <class T>
__device__ __forceinline__ void sum_slice(const HopperGroupedWeightArgs& args, int slice, int share,
                                          int shares, int first, int warp, u32 begun,
                                          const float4 (&own)[kOwn]) {
  __shared__ ReducerRank shared_met;
  const int lane = threadIdx.x & 31;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(slice) * shares * kVectors;
  float4* const to = partials + share * kVectors + warp * kOwn * 32 + lane;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) to[i * 32] = own[i];
  u32* const word = args.met + slice;
  named_barrier_sync(1, kSummers);
  if (threadIdx.x == 0) shared_met = shares == 1 ? ReducerRank{0, 1} : rendezvous_meet(word, begun, shares);
  named_barrier_sync(1, kSummers);
  const ReducerRank met = shared_met;
  if (met.blocks == 0) return;
  if (shares <= 4) {
    add_shares<T, 3, 4>(args, partials, shares, first, warp, met);
  } else {
    add_shares<T, 1, 16>(args, partials, shares, first, warp, met);
  }
  if (threadIdx.x == 0 && shares > 1) rendezvous_leave(word, met);
}

}  // namespace convgrad

// A dense convolution on Hopper, forward or the gradient of the input, as an implicit GEMM:
// M = pixels of one phase of the result (over the batch), N = the result's channels,
// K = channels of the source in chunks of a row of shared memory (outer), taps (inner).
// The host's side is hopper_gather.py; phases and taps are those of dense_axes.py: along each
// dimension, result position y0 + m*y_step (m in [0, count)) of a phase meets, at its tap j in
// [0, taps), source position x0 + m*x_step + j*x_tap and weight tap r0 + j*r_step.
//
// Grid: one block a multiprocessor, in clusters of CLUSTER_M x CLUSTER_N x SPLIT; each cluster takes
// one tile of every turn over all phases (hopper_gather.cuh). Block: a tile of BM pixels x BN
// channels. One warp starts the copies: the pixels of a step by im2col, zeros outside the source, and
// the weights. Blocks of a cluster that share pixels, or weights, copy a part each to all; or else
// SPLIT of them take a part of one tile's steps each, and its rows are divided among them when they
// add these up: then a cluster has one tile, and a reduction is cut in the same places for all sums
// of a launch. CONSUMERS warpgroups multiply, each BM / CONSUMERS pixels. They meet
// in a ring of STAGES steps. Taps that no pixel of a tile meets are left out.
// Dynamic shared memory: 1,024 bytes to align it by; the ring, each stage BM rows of 128 bytes and as
// many bytes of weights as BN rows, or the next multiple of 64 of them; 8 KB for each warpgroup's results on their way; two barriers a
// stage.
// Relies on its launcher for tensor maps of sources whose strides are multiples of 16 bytes; one
// group. The weight's rows run along the source's channels (ACROSS 0), or along the
// result's (ACROSS 1), 16-bit types alone. Needs sm_90a.
// Deterministic: one order of additions for each result, whatever the tile (but for SPLIT). Positions outside the
// source enter as zeros, which times an infinity is NaN: results that are not finite are summed again
// over the positions inside.
// Index limits: pixels of a phase and tiles below 2^31; 64-bit offsets.
#include "hopper_result.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kRowBytes = 128, kDepth = kRowBytes / static_cast<int>(sizeof(T));
constexpr int kDeep = 32 / static_cast<int>(sizeof(T));  // of one product
constexpr int kProducts = kDepth / kDeep;
// Weights come in boxes of 64 rows, or columns: the last of an odd width is not all used.
constexpr int kBoxColumns = 64, kBoxes = (BN + kBoxColumns - 1) / kBoxColumns;
constexpr u32 kABytes = BM * kRowBytes, kBBytes = kBoxes * kBoxColumns * kRowBytes;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr u32 kLoadedBytes = kABytes + (ACROSS ? kBBytes : BN * kRowBytes);
constexpr int kRowsOf = BM / CONSUMERS;  // of a warpgroup
constexpr int kParts = kRowsOf / 64, kFragments = BN / 8;
constexpr Major kWeights = ACROSS ? kAlongMn : kAlongK;
// Of the weights across: how far apart boxes lie.
constexpr int kBoxBytes = kDepth * kRowBytes;

constexpr int kSharing = CLUSTER_M * CLUSTER_N;  // blocks that copy for each other
// Of a step, what one block copies: to all that share it.
constexpr int kOwnPixels = BM / CLUSTER_N, kOwnChannels = BN / CLUSTER_M;
// Of weights across: whole boxes, or where they do not come out even, a part of each.
constexpr bool kWholeBoxes = kBoxes % CLUSTER_M == 0;
constexpr int kOwnBoxes = kWholeBoxes ? kBoxes / CLUSTER_M : kBoxes;
constexpr int kOwnDepth = kWholeBoxes ? kDepth : kDepth / CLUSTER_M;

static_assert(BM % (64 * CONSUMERS) == 0 && kOwnPixels % 8 == 0, "whole boxes for each");
static_assert(SPLIT == 1 || kSharing == 1, "blocks of a cluster share operands, or a reduction");
static_assert(BN % 32 == 0 && (ACROSS || kOwnChannels % 8 == 0), "whole boxes for each");

struct Place {
  u32 ring, full, empty;  // shared addresses
  int row, column;        // of the block in its cluster: its pixels and its channels
  int part;               // of the reduction

  // The steps of a tile that are this block's: from the first to before the second.
  __device__ __forceinline__ int share(int steps, int boundary) const {
    return SPLIT > 1 ? steps * (part + boundary) / SPLIT : steps * boundary;
  }

  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  __device__ __forceinline__ u32 filled(int i) const { return full + i * 8; }
  __device__ __forceinline__ u32 read(int i) const { return empty + i * 8; }
};

// A block's (or a cluster's) places in the schedule: one of every turn, forwards and backwards by
// turns, so that who had a long tile first gets a short one next.
struct Turns {
  int own, others, all;

  __device__ __forceinline__ int count() const { return (all + others - 1) / others; }
  __device__ __forceinline__ int place(int turn) const {
    return turn * others + (turn & 1 ? others - 1 - own : own);
  }
};

// The next stage of the ring, and the parity of the phase that it is in.
__device__ __forceinline__ void step(int& stage, u32& parity) {
  if (++stage == STAGES) stage = 0, parity ^= 1;
}

template <int kDims>
__device__ __forceinline__ void load_shared_pixels(u32 blocks, u32 to, const TensorMap& map,
                                                   u32 barrier, const int (&at)[kDims],
                                                   const int (&by)[kDims - 2]) {
  if constexpr (CLUSTER_N > 1) {
    load_pixels_to<kDims>(blocks, to, map, barrier, at, by);
  } else {
    load_pixels<kDims>(to, map, barrier, at, by);
  }
}

// Starts the copies of this block's part of one step's pixels, to the blocks of its row.
__device__ __forceinline__ void load_source(const HopperGatherArgs& args, const Place& place,
                                            const GatherPhase& phase, const TensorMap& map,
                                            const PixelAt& pixel, u32 to, u32 barrier, int channel,
                                            int j0, int j1, int j2) {
  const bool images_first = args.images_first;
  u32 blocks = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER_N; ++i) blocks |= 1u << (i * CLUSTER_M);
  blocks <<= place.row;
  to += place.column * kOwnPixels * kRowBytes;
  const int tap[3] = {j0, j1, j2};
  int at[3], by[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const GatherAxis& axis = phase.axis[d];
    at[d] = axis.low + position(pixel, d, images_first) * args.x_step[d];
    by[d] = axis.x0 + tap[d] * args.x_tap[d] - axis.low;
  }
  const int n = image(pixel, images_first);
  // Of the slowest dimension there are no corners: what moves it is part of where it is.
  switch (args.dims + (images_first ? 3 : 0)) {
    case 3:
      load_shared_pixels<3>(blocks, to, map, barrier, {channel, at[2], n}, {by[2]});
      break;
    case 4:
      load_shared_pixels<4>(blocks, to, map, barrier, {channel, at[2], at[1], n}, {by[2], by[1]});
      break;
    case 5:
      load_shared_pixels<5>(blocks, to, map, barrier, {channel, at[2], at[1], at[0], n},
                            {by[2], by[1], by[0]});
      break;
    case 6:
      load_shared_pixels<3>(blocks, to, map, barrier, {channel, n, at[2] + by[2]}, {0});
      break;
    case 7:
      load_shared_pixels<4>(blocks, to, map, barrier, {channel, n, at[2], at[1] + by[1]},
                            {0, by[2]});
      break;
    default:
      load_shared_pixels<5>(blocks, to, map, barrier, {channel, n, at[2], at[1], at[0] + by[0]},
                            {0, by[2], by[1]});
  }
}

// Starts the copies of this block's part of one step's weights, to the blocks of its column.
__device__ __forceinline__ void load_weight(const TensorMap& map, const Place& place, u32 to,
                                            u32 barrier, int first_channel, int channel, int t,
                                            int r, int s) {
  const u32 blocks = ((1u << CLUSTER_M) - 1) << (place.column * CLUSTER_M);
  auto load = [&](u32 there, const int (&at)[5]) {
    if constexpr (CLUSTER_M > 1) {
      load_tile_to<5>(blocks, there, map, barrier, at, kKeepMost);
    } else {
      load_tile<5>(there, map, barrier, at, kKeepMost);
    }
  };
  if constexpr (ACROSS) {
#pragma unroll
    for (int i = 0; i < kOwnBoxes; ++i) {
      const int box = kWholeBoxes ? place.row * kOwnBoxes + i : i;
      const int own = kWholeBoxes ? 0 : place.row * kOwnDepth;
      load(to + box * kBoxBytes + own * kRowBytes,
           {first_channel + box * kBoxColumns, s, r, t, channel + own});
    }
  } else {
    const int own = place.row * kOwnChannels;
    load(to + own * kRowBytes, {channel, s, r, t, first_channel + own});
  }
}

__device__ __forceinline__ void produce(const HopperGatherArgs& args, const Place& place,
                                        const Turns& turns) {
  int stage = 0;
  u32 parity = 1;
  for (int turn = 0; turn < turns.count(); ++turn) {
    GatherTile tile;
    if (!tile_at<BM * CLUSTER_M, BN * CLUSTER_N>(args, turns.place(turn), turns.all, tile)) {
      continue;
    }
    const KeptTaps kept = kept_taps<BM * CLUSTER_M>(args, tile);
    const GatherPhase& phase = args.phase[tile.phase];
    const TensorMap& source = args.source[tile.phase];
    const PixelAt pixel =
        pixel_at(phase, tile.first_pixel + place.row * BM + place.column * kOwnPixels);
    const int steps = kept.count() * ((args.in_channels + kDepth - 1) / kDepth);
    const int first = place.share(steps, 0), end = place.share(steps, 1);
    int index = 0;
    for (int channel = 0; channel < args.in_channels; channel += kDepth) {
      for (int t = next_bit(kept.axis[0], -1); t < 32; t = next_bit(kept.axis[0], t)) {
        for (int r = next_bit(kept.axis[1], -1); r < 32; r = next_bit(kept.axis[1], r)) {
          for (int s = next_bit(kept.axis[2], -1); s < 32; s = next_bit(kept.axis[2], s)) {
            if constexpr (SPLIT > 1) {
              const bool own = first <= index && index < end;
              ++index;
              if (!own) continue;
            }
            wait_for(place.read(stage), parity);
            const u32 barrier = place.filled(stage), to = place.stage(stage);
            arrive_expecting(barrier, kLoadedBytes);
            load_source(args, place, phase, source, pixel, to, barrier, channel, t, r, s);
            load_weight(args.weight, place, to + kABytes, barrier,
                        tile.first_channel + place.column * BN, channel,
                        phase.axis[0].r0 + t * args.r_step[0],
                        phase.axis[1].r0 + r * args.r_step[1],
                        phase.axis[2].r0 + s * args.r_step[2]);
            step(stage, parity);
          }
        }
      }
    }
  }
}

// Starts the products of one step.
__device__ __forceinline__ void multiply_step(float (&sum)[kParts][kFragments][4], u32 rows,
                                              u32 weights, int add) {
  auto one = [&](int i, int adds) {
    const u64 b = ACROSS ? advance(operand_along_mn<128>(weights, kBoxBytes), i * kDeep * kRowBytes)
                         : advance(operand_along_k<128>(weights), i * 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const u64 a = advance(operand_along_k<128>(rows + part * 64 * kRowBytes), i * 32);
      multiply<T, kAlongK, kWeights>(sum[part], a, b, adds);
    }
  };
#pragma unroll
  for (int i = 0; i < kProducts; ++i) one(i, i > 0 ? 1 : add);
}

__device__ __forceinline__ void consume(const HopperGatherArgs& args, const Place& place,
                                        const Turns& turns, u32 staging) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  int stage = 0;
  u32 parity = 0;
  auto release = [&](int which) {
    if constexpr (kSharing > 1) {
      // Whoever copies to this block: those of its row and of its column.
      const bool shares = lane / CLUSTER_M == place.column || lane % CLUSTER_M == place.row;
      if (lane < kSharing && shares) arrive_at(place.read(which), lane);
    } else {
      if (lane == 0) arrive(place.read(which));
    }
  };
  const int chunks = (args.in_channels + kDepth - 1) / kDepth;
  int turn = 0, steps = 0;
  GatherTile next;
  auto find_next = [&]() {
    while (turn < turns.count()) {
      if (!tile_at<BM * CLUSTER_M, BN * CLUSTER_N>(args, turns.place(turn++), turns.all, next)) {
        continue;
      }
      const int all = kept_taps<BM * CLUSTER_M>(args, next).count() * chunks;
      steps = place.share(all, 1) - place.share(all, 0);
      return true;
    }
    return false;
  };
  bool more = find_next();
  while (more) {
    const GatherTile tile = {next.phase, next.first_pixel + place.row * BM + warpgroup * kRowsOf,
                             next.first_channel + place.column * BN};
    float sum[kParts][kFragments][4];
    if (steps == 0) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kFragments; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[part][j][e] = 0.0f;
        }
      }
    }
    int before = 0;  // the stage whose products are under way
    for (int i = 0; i < steps; ++i) {
      wait_for(place.filled(stage), parity);
      begin_products();
      const u32 rows = place.stage(stage) + warpgroup * kRowsOf * kRowBytes;
      multiply_step(sum, rows, place.stage(stage) + kABytes, i > 0);
      commit_products();
      wait_products<1>();
      if (i > 0) release(before);
      before = stage;
      step(stage, parity);
    }
    const bool any = steps > 0;
    more = find_next();  // while the last products run
    wait_products<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold_sums(sum[part]);
    if (any) release(before);

    const Results<T, kParts, kFragments> results(args, tile, staging + warpgroup * kStagingBytes);
    if constexpr (SPLIT > 1) {
      // The ring's place is theirs once no product reads it.
      wait_at(1, CONSUMERS * 128);
      keep_sums<BN>(place.ring, warpgroup * kRowsOf, sum);
    } else {
      results.store(sum);
    }
  }
  if constexpr (SPLIT > 1) {
    synchronize_cluster();
    GatherTile tile;
    if (!tile_at<BM, BN>(args, turns.place(0), turns.all, tile)) return;
    const Results<T, kParts, kFragments> results(args, tile, staging);
    results.template store_joined<BM, BN, SPLIT, CONSUMERS * 128>(place.ring, place.part);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        hopper_gather(const __grid_constant__ HopperGatherArgs args) {
  extern __shared__ uint4 shared[];
  Place place;
  place.ring = (shared_address(shared) + 1023) & ~1023u;
  const u32 staging = place.ring + STAGES * kStageBytes;
  place.full = staging + CONSUMERS * kStagingBytes;
  place.empty = place.full + STAGES * 8;
  const int rank = CLUSTER > 1 ? static_cast<int>(block_of_cluster()) : 0;
  place.row = rank % CLUSTER_M, place.column = rank / CLUSTER_M % CLUSTER_N;
  place.part = rank / kSharing;
  const Turns turns = {static_cast<int>(blockIdx.x) / CLUSTER,
                       static_cast<int>(gridDim.x) / CLUSTER, args.rounds * args.slots};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      make_barrier(place.filled(i), 1);
      make_barrier(place.read(i), (CLUSTER_M + CLUSTER_N - 1) * CONSUMERS * 4);
    }
    publish_barriers();
  }
  if constexpr (kSharing > 1) {
    synchronize_cluster();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < 128) {
    leave_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32 && elected()) {
      produce(args, place, turns);
    }
    if constexpr (SPLIT > 1) {
      __syncwarp();
      synchronize_cluster();
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(args, place, turns, staging);
  }
  // A block's shared memory stays until others of its cluster have been there for the last time.
  if constexpr (CLUSTER > 1) {
    __syncwarp();
    synchronize_cluster();
  }
}

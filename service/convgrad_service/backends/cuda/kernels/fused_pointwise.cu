// Two pointwise convolutions, one after the other, with the intermediate kept on the chip:
//   y[p, k] = activation1(bias1[k] + sum_c w1[k, c] * m[p, c]),
//   m[p, c] = activation0(bias0[c] + sum_i w0[c, i] * x[p, i]), rounded once.
// GEMM view of both: M = output channels, N = pixels, K = channels. The host's side is
// fused_pointwise.py.
//
// Block: tiles of PIXELS pixels, one after another, in steps of 64 channels: first passes of kOutputs
// channels of the intermediate, which stays in shared memory, then passes of kOutputs outputs over it.
// Dynamic shared memory, from the first multiple of 1024 on: a ring of `stages` pairs of a tile of
// weights and a tile of x, then the intermediate's chunks.
// Relies on its launcher for the grid (blocks, each taking every gridDim.x-th tile; parts of the
// output channels, each of which computes the intermediate again) and for pixels that are the same
// distance apart all through x, and through y, with channels side by side, x's and the weights' in
// whole aligned 16-byte chunks.
// Deterministic: one order of additions for each result.
// Index limits: pixels below 2^31; 64-bit offsets.
#include "fused_product.cuh"

using namespace convgrad;

struct PointwiseArgs {
  const void* x;
  const void* w0;     // rows of input channels
  const void* bias0;  // one for each channel of the intermediate, or null
  const void* w1;     // rows of the intermediate's channels
  const void* bias1;  // one for each output channel, or null
  void* y;
  i64 x_stride;  // of pixels, in elements
  i64 y_stride;
  i64 w0_stride;  // of rows
  i64 w1_stride;
  int inputs;
  int middles;
  int outputs;
  int passes;  // over the intermediate, for a block
  int stages;
  int pixels;
  int tiles;
  int activation0;
  int activation1;
  int wide_stores;  // the outputs are stored in aligned groups of 4, or of 2
};

constexpr int kStageBytes = kWeightBytes + kMiddleBytes;

// Starts the copies of one chunk of a tile of x.
__device__ __forceinline__ void copy_inputs(const PointwiseArgs& args, u32 to, int tile, int chunk) {
  const int vector = threadIdx.x % 8, channel = chunk * kChunk + vector * 8;
  const Element* const x = static_cast<const Element*>(args.x) + channel;
#pragma unroll
  for (int row = threadIdx.x / 8; row < kPixels; row += kThreads / 8) {
    const i64 pixel = static_cast<i64>(tile) * kPixels + row;
    const bool there = pixel < args.pixels && channel < args.inputs;
    copy_chunk(to + row * kRowBytes + (vector ^ (row & 7)) * 16,
               there ? x + pixel * args.x_stride : args.x, there);
  }
}

// Stores the intermediate's channels that this thread ends with, from `channel` on.
__device__ __forceinline__ void keep_sums(const Sums& sums, unsigned char* middle, int channel,
                                          int chunks) {
  if (channel / kChunk >= chunks) return;
  const int lane = threadIdx.x & 31, vector = channel % kChunk / 8;
  unsigned char* const to = middle + channel / kChunk * kMiddleBytes + channel % 8 * 2;
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int row = j * 8 + lane % 4 * 2 + column;
      unsigned char* const at = to + row * kRowBytes + (vector ^ (row & 7)) * 16;
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        reinterpret_cast<u32*>(at)[k] =
            narrow_two<Element>(sums[k][j][column], sums[k][j][2 + column]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    fused_pointwise(const __grid_constant__ PointwiseArgs args) {
  extern __shared__ uint4 memory[];
  __shared__ i64 places[kPixels];
  const u32 start = shared_address(memory), skip = (1024 - start % 1024) % 1024;
  const u32 ring = start + skip, middle = ring + args.stages * kStageBytes;
  unsigned char* const middle_at =
      reinterpret_cast<unsigned char*>(memory) + skip + args.stages * kStageBytes;

  const int chunks0 = (args.inputs + kChunk - 1) / kChunk;
  const int chunks1 = (args.middles + kChunk - 1) / kChunk;
  const int passes0 = (args.middles + kOutputs - 1) / kOutputs;
  const int first_output = blockIdx.y * args.passes * kOutputs;
  const int tiles = (args.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                    static_cast<int>(gridDim.x);
  const int steps = tiles * (passes0 * chunks0 + args.passes * chunks1);
  auto tile_of = [&](int i) { return static_cast<int>(blockIdx.x + i * gridDim.x); };

  // Where a step is: of the first convolution or the second, in which pass and chunk.
  struct Place {
    int tile = 0, second = 0, pass = 0, chunk = 0, stage = 0;
  };
  auto advance = [&](Place& place) {
    if (++place.stage == args.stages) place.stage = 0;
    if (++place.chunk < (place.second ? chunks1 : chunks0)) return;
    place.chunk = 0;
    if (++place.pass < (place.second ? args.passes : passes0)) return;
    place.pass = 0;
    if (place.second) ++place.tile;
    place.second ^= 1;
  };
  Place copied;
  auto copy_next = [&] {
    const u32 to = ring + copied.stage * kStageBytes;
    if (copied.second) {
      copy_weights(args.w1, args.w1_stride, args.middles, args.outputs,
                   first_output + copied.pass * kOutputs, to, copied.chunk);
    } else {
      copy_weights(args.w0, args.w0_stride, args.inputs, args.middles, copied.pass * kOutputs, to,
                   copied.chunk);
      copy_inputs(args, to + kWeightBytes, tile_of(copied.tile), copied.chunk);
    }
    advance(copied);
  };
  // What was copied has landed, and what was stored is there, for everyone.
  auto meet = [&] {
    if (args.stages > 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
#if WARPGROUP
    publish_shared();
#endif
    __syncthreads();
  };

  for (int i = 0; i < args.stages - 1; ++i) {
    if (i < steps) copy_next();
    commit_copies();
  }
  meet();

  Product product(ring, ring);
  Sums sums;
  Place now;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step + args.stages - 1 < steps) copy_next();
    commit_copies();
    const int left = (now.second ? args.middles : args.inputs) - now.chunk * kChunk;
    const u32 at = now.stage * kStageBytes;
    const u32 other = now.second ? middle - ring + now.chunk * kMiddleBytes : at + kWeightBytes;
    product.start(sums, at, other, (left + kDepth - 1) / kDepth, now.chunk == 0);
    const int tile = tile_of(now.tile);
    for (int i = threadIdx.x; now.second && now.pass == 0 && now.chunk == 0 && i < kPixels;
         i += kThreads) {
      const i64 pixel = static_cast<i64>(tile) * kPixels + i;
      places[i] = pixel < args.pixels ? pixel * args.y_stride : -1;
    }
    product.finish(sums);
    if (now.chunk == (now.second ? chunks1 : chunks0) - 1) {
      const int channel = now.pass * kOutputs + own_output();
      if (now.second) {
        if (chunks1 == 1) __syncthreads();  // the places
        finish_sums(sums, args.bias1, args.activation1, first_output + channel, args.outputs);
        store_sums(sums, args.y, places, first_output + channel, args.outputs,
                   args.wide_stores != 0);
      } else {
        finish_sums(sums, args.bias0, args.activation0, channel, args.middles);
        keep_sums(sums, middle_at, channel, chunks1);
      }
    }
    advance(now);
    meet();
  }
}

// dgrad of a first layer (few input channels) by groups of positions (cp.async, mma.sync). Launched by
// first_groups.py.
//
//   x[n, c, i] = sum over k and taps r with an o: y[n, k, o] * w[k, c, r], i = o*stride + r - pad.
// M = groups of positions along W, N = a group's positions x channels, K = steps along W x channels of y; see
// first_groups.cuh. A row of y contributes to several rows of x, whose accumulators stay in registers until
// y has advanced past them; so a row of y is read from global memory once, and from shared memory once per
// shift (TAPS).
//
// Grid: segments of groups (fastest), segments of rows, planes d, images n.
// Block: one segment; walks down the rows of y that contribute. Warps: residues of x's rows modulo the stride x
//   `warp_groups` along W, each with 32 groups and its residue's weights in registers: SLOTS kernel rows x
//   TAPS x STEPS steps of 16 channels, for TILES tiles of 8 columns.
// Shared memory (dynamic): STAGES rows of y, with zeros outside, and the weights; counted by first_groups.py.
// Preconditions: dilation 1, one group, one tap along D, 16-bit types, channels of y contiguous in whole
//   16-byte chunks.
// Determinism: one order of additions per result, however x is divided among blocks.
// Limits: element offsets along a row of x and y below 2^31; 64-bit elsewhere.
#include "conv/first_groups.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kDepth = TAPS * STEPS;
// The pitch of positions, which avoids bank conflicts between eight of them.
constexpr u32 kPitch = (2 * STEPS + 1) * 16;

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    first_groups(const __grid_constant__ FirstGroupsArgs args) {
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5;
  const int stride_h = args.stride[1], stride_w = args.stride[2];
  const int remainder = warp / args.warp_groups;
  const int warp_group = (warp - remainder * args.warp_groups) * 32;

  const Share share(args);
  const int first_group = share.segment * args.warp_groups * 32;
  const int q0 = first_group * args.hop + args.first_tap;

  const u32 stage_bytes = args.positions * kPitch;
  T* const weights = reinterpret_cast<T*>(base + STAGES * stage_bytes);
  const u32 ring = shared_address(base);

  // Each thread copies one column of chunks of y.
  const int copy_row = thread / args.y_chunks, copy_at = thread - copy_row * args.y_chunks;
  const int copy_rows = threads / args.y_chunks;
  const T* const y = static_cast<const T*>(args.y);
  const T* const from0 = y + share.n * args.y_stride[0] + share.z * args.y_stride[3] +
                         (q0 + copy_row) * args.y_stride[5] + copy_at * 8;
  int put_p = share.real0;
  const auto copy_row_of_y = [&](int stage) {
    if (put_p <= share.real1) {
      if (copy_row < copy_rows) {
        const T* from = from0 + put_p * args.y_stride[4];
        u32 to = ring + stage * stage_bytes + copy_row * kPitch + copy_at * 16;
        const u32 end = ring + stage * stage_bytes + args.positions * kPitch;
#pragma unroll 2
        for (int q = q0 + copy_row; to < end; q += copy_rows) {
          cp_async_zfill(to, from, static_cast<u32>(q) < static_cast<u32>(args.y_size[2]));
          from += copy_rows * args.y_stride[5];
          to += copy_rows * kPitch;
        }
      }
      ++put_p;
    }
    cp_async_commit();
  };
  for (int i = 0; i < STAGES - 1; ++i) copy_row_of_y(i);

  // Zero-fill past the last channel, up to a whole k-step.
  for (int i = thread; i < STAGES * args.positions; i += threads) {
    for (int chunk = args.y_chunks; chunk < 2 * STEPS; ++chunk) {
      *reinterpret_cast<uint4*>(base + i * kPitch + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  // Copies the weights as (K, R, S, C), which is their usual layout.
  const T* const w = static_cast<const T*>(args.w);
  const int in_row = args.kernel[2] * args.channels, in_channel = args.kernel[1] * in_row;
  const int all_weights = args.y_channels * in_channel;
  if (args.flat_weights) {
    for (int i = thread * 8; i < all_weights; i += threads * 8) {
      if (i + 8 <= all_weights) {
        cp_async<16>(shared_address(weights + i), w + i);
      } else {  // the last, partial chunk
        for (int j = i; j < all_weights; ++j) weights[j] = w[j];
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
  } else {
#pragma unroll 4
    for (int i = thread; i < all_weights; i += threads) {
      const int k = i / in_channel, in_k = i - k * in_channel;
      const int r = in_k / in_row, in_r = in_k - r * in_row;
      const int s = in_r / args.channels, c = in_r - s * args.channels;
      weights[i] = w[k * args.w_stride[1] + c * args.w_stride[2] + r * args.w_stride[4] +
                     s * args.w_stride[5]];
    }
  }
  __syncthreads();

  // The kernel rows of this warp's residue: slot j is row remainder + j*stride. In a kernel row,
  // column (b, c) at step t along W is at offset (b + pad - (first_tap + t)*stride)*C + c.
  u32 b[SLOTS][kDepth][TILES][2];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int column = tile * 8 + (lane >> 2);
#pragma unroll
    for (int e = 0; e < kDepth; ++e) {
      const int at =
          column + (args.pad[2] - (args.first_tap + e / STEPS) * stride_w) * args.channels;
      const bool there = column < args.group * args.channels && at >= 0 && at < in_row;
      const int k = e % STEPS * 16 + (lane & 3) * 2;
      const auto weight = [&](int r, int more) {
        const bool real = there && r < args.kernel[1] && k + more < args.y_channels;
        return real ? static_cast<u32>(weights[(k + more) * in_channel + r * in_row + at].bits) : 0u;
      };
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const int r = remainder + slot * stride_h;
        b[slot][e][tile][0] = weight(r, 0) | weight(r, 1) << 16;
        b[slot][e][tile][1] = weight(r, 8) | weight(r, 9) << 16;
      }
    }
  }
  const bool all_slots = remainder + (SLOTS - 1) * stride_h < args.kernel[1];

  float sum[2][SLOTS][TILES][4] = {};
  const u32 lane_at =
      ring + (warp_group + (lane & 15)) * args.hop * kPitch + (lane >> 4) * 16;
  const u32 further = 16 * args.hop * kPitch;  // offset of a warp's second tile from its first

  const i64 plane_at = share.n * args.x_stride[0] + share.d * args.x_stride[3];
  const int in_group = args.group * args.channels;  // columns that are not padding
  const int own_group = first_group + warp_group + (lane >> 2);
  const int own_column = (lane & 3) * 2, own_at = own_group * in_group + own_column;
  // A lane's accumulators of a finished row: for i below 8, those of group own_group + 8*(i / 2)
  // and column own_column + i % 2; then those of the next column tile.
  const auto sum_of = [&](int i) { return sum[i / 4 % 2][0][i / 8][i % 4]; };
  const auto write_row = [&](int h) {
    T* const x = static_cast<T*>(args.x) + (plane_at + h * args.x_stride[4]);
#pragma unroll
    for (int i = 0; i < 8 * TILES; i += 2) {
      const float first = sum_of(i), second = sum_of(i + 1);
      const int further_on = i / 2 % 4 * 8, column = i / 8 * 8;
      put_two(args, x, own_at + further_on * in_group + column, own_group + further_on,
              own_column + column, narrow_x2<T>(first, second));
    }
    if (args.plain) return;
#pragma unroll 1
    for (int i = 0; i < 8 * TILES; ++i) {
      float value = 0;
#pragma unroll
      for (int other = 0; other < 8 * TILES; ++other) value = other == i ? sum_of(other) : value;
      put_one<T>(args, share, h, own_group + i / 2 % 4 * 8, own_column + i / 8 * 8 + i % 2, value);
    }
  };

  // Multiplies a row of y by the weights of the first `count` slots.
  const auto multiply = [&](auto count, u32 from) {
    constexpr int kSlots = decltype(count)::value;
    u32 a[2][2][4];
    ldmatrix(a[0][0], from);
    ldmatrix(a[0][1], from + further);
#pragma unroll
    for (int e = 0; e < kDepth; ++e) {
      if (e + 1 < kDepth) {
        const u32 next = from + (e + 1) / STEPS * kPitch + (e + 1) % STEPS * 32;
        ldmatrix(a[(e + 1) & 1][0], next);
        ldmatrix(a[(e + 1) & 1][1], next + further);
      }
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            mma<T>(sum[m][slot][tile], a[e & 1][m], b[slot][e][tile][0], b[slot][e][tile][1]);
          }
        }
      }
    }
  };

  int stage = 0;
  for (int p = share.p0; p <= share.finish1; ++p) {
    if (p >= share.real0 && p <= share.real1) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      copy_row_of_y(stage == 0 ? STAGES - 1 : stage - 1);
      const u32 from = lane_at + stage * stage_bytes;
      if (all_slots) {
        multiply(Count<SLOTS>{}, from);
      } else {
        multiply(Count<SLOTS - 1>{}, from);
      }
      if (++stage == STAGES) stage = 0;
    }
    const int h = p * stride_h - args.pad[1] + remainder;
    if (p >= share.finish0 && h >= 0 && h < args.x_size[1]) write_row(h);
#pragma unroll
    for (int i = 0; i < 2 * SLOTS * TILES * 4; ++i) {
      const int e = i % 4, tile = i / 4 % TILES, m = i / (4 * TILES) % 2, slot = i / (8 * TILES);
      sum[m][slot][tile][e] = slot + 1 < SLOTS ? sum[m][slot + 1 < SLOTS ? slot + 1 : 0][tile][e]
                                               : 0.0f;
    }
  }
}

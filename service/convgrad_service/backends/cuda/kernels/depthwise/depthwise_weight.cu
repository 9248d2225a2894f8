// The gradient of a depthwise convolution's weight, of channels-last tensors with two or three spatial
// dimensions. Launched by depthwise_weight.py.
//
// w[c, t, r, s] = sum over (n, z, p, q) of y[n, z, p, q, c] *
//                 x[n, z*sd + t*dd - pd, p*STRIDE + r - ph, q*STRIDE + s - pw, c],
// then alpha and beta*accumulate, and one rounding.
// A warp owns LANES * VECTOR adjacent channels of 32 / LANES adjacent strips of COLUMNS columns, and
// walks down a chunk of rows. It copies each row into its own shared memory with asynchronous copies
// of PIECE bytes, zeros for missing pixels, some rows ahead of their use. So warps wait only for their
// own copies, and read pixels at compile-time offsets. Pixels and channels are multiples of PIECE: 16
// bytes, or 4 for an even number of 16-bit channels or any number of float32 ones.
// A warp computes such items one after another, and multiplies each row of x by the rows of y that meet
// it, which are in a ring of registers. A lane has the sums of KERNEL x KERNEL taps, a part of a plane
// of the kernel.
// Grid: blocks, channel tiles, parts of the kernel.
// Shared memory: STAGES rows of x and y per warp, later reused for the strips' sums, which
// depthwise_weight_sum.cuh adds. Deterministic.
// Preconditions: channels and strides in multiples of PIECE; an image's extent below 2^31
// elements; `arrived` being 0, and partials if there is more than one block. Padding is read as zeros.
#include "core/opaque.cuh"
#include "core/vectors.cuh"
#include "depthwise/depthwise_weight_args.cuh"
#include "depthwise/depthwise_weight_sum.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

// A plane's items are `groups` groups of adjacent strips, in `chunks` of `rows` rows.
struct DepthwiseWeightArgs : DepthwiseWeightVolume {
  int planes;  // of y, of all images
  int groups;
  int chunks;
  int rows;
  int kernel[2];
  int parts[2];
};

// A lane's part of copying rows of kColumns adjacent pixels of kChannels channels, kPiece bytes at a
// time.
template <class T, int kPiece, int kChannels, int kColumns>
struct RowCopier {
  static constexpr int kElements = kColumns * kChannels;
  static constexpr int kChunk = kPiece / sizeof(T);
  static constexpr int kChunks = kElements / kChunk;
  static constexpr int kCopies = (kChunks + 31) / 32;
  // With many small pieces, a lane has one address and a distance between its columns.
  static constexpr bool kMany = kPiece < 16;
  static constexpr int kColumnsApart = 32 * kChunk / kChannels;
  static_assert(!kMany || 32 * kChunk % kChannels == 0, "a lane keeps to its channels");

  const T* next[kMany ? 1 : kCopies];
  i64 pitch, apart;
  int row, rows;
  static_assert(kCopies <= 32, "a bit for each");
  u32 inside, target;
  int has_last;  // whether this lane has a chunk in the last round

  // Rows start at `row` and columns at `left`, which may be outside; `channel` is the
  // first one. `to` is the address of the first stage.
  __device__ __forceinline__ RowCopier(T* to, const T* plane, const i64 (&stride)[4], int row,
                                       int rows, int left, int columns, int channel, int channels,
                                       int lane)
      : pitch(stride[2]), apart(kColumnsApart * stride[3]), row(row), rows(rows), inside(0) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = lane + 32 * i;
      const int column = left + chunk * kChunk / kChannels;
      const int c = channel + chunk * kChunk % kChannels;
      const bool there = chunk < kChunks && column >= 0 && column < columns && c < channels;
      if constexpr (!kMany) {
        next[i] = opaque_pointer(plane + (row * stride[2] + (there ? column * stride[3] + c : 0)));
      } else if (i == 0) {
        next[0] = opaque_pointer(plane + (row * stride[2] + column * stride[3] + c));
      }
      inside |= static_cast<u32>(there) << i;
    }
    inside = opaque_value(inside);
    target = opaque_value(shared_address(to) + lane * kPiece);
    has_last = opaque_value(kChunks % 32 == 0 || lane + 32 * (kCopies - 1) < kChunks);
  }

  // Copies the next row to `offset_bytes` after the first stage.
  __device__ __forceinline__ void copy(int offset_bytes) {
    const bool exists = static_cast<u32>(row) < static_cast<u32>(rows);
    const T* from = next[0];
    // Otherwise the compiler would keep many conditions and distances in registers.
    const u32 here = kMany ? opaque_value(exists ? inside : 0) : inside;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i + 1 < kCopies || has_last) {
        cp_async<kPiece>(target + offset_bytes + i * 32 * kPiece, kMany ? from : next[kMany ? 0 : i],
                          (kMany || exists) && ((here >> i) & 1) ? kPiece : 0);
      }
      if constexpr (kMany) from = opaque_pointer(from + apart);
      if (!kMany || i == 0) next[kMany ? 0 : i] += pitch;
    }
    ++row;
  }
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Channels = Vector<T, VECTOR>;

constexpr int kChannels = LANES * VECTOR;
constexpr int kTaps = KERNEL * KERNEL;
constexpr int kSlots = (KERNEL + STRIDE - 1) / STRIDE;
// A step of code for each slot of the ring, or with ROLLED one for all, with the ring moved on.
constexpr int kTurn = ROLLED ? 1 : kSlots * STRIDE;
static_assert(!ROLLED || STRIDE == 1, "a row of y for each of x");
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL;
constexpr int kStrips = 32 / LANES;
constexpr int kColumnsX = (kStrips - 1) * COLUMNS * STRIDE + kRead;
constexpr int kColumnsY = kStrips * COLUMNS;
using CopierX = RowCopier<T, PIECE, kChannels, kColumnsX>;
using CopierY = RowCopier<T, PIECE, kChannels, kColumnsY>;
constexpr int kStage = CopierX::kElements + CopierY::kElements;
constexpr int kStageBytes = kStage * sizeof(T);
constexpr int kPixelBytes = kChannels * sizeof(T);
// Where sums of other blocks are received, behind all that is used until then.
constexpr int kStagesBytes = WARPS * STAGES * kStageBytes;
constexpr int kSumsBytes = WARPS * kStrips * kTaps * kChannels * sizeof(float);
constexpr int kReceivedAt = kStagesBytes > kSumsBytes ? kStagesBytes : kSumsBytes;
// Whether to skip rows at a chunk's edge that some or all taps do not need, which costs register moves.
constexpr bool kSkipTaps = KERNEL >= 5;

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise_weight(const __grid_constant__ DepthwiseWeightArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ u64 barrier;
  __shared__ bool last;
  const int thread = threadIdx.x;
  const int lane = thread % 32, warp = thread / 32;
  const int channel_tile = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const int first_channel = channel_tile * kChannels;
  const int strip = lane / LANES, own = lane % LANES * VECTOR;
  const int items = args.groups * args.chunks * args.planes;
  // The part of the kernel.
  const int down = blockIdx.z / args.parts[1], t = down / args.parts[0];
  const int first_r = (down - t * args.parts[0]) * KERNEL;
  const int first_s = (blockIdx.z - down * args.parts[1]) * KERNEL;
  T* const all_stages = reinterpret_cast<T*>(shared);
  const int stages = warp * STAGES * kStage;
  const int first_stage =
      static_cast<int>(__cvta_generic_to_shared(all_stages)) + stages * sizeof(T);
  const int own_x =
      opaque_value(first_stage + (strip * COLUMNS * STRIDE * kChannels + own) * sizeof(T));
  const int own_y = opaque_value(
      first_stage + (CopierX::kElements + strip * COLUMNS * kChannels + own) * sizeof(T));
  const int steps = (args.rows - 1) * STRIDE + KERNEL;

  constexpr int kUnits = WARPS * kStrips, kPart = kTaps * kChannels;
  float4* const unit_sums = reinterpret_cast<float4*>(shared);
  const BlockSums<WARPS * 32> block_sums(unit_sums, reinterpret_cast<float4*>(shared + kReceivedAt),
                                         &barrier, kUnits, kPart / 4, block, blocks);
  block_sums.begin();

  float sums[KERNEL][KERNEL][VECTOR] = {};
  for (int item = block * WARPS + warp; item < items; item += blocks * WARPS) {
    const int above = item / args.groups, plane = above / args.chunks;
    const int n = plane / args.y_size[0], z = plane - n * args.y_size[0];
    const int d = z * args.stride[0] + t * args.dilation[0] - args.pad[0];
    if (static_cast<u32>(d) >= static_cast<u32>(args.x_size[0])) continue;
    const int first_row = (above - plane * args.chunks) * args.rows;
    const int first_column = (item - above * args.groups) * kColumnsY;
    const int top = first_row * STRIDE - args.pad[1] + first_r;
    const int y_end = min(args.y_size[1], first_row + args.rows);
    const i64 x_plane = n * args.x_stride[0] + d * args.x_stride[1];
    const i64 y_plane = n * args.y_stride[0] + z * args.y_stride[1];
    CopierX x(all_stages + stages, static_cast<const T*>(args.x) + x_plane, args.x_stride, top,
              args.x_size[1], first_column * STRIDE - args.pad[2] + first_s, args.x_size[2],
              first_channel, args.channels, lane);
    CopierY y(all_stages + stages + CopierX::kElements, static_cast<const T*>(args.y) + y_plane,
              args.y_stride, first_row, y_end, first_column, args.y_size[2], first_channel,
              args.channels, lane);
    const auto fetch = [&](int step) {
      if (step < steps) {
        const int offset = step % STAGES * kStageBytes;
        x.copy(offset);
        if (STRIDE == 1 || step % STRIDE == 0) y.copy(offset);
      }
      cp_async_commit();
    };
    __syncwarp();  // the previous item is no longer read
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);

    float ring[kSlots][COLUMNS][VECTOR] = {};
    for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        const int step = turn + j;
        if (step < steps) {
          cp_async_wait<STAGES - 2>();
          __syncwarp();
          fetch(step + STAGES - 1);
          const int stage = step % STAGES * kStageBytes;
          if constexpr (ROLLED) {
#pragma unroll
            for (int slot = kSlots - 1; slot > 0; --slot) {
#pragma unroll
              for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) ring[slot][i][v] = ring[slot - 1][i][v];
              }
            }
          }
          if (j % STRIDE == 0) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
              Channels read;
              ld_shared(own_y + stage + i * kPixelBytes, read.raw);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) ring[j / STRIDE][i][v] = widen(read.at[v]);
            }
          }
          const int h = top + step;
          if (!kSkipTaps || (h >= 0 && h < args.x_size[1])) {
            float row[kRead][VECTOR];
#pragma unroll
            for (int i = 0; i < kRead; ++i) {
              Channels read;
              ld_shared(own_x + stage + i * kPixelBytes, read.raw);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) row[i][v] = widen(read.at[v]);
            }
#pragma unroll
            for (int r = 0; r < KERNEL; ++r) {
              if (positive_mod(j - r, STRIDE) != 0) continue;
              const int slot = ROLLED ? r : positive_mod(j - r, kTurn) / STRIDE;
              if (kSkipTaps && (step < r || step - r > (args.rows - 1) * STRIDE)) continue;
#pragma unroll
              for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
                  for (int v = 0; v < VECTOR; ++v) {
                    sums[r][s][v] += row[i * STRIDE + s][v] * ring[slot][i][v];
                  }
                }
              }
            }
          }
        }
      }
    }
  }

  const int unit = warp * kStrips + strip;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < KERNEL; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        reinterpret_cast<float*>(shared)[unit * kPart + (r * KERNEL + s) * kChannels + own + v] =
            sums[r][s][v];
      }
    }
  }
  __syncthreads();
  const int column = blockIdx.z * gridDim.y + channel_tile;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(column) * blocks * (kPart / 4);
  block_sums.finish(partials, args.arrived + column, last, [&](int index, float sum) {
    const int tap = index / kChannels, c = first_channel + index % kChannels;
    const int r = first_r + tap / KERNEL, s = first_s + tap % KERNEL;
    if (c >= args.channels || r >= args.kernel[0] || s >= args.kernel[1]) return;
    put_gradient_as<T>(args, c, t * args.kernel[0] + r, s, sum);
  });
}

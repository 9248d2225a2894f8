// The gradient of a first layer's input by groups of positions, on Hopper's products of a warpgroup.
// The host's side is hopper_first_data.py.
//
// x[n, c, i] = sum over k and taps r that meet an o: y[n, k, o] * w[k, c, r], i = o*stride + r - pad.
// GEMM: M = groups of positions, as many as the stride, N = kernel rows x 8 columns, of a group's
// positions x channels, K = steps x channels of y, see first_groups.cuh. A row of y enters all the
// rows of x that it meets in one product: its columns' sums of kernel row r are those of row
// p*stride - pad + r of x, and so are complete, `stride` rows of them, when y has moved on.
//
// Block: one plane (n, d), a segment of rows of x and one of groups; it walks over the rows of y that
// meet them. One thread copies them (TMA), zeros from outside; a warpgroup multiplies 64 groups, and
// waits for nobody but the copies. A position is a row of 128 bytes, 64 channels of 16 bits, or two
// of float32; a step along W, of TAPS, is the same rows from one further on. Dynamic shared memory,
// which hopper_first_data.py counts: 1,024 bytes to align it by, a ring of STAGES rows of y, and the
// weights of each step, ROWS * 8 columns by as many channels. Before its first use the ring's end
// holds the weights as they come.
//
// float32 is rounded to TF32, or with SPLIT taken as three numbers of bfloat16 whose sum it is: six
// products, all that are 2^-25 of the largest or more. The weights' numbers lie in shared memory, y's
// are made in registers. Products of the largest numbers are added up in float32 step by step, for the
// tensor cores cut off each of their sums. What is too small to be split becomes NaN.
// Relies on its launcher for the grid (groups' segments running fastest, then rows' segments, planes,
// images), dilation 1, one group of channels, one tap along D, at most ROWS kernel rows and TAPS steps,
// 16 * STEPS channels of y, a stride of at most 2 along H, stride*C at most 8 along W. Needs sm_90a,
// a warpgroup for each 64 groups and 32 threads, with SPLIT 128.
// Deterministic: one order of additions for each result, however x is cut. Zeros beside the input and
// the kernel times an infinity are NaN: sums that are not finite are taken again by the definition.
// Index limits: offsets along a row of x and y below 2^31 elements; 64-bit elsewhere.
#include "first_groups.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

struct HopperFirstDataArgs : FirstGroupsArgs {
  alignas(64) TensorMap y_map;  // K W H D N
  u32 sub_bytes;                // of a stage: 128 bytes of each position, in whole patterns
  u32 w_bytes;                  // of the weights as they come, 0 if they are read where they are
};

namespace {

using T = ELEMENT;
constexpr bool kWide = sizeof(T) == 4, kSplit = SPLIT;
constexpr int kRows = ROWS, kColumns = ROWS * 8;
constexpr int kSubs = kWide ? 2 : 1;                  // rows of 128 bytes that a position of y has
constexpr int kWeightSubs = kWide && !kSplit ? 2 : 1;  // and a column of the weights
constexpr int kParts = kSplit ? 3 : 1;
constexpr int kSubChannels = kWide ? 32 : 64;
constexpr int kProducts = kWide && !kSplit ? 2 * STEPS : STEPS;  // of a step along W
constexpr u32 kRowBytes = 128, kTapBytes = kColumns * kRowBytes;
constexpr u32 kPartBytes = TAPS * kWeightSubs * kTapBytes;
constexpr int kMostFinished = 2;
constexpr int kFree = STAGES - 2;  // stages that copies of y find free at first
constexpr int kWeightsLaid = 1;    // a barrier
constexpr int kLoaders = kSplit ? 128 : 32;  // threads, a warpgroup where it leaves its registers
constexpr int kMostThreads = 256 + kLoaders;

// Where 16-byte chunk c of row r is.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
  return row * kRowBytes + (chunk ^ (row & 7)) * 16;
}

// The three numbers of bfloat16 whose sum two neighbours are, the largest first.
__device__ __forceinline__ void split_two(float first, float second, u32 (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = narrow_two<bf16>(first, second);
    first -= __uint_as_float(parts[i] << 16);
    second -= __uint_as_float(parts[i] & 0xffff0000);
  }
}
// Grows with the magnitude of a float32; 0 is above all.
__device__ __forceinline__ constexpr u32 magnitude(u32 word) { return word * 2 - 1; }
constexpr u32 kTooSmall = magnitude((127 - 102) << 23);  // 2^-102
constexpr u32 kNan = 0x7fffffff;

// Channels of a product's 16 that lie side by side in y are a lane's operand, four of them: so that
// it loads them at once, they are the first and the second pair of the halves.
__device__ __forceinline__ constexpr int channel_of(int place) {
  return place / 2 % 4 * 4 + place / 8 * 2 + place % 2;
}
// Which of eight rows a lane has, so that neighbours find theirs in different banks.
__device__ __forceinline__ constexpr int row_of(int of_eight) {
  return kSplit ? of_eight / 2 + of_eight % 2 * 4 : of_eight;
}

__device__ __forceinline__ void put_two(const FirstGroupsArgs& args, float* x, int at, int group,
                                        int column, float first, float second) {
  const int columns = args.group * args.channels, elements = args.x_size[2] * args.channels;
  const u32 words[2] = {__float_as_uint(first), __float_as_uint(second)};
  if (args.plain == kInTwos) {
    store_if(column < columns && at < elements, x + at, make_uint2(words[0], words[1]));
  } else if (args.plain == kNeighbours) {
    store_if(column < columns && at < elements, x + at, words[0]);
    store_if(column + 1 < columns && at + 1 < elements, x + at + 1, words[1]);
  } else if (args.plain) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int b = (column + e) / args.channels, c = column + e - b * args.channels;
      const int w_at = group * args.group + b;
      store_if(b < args.group && w_at < args.x_size[2],
               x + w_at * args.x_stride[5] + c * args.x_stride[2], words[e]);
    }
  }
}
template <class E>
__device__ __forceinline__ void put_two(const FirstGroupsArgs& args, E* x, int at, int group,
                                        int column, float first, float second) {
  put_two(args, x, at, group, column, narrow_two<E>(first, second));
}

// Weights as a chunk of a product's operand, or of three.
template <class E>
__device__ __forceinline__ void pack(const E (&values)[8], u32 (&words)[1][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    words[0][e] = values[2 * e].bits | static_cast<u32>(values[2 * e + 1].bits) << 16;
  }
}
__device__ __forceinline__ void pack(const float (&values)[4], u32 (&words)[1][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) words[0][e] = to_tf32(__float_as_uint(values[e]));
}
__device__ __forceinline__ void pack(const float (&values)[8], u32 (&words)[3][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float two[2] = {values[2 * e], values[2 * e + 1]};
#pragma unroll
    for (float& one : two) {
      if (magnitude(__float_as_uint(one)) < kTooSmall) one = __uint_as_float(kNan);
    }
    u32 parts[3];
    split_two(two[0], two[1], parts);
#pragma unroll
    for (int part = 0; part < 3; ++part) words[part][e] = parts[part];
  }
}

// The weights, as the products read them: columns are kernel rows x (b, c), 8 of them each.
__device__ __forceinline__ void lay_weights(const FirstGroupsArgs& args, const T* w, char* to,
                                            int thread, int threads) {
  constexpr int kOfChunk = kWide && !kSplit ? 4 : 8;
  constexpr int kChunks = 16 * STEPS / kOfChunk;
#pragma unroll 2
  for (int i = thread; i < TAPS * kChunks * kColumns; i += threads) {
    const int column = i % kColumns, chunk = i / kColumns % kChunks, tap = i / kColumns / kChunks;
    const int r = column / 8, b = (column & 7) / args.channels, c = (column & 7) - b * args.channels;
    const int s = b + args.pad[2] - (args.first_tap + tap) * args.stride[2];
    const bool there = r < args.kernel[1] && b < args.group && s >= 0 && s < args.kernel[2];
    const T* const from = w + c * args.w_stride[2] + r * args.w_stride[4] + s * args.w_stride[5];
    T values[kOfChunk] = {};
#pragma unroll
    for (int e = 0; e < kOfChunk; ++e) {
      const int place = chunk * kOfChunk + e;
      const int k = kSplit ? place / 16 * 16 + channel_of(place % 16) : place;
      if (there && k < args.y_channels) values[e] = from[k * args.w_stride[1]];
    }
    u32 words[kParts][4];
    pack(values, words);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<uint4*>(to + part * kPartBytes +
                                (tap * kWeightSubs + chunk / 8) * kTapBytes +
                                chunk_at(column, chunk % 8)) =
          make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMostThreads, BLOCKS)
    hopper_first_data(const __grid_constant__ HopperFirstDataArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * STAGES + 1];
  const int thread = threadIdx.x, lane = thread & 31;
  // The same in all lanes, which the compiler knows of a shuffle alone.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int stride_h = args.stride[1];
  const Share share(args);
  const int first_group = share.segment * args.warp_groups * 64;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base), stage_bytes = kSubs * args.sub_bytes;
  char* const weights = base + STAGES * stage_bytes;
  char* const as_they_come = base + kFree * stage_bytes;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, come = empty + STAGES * 8;
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      make_barrier(full + i * 8, 1);
      make_barrier(empty + i * 8, args.warp_groups * 4);
    }
    make_barrier(come, 1);
    publish_barriers();
  }
  __syncthreads();

  if (warp >= args.warp_groups * 4) {
    if constexpr (kSplit) leave_registers<40>();
    if (warp > args.warp_groups * 4 || lane > 0) return;
    if (args.w_bytes > 0) {
      arrive_expecting(come, args.w_bytes);
      load_bytes(shared_address(as_they_come), args.w, args.w_bytes, come);
    }
    int stage = 0;
    u32 parity = 0;
    for (int p = share.real0; p <= share.real1; ++p) {
      wait_for(empty + stage * 8, stage < kFree ? parity ^ 1 : parity);
      arrive_expecting(full + stage * 8, kSubs * args.positions * kRowBytes);
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        const int corner[5] = {sub * kSubChannels, first_group + args.first_tap, p, share.z, share.n};
        load_tile(ring + stage * stage_bytes + sub * args.sub_bytes, args.y_map, full + stage * 8,
                  corner);
      }
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    return;
  }

  if constexpr (kSplit) take_registers<232>();
  if (args.w_bytes > 0) {
    wait_for(come, 0);
    lay_weights(args, reinterpret_cast<const T*>(as_they_come), weights, thread,
                args.warp_groups * 128);
  } else {
    lay_weights(args, static_cast<const T*>(args.w), weights, thread, args.warp_groups * 128);
  }
  publish_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = kFree; i < STAGES; ++i) arrive(empty + i * 8);
  }
  wait_at(kWeightsLaid, args.warp_groups * 128);

  // A lane's sums: of groups own_group and 8 further on, columns own_column and the next, for each
  // kernel row.
  float sum[kRows][4] = {}, finished[kMostFinished][4];
  const int tile = warp / 4;
  const i64 plane_at = share.n * args.x_stride[0] + share.d * args.x_stride[3];
  const int in_group = args.group * args.channels;  // columns that are there
  const int own_row = tile * 64 + warp % 4 * 16 + row_of(lane >> 2);
  const int own_group = first_group + own_row;
  const int own_column = (lane & 3) * 2, own_at = own_group * in_group + own_column;
  const auto write_rows = [&](int p) {
    if (p < share.finish0) return;
#pragma unroll
    for (int row = 0; row < kMostFinished; ++row) {
      const int h = p * stride_h - args.pad[1] + row;
      if (row >= stride_h || h < 0 || h >= args.x_size[1]) continue;
      const float(&of)[4] = finished[row];
      T* const x = static_cast<T*>(args.x) + (plane_at + h * args.x_stride[4]);
      put_two(args, x, own_at, own_group, own_column, of[0], of[1]);
      put_two(args, x, own_at + 8 * in_group, own_group + 8, own_column, of[2], of[3]);
      const float finite = fmaf(of[0], 0.0f, of[1] * 0.0f) + fmaf(of[2], 0.0f, of[3] * 0.0f);
      if (finite == 0.0f && args.plain) continue;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const float value = i < 2 ? (i == 0 ? of[0] : of[1]) : i == 2 ? of[2] : of[3];
        put_one<T>(args, share, h, own_group + i / 2 * 8, own_column + i % 2, value);
      }
    }
  };

  const u64 b_first = rows_of_128_bytes(shared_address(weights));
  const auto b_at = [&](int part, int tap, int product) {
    return b_first + (part * kPartBytes + (tap * kWeightSubs + product / 4) * kTapBytes) / 16 +
           product % 4 * 2;
  };

  int stage = 0;
  u32 parity = 0;
  for (int p = share.p0; p <= share.finish1; ++p) {
    const bool real = p >= share.real0 && p <= share.real1;
    if (real) {
      const u32 rows = ring + stage * stage_bytes;
      wait_for(full + stage * 8, parity);
      if constexpr (!kSplit) {
        hold_sums(sum);
        begin_products();
        const u64 a = shifted_rows_of_128_bytes(rows, tile * 64);
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
          for (int product = 0; product < kProducts; ++product) {
            const u64 sub = product / 4 * (args.sub_bytes / 16);
            WarpgroupMma<T, kRows>::start(sum, a + sub + tap * (kRowBytes / 16) + product % 4 * 2,
                                          b_at(0, tap, product), 1);
          }
        }
        commit_products();
        // Meanwhile what the last row of y completed.
        if (p > share.p0) write_rows(p - 1);
        wait_products<0>();
        hold_sums(sum);
      } else {
        float large[2][kRows][4], small[kRows][4];
        u32 parts[2][3][4];
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
          const u32 row = own_row + tap;
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            const int turn = (tap * STEPS + step) & 1, of = tap & 1;
            const u32 from = rows + step / 2 * args.sub_bytes +
                             chunk_at(row, step % 2 * 4 + (lane & 3));
            u32 words[2][4], least = ~0u;
            load_words(words[0], from);
            load_words(words[1], from + 8 * kRowBytes);
#pragma unroll
            for (int i = 0; i < 8; ++i) least = min(least, magnitude(words[i / 4][i % 4]));
            if (least < kTooSmall) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                if (magnitude(words[i / 4][i % 4]) < kTooSmall) words[i / 4][i % 4] = kNan;
              }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              u32 some[3];
              split_two(__uint_as_float(words[i & 1][i / 2 * 2]),
                        __uint_as_float(words[i & 1][i / 2 * 2 + 1]), some);
#pragma unroll
              for (int part = 0; part < 3; ++part) parts[turn][part][i] = some[part];
            }
#pragma unroll
            for (int part = 0; part < 3; ++part) hold_words(parts[turn][part]);
            begin_products();
            const auto start = [&](float(&to)[kRows][4], int of_a, int of_b, int add) {
              WarpgroupMma<bf16, kRows>::start(to, parts[turn][of_a], b_at(of_b, tap, step), add);
            };
            start(large[of], 0, 0, step > 0);
            start(small, 0, 1, tap + step > 0);
            start(small, 1, 0, 1);
            start(small, 1, 1, 1);
            start(small, 0, 2, 1);
            start(small, 2, 0, 1);
            commit_products();
            if (tap + step == 0 && p > share.p0) write_rows(p - 1);
            wait_products<1>();
            if (tap + step > 0) {
#pragma unroll
              for (int part = 0; part < 3; ++part) hold_words(parts[turn ^ 1][part]);
            }
            if (step == 0 && tap > 0) {
              hold_sums(large[of ^ 1]);
#pragma unroll
              for (int i = 0; i < 4 * kRows; ++i) sum[i / 4][i % 4] += large[of ^ 1][i / 4][i % 4];
            }
          }
        }
        wait_products<0>();
        hold_sums(large[(TAPS - 1) & 1]);
        hold_sums(small);
#pragma unroll
        for (int i = 0; i < 4 * kRows; ++i) {
          sum[i / 4][i % 4] += large[(TAPS - 1) & 1][i / 4][i % 4] + small[i / 4][i % 4];
        }
      }
      __syncwarp();
      if (lane == 0) arrive(empty + stage * 8);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    } else if (p > share.p0) {
      write_rows(p - 1);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      finished[0][e] = sum[0][e];
      finished[1][e] = sum[1][e];
      if (stride_h == 1) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][e] = r + 1 < kRows ? sum[(r + 1) % kRows][e] : 0;
      } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][e] = r + 2 < kRows ? sum[(r + 2) % kRows][e] : 0;
      }
    }
  }
  write_rows(share.finish1);
}

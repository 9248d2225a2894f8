// The gradient of a first layer's weight on Hopper: few channels of the input. The host's side is
// hopper_first_weight.py.
//
// w[k, c, r, s] = sum over pixels (n, p, q) of y[n, p, q, k] * x[n, p*stride + r - pad, q*stride + s -
// pad, c]. With channels last the taps of a kernel row meet neighbouring numbers of a row of x.
// GEMM: M = 64 channels of y, N = `rows` kernel rows times what a window holds of a row of x, in
// chunks of 8 numbers, FRAGMENTS at most, K = columns of a row of y, 16 a product.
//
// A window's chunks overlap its neighbours', so rows of x are laid out as matrices of positions: for
// each chunk of a window 16 bytes a column of y. They stand in a ring of rows, where a row of y finds
// those that it meets one after another: the ring's first rows are laid out behind its last ones too.
//
// Step: a row of y, of a segment of columns, and the rows of x that it adds; or, where a walk down an
// image begins, rows of x alone. Block: 64 channels, a group of kernel rows and a share of all rows of
// y. Two threads copy (TMA) rows of y, channels side by side, and rows of x as they come; LAYERS
// threads lay out, in TEAMS that take steps in turn; a warpgroup multiplies and has all sums in
// registers. They go to the block's own part of `partials`, in the order (k, r, s, c), and
// first_sum.cu adds the parts up.
// Dynamic shared memory, which hopper_first_weight.py counts: 1,024 bytes to align it by, rings of
// rows of y, of rows of x and of windows; in the end the sums.
// Relies on its launcher for the grid (groups of kernel rows running fastest, then blocks of channels;
// shares), one tap along D, no dilation, an even number of elements from window to window, rows of
// whole 16 bytes. Needs sm_90a, LAYERS + 256 threads.
// Deterministic: one order of additions for each result and number of shares. Positions outside enter
// as zeros, which times an infinity is NaN: sums that are not finite are taken again by the
// definition, over the block's rows.
// Index limits: rows of y, elements of a row below 2^31; 64-bit offsets elsewhere.
#include "hopper_first_weight.cuh"
#include "overlap.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kLayers = LAYERS, kThreads = kLayers + 256;  // threads that lay out, and all
constexpr int kTeams = TEAMS, kTeam = kLayers / kTeams;    // that lay out, steps in turn
constexpr int kLoader = (kThreads - 128) / 32;             // the first warp that loads
constexpr int kLoaders = 2, kStarting = 128 + kLayers + kLoaders * 32;  // warps; threads
constexpr int kStart = 1, kRead = 2;                                   // barriers
constexpr int kMostStages = 16, kPitch = FRAGMENTS * 8 + 4;

// A result again, over the rows of y of a share.
__device__ __forceinline__ float again(const HopperFirstWeightArgs& args, int line, int end, int k,
                                    int r, int column) {
  float sum = 0;
#pragma unroll 1
  for (; line < end; ++line) {
    const int walk = line / args.y_size[0], p = line - walk * args.y_size[0];
    const int n = walk / args.segments, h = p * args.stride[0] - args.pad[0] + r;
    if (static_cast<u32>(h) >= static_cast<u32>(args.x_size[0])) continue;
    const T* const x_row =
        static_cast<const T*>(args.x) + n * args.x_stride[0] + h * args.x_stride[1];
    const T* const y_row =
        static_cast<const T*>(args.y) + n * args.y_stride[0] + p * args.y_stride[1] + k;
    const int q0 = (walk - n * args.segments) * args.segment;
    const int q1 = min(q0 + args.segment, args.y_size[1]);
#pragma unroll 1
    for (int q = q0; q < q1; ++q) {
      const int element = window_of(args, q) + args.odd + column;
      if (static_cast<u32>(element) >= static_cast<u32>(args.x_size[1] * args.channels)) continue;
      sum += widen(y_row[q * args.y_stride[2]]) * widen(x_row[element]);
    }
  }
  return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_first_weight(const __grid_constant__ HopperFirstWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[6 * kMostStages];
  const int thread = threadIdx.x, lane = thread & 31;
  // The same in all lanes, which the compiler knows of a shuffle alone.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base);
  const u32 y_full = shared_address(barriers), y_empty = y_full + kMostStages * 8;
  const u32 x_full = y_empty + kMostStages * 8, x_empty = x_full + kMostStages * 8;
  const u32 laid = x_empty + kMostStages * 8, left = laid + kMostStages * 8;
  const int channel_block = blockIdx.x / args.row_groups;
  const int first_row = (blockIdx.x - channel_block * args.row_groups) * args.rows;
  const int rows = min(args.rows, args.kernel[0] - first_row);
  const int first_channel = channel_block * 64;
  const int share = blockIdx.y;
  const int line = share * args.lines + min(share, args.more);
  const int end = line + args.lines + (share < args.more);
  const u32 chunk_bytes = args.chunk * 16, window_bytes = args.chunks * chunk_bytes;
  const int slots = args.window_steps * args.added;

  if (warp >= kLoader) {
    leave_registers<56>();
    // A thread for either tensor: starting a copy takes longer than many copies. Neither waits for
    // anybody before its first ones.
    const bool of_x = warp == kLoader, loads = warp < kLoader + kLoaders;
    if (loads && elected()) {
      prefetch_map(of_x ? args.x_map : args.y_map);
      for (int i = 0; i < kMostStages; ++i) {
        make_barrier((of_x ? x_full : y_full) + i * 8, 1);
        make_barrier((of_x ? x_empty : y_empty) + i * 8, of_x ? kTeam / 32 : 4);
        if (of_x) {
          make_barrier(laid + i * 8, kTeam / 32);
          make_barrier(left + i * 8, 4);
        }
      }
      publish_barriers();
    }
    __syncwarp();
    if (loads) pass_by(kStart, kStarting);
    const bool chosen = loads && elected();
    if (chosen && of_x) {
      Place at;
      for (Steps step(args, line, end); step.there(); step.next()) {
        const u32 full = x_full + at.at * 8;
        wait_for(x_empty + at.at * 8, at.parity ^ 1);
        arrive_expecting(full, args.added * args.x_row);
        const int corner[4] = {0, step.part, step.row(first_row, rows), step.n};
        load_tile(ring + args.raws_at + at.at * args.x_stage, args.x_map, full, corner);
        at.advance(args.x_stages);
      }
    } else if (chosen) {
      Place at;
      for (Steps step(args, line, end); step.there(); step.next()) {
        if (!step.multiplies()) continue;
        const u32 full = y_full + at.at * 8;
        wait_for(y_empty + at.at * 8, at.parity ^ 1);
        arrive_expecting(full, args.segment * 128);
        const int corner[4] = {first_channel, step.segment * args.segment, step.p, step.n};
        load_tile(ring + at.at * args.y_stage, args.y_map, full, corner);
        at.advance(args.y_stages);
      }
    }
    __syncwarp();  // the barrier at the end is for whole warps
  } else if (warp >= 4) {
    leave_registers<112>();
    wait_at(kStart, kStarting);
    const int team = (warp - 4) / (kTeam / 32), first = thread - 128 - team * kTeam;
    const int column_words = args.stride[1] * args.channels / 2;
    const int first_row_of = first / args.segment, first_q = first - first_row_of * args.segment;
    const int step_rows = kTeam / args.segment, step_qs = kTeam - step_rows * args.segment;
    int turn = 0;
    const auto lay_out = [&](const Steps& step, const Place& x_at, const Place& at) {
      const char* const raw = base + args.raws_at + x_at.at * args.x_stage + step.lead;
      wait_for(left + at.at * 8, at.parity ^ 1);
      wait_for(x_full + x_at.at * 8, x_at.parity);
      int row = first_row_of, q = first_q;
      while (row < args.added) {
        const int slot = at.at * args.added + row;
        const u32* const words =
            reinterpret_cast<const u32*>(raw + row * args.x_row) + q * column_words;
        uint4* const to =
            reinterpret_cast<uint4*>(base + args.windows_at + slot * window_bytes) + q;
        const int again = slots * args.chunks * args.chunk;
        const bool twice = slot < args.rows - 1;
        int chunk = 0;
        const auto lay = [&](auto count) {
          lay_chunks<count.value>(words + chunk * 4, to + chunk * args.chunk, args.chunk,
                                  twice ? again : 0);
          chunk += count.value;
        };
        while (chunk + 3 <= args.chunks) lay(Count<3>());
        if (chunk + 2 == args.chunks) {
          lay(Count<2>());
        } else if (chunk < args.chunks) {
          lay(Count<1>());
        }
        row += step_rows, q += step_qs;
        if (q >= args.segment) q -= args.segment, ++row;
      }
      publish_shared();
      __syncwarp();
      if (lane == 0) {
        arrive(x_empty + x_at.at * 8);
        arrive(laid + at.at * 8);
      }
    };
    Place x_at, at;
    for (Steps step(args, line, end); step.there(); step.next()) {
      if (turn == team) lay_out(step, x_at, at);
      if (++turn == kTeams) turn = 0;
      x_at.advance(args.x_stages);
      at.advance(args.window_steps);
    }
    __syncwarp();
  } else {
    take_registers<168>();
    wait_at(kStart, kStarting);
    start_next();
    float sum[FRAGMENTS][4];
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = 0;
    }
    const u64 a_first = operand_along_mn<128>(ring);
    const u64 b_first = operand_in_chunks(ring + args.windows_at, chunk_bytes, 128);
    Place at, y_at;
    int freed = 0, freed_at = 0, index = 0;  // of steps, counted from the block's first
    int y_last = -1, index_last = 0;         // of the row of y that is under way
    int top = args.added - rows;             // the ring's row of a step's first one
    if (top < 0) top += slots;
    const auto free_to = [&](int until) {
      for (; freed < until; ++freed) {
        if (lane == 0) arrive(left + freed_at * 8);
        if (++freed_at == args.window_steps) freed_at = 0;
      }
    };
    // The rows of y before this one are done, and so is what they alone met.
    const auto release = [&] {
      if (y_last < 0) return;
      if (lane == 0) arrive(y_empty + y_last * 8);
      free_to(index_last - args.before + 1);
      y_last = -1;
    };
    hold_sums(sum);
    for (Steps step(args, line, end); step.there(); step.next()) {
      wait_for(laid + at.at * 8, at.parity);
      if (step.multiplies()) {
        wait_for(y_full + y_at.at * 8, y_at.parity);
        const u64 a = advance(a_first, y_at.at * args.y_stage);
        const u64 b = advance(b_first, top * window_bytes);
        begin_products();
#pragma unroll 1
        for (int k = 0; k < args.segment / 16; ++k) {
          multiply<T, kAlongMn, kAlongMn>(sum, advance(a, k * 2048), advance(b, k * 256), 1);
          // A group each: one that ends behind a loop ends when all of it is over.
          commit_products();
          if (k == 0) {
            wait_products<1>();
            release();
          }
        }
        y_last = y_at.at, index_last = index;
        y_at.advance(args.y_stages);
      } else if (step.begins()) {
        wait_products<0>();
        release();
        free_to(index);
      }
      ++index;
      at.advance(args.window_steps);
      top += args.added;
      if (top >= slots) top -= slots;
    }
    wait_products<0>();
    hold_sums(sum);
    // No copy is under way, for every row was waited for, but other warps may still read.
    wait_at(kRead, 128);
    float* const to = reinterpret_cast<float*>(base) + (warp * 16 + lane / 4) * kPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
      *reinterpret_cast<float2*>(to + j * 8) = make_float2(sum[j][0], sum[j][1]);
      *reinterpret_cast<float2*>(to + j * 8 + 8 * kPitch) = make_float2(sum[j][2], sum[j][3]);
    }
  }
  __syncthreads();

  const int columns = args.kernel[1] * args.channels, results = rows * columns;
  const int all = args.kernel[0] * columns;
  float* const partials = args.partials + static_cast<i64>(share) * args.y_channels * all;
  const float* const sums = reinterpret_cast<const float*>(base);
  const int channels = min(64, args.y_channels - first_channel);
  bool odd = false;
  const auto put = [&](bool anew) {
#pragma unroll 1
    for (int rest = lane; rest < results; rest += 32) {
      const int row = rest / columns, column = rest - row * columns, r = first_row + row;
      const float* const from = sums + row * args.chunks * 8 + column + args.odd;
      float* const to = partials + static_cast<i64>(first_channel) * all + r * columns + column;
      if (!anew) {
#pragma unroll 4
        for (int channel = warp; channel < channels; channel += kThreads / 32) {
          const float value = from[channel * kPitch];
          odd |= !is_finite(value);
          to[channel * all] = value;
        }
      } else {
#pragma unroll 1
        for (int channel = warp; channel < channels; channel += kThreads / 32) {
          if (is_finite(from[channel * kPitch])) continue;
          to[channel * all] = again(args, line, end, first_channel + channel, r, column);
        }
      }
    }
  };
  put(false);
  if (odd) put(true);
}

// How persistent blocks of pointwise_gemm.cu store a tile's accumulators (REDUCE 0).
#pragma once

#include "conv/pointwise_gemm_load.cuh"
#include "ptx/shared_element.cuh"

#if !REDUCE
namespace {

// accum = alpha * accum + bias.
__device__ __forceinline__ void apply_alpha_bias(const PointwiseGemmArgs& args, int column,
                                                 Accumulators& accum) {
  const T* const bias = static_cast<const T*>(args.bias);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + j * 8 + lane % 4 * 2 + e;
      const float add = bias != nullptr && at < args.columns ? widen(bias[at]) : 0.0f;
#pragma unroll
      for (int part = 0; part < kMmasM; ++part) {
        accum[part][j][e] = accum[part][j][e] * args.alpha + add;
        accum[part][j][e + 2] = accum[part][j][e + 2] * args.alpha + add;
      }
    }
  }
}

#if IN_TF32
// Stores 64 rows of a warpgroup from its registers, a lane pairs of neighbours, and a warp whole sectors.
__device__ __forceinline__ void store_pairs(const PointwiseGemmArgs& args, int row, int column, int image,
                                            const float (&accum)[kFragmentsN][4]) {
  const int lane = threadIdx.x & 31, rows_left = (kPlanes ? args.pixels : args.rows) - row;
  const int columns_left = args.columns - column;
  const int r = fragment_row(threadIdx.x / 32 % 4, lane / 4), c = lane % 4 * 2;
  float* const to = static_cast<float*>(args.result) + (kPlanes ? image * args.image_stride : 0) +
                    (row + r) * args.row_stride + (column + c) * args.column_stride;
#pragma unroll
  for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Two rows of one column, or two columns of one row.
      const float first = accum[j][kRegistersA ? e : e * 2], second = accum[j][kRegistersA ? e + 2 : e * 2 + 1];
      const bool inside = kRegistersA ? r < rows_left && c + j * 8 + e < columns_left
                                      : r + e * 8 < rows_left && c + j * 8 < columns_left;
      const i64 at = kRegistersA ? (j * 8 + e) * args.column_stride : e * 8 * args.row_stride + j * 8;
      // With an inline store, the compiler would make wgmmas wait for each other.
      if (inside) *reinterpret_cast<float2*>(to + at) = {first, second};
    }
  }
}

// Stores a warpgroup's part of a tile.
__device__ __forceinline__ void store_tile(const PointwiseGemmArgs& args, const BlockWork& work, int tile, u32, int&,
                                           const Accumulators& accum) {
  const int image = kPlanes ? tile / args.image_tiles : 0, tile_in = kPlanes ? tile - image * args.image_tiles : tile;
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    store_pairs(args, (kTransposed ? work.column : tile_in * BM) + threadIdx.x / 128 * kNextRows + part * 64,
                kTransposed ? tile * BN : work.column, image, accum[part]);
  }
}
#else
// Address of columns 8 * chunk to 8 * chunk + 7 of a row in a staging buffer.
__device__ __forceinline__ u32 staging_address(u32 staging, int row, int chunk) {
  if constexpr (D_BYTES == 128) {
    return staging + chunk / 8 * kBoxBytes + row * 128 + ((chunk % 8) ^ (row & 7)) * 16;
  } else if constexpr (D_BYTES == 64) {
    return staging + chunk / 4 * kBoxBytes + row * 64 + ((chunk % 4) ^ (row >> 1 & 3)) * 16;
  } else {
    return staging + row * (kStoredColumns * static_cast<int>(sizeof(T))) + chunk * 16;
  }
}

// Stores 16 rows of a warp's staging buffer, which are channels of planes, sizeof(Raw) / sizeof(T) pixels at once.
template <class Raw>
__device__ __forceinline__ void store_runs(const PointwiseGemmArgs& args, u32 staging, int row, int pixel,
                                           T* to) {
  constexpr int kSide = static_cast<int>(sizeof(Raw) / sizeof(T)), kOfRow = kStoredColumns / kSide;
#pragma unroll 4
  for (int i = threadIdx.x & 31; i < 16 * kOfRow; i += 32) {
    const int in_row = i / kOfRow, column = i % kOfRow * kSide;
    Raw raw;
    ld_shared(staging_address(staging, in_row, column / 8) + column % 8 * static_cast<int>(sizeof(T)), raw);
    store_if(row + in_row < args.rows && pixel + column < args.pixels, to + in_row * args.row_stride + column, raw);
  }
}

// Rounds 16 rows of a warp, one after another, to a free staging buffer and stores them as one run: of results whose
// rows are contiguous, in a single column of tiles (UNALIGNED).
__device__ __forceinline__ void store_whole_rows(const PointwiseGemmArgs& args, u32 staging, int row,
                                                 const float (&all)[kFragmentsN][4]) {
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, columns = args.columns;
  const auto put = [&](int in_row, int column, float first, float second) {
    const u32 to = staging + (in_row * columns + column) * static_cast<u32>(sizeof(T));
    if (columns % 2 == 0) {
      if (column < columns) st_shared_u32(to, narrow_x2<T>(first, second));
    } else {
      if (column < columns) store_element(to, narrow<T>(first));
      if (column + 1 < columns) store_element(to + static_cast<u32>(sizeof(T)), narrow<T>(second));
    }
  };
#pragma unroll
  for (int j = 0; j + 1 < kFragmentsN; j += 2) {
    const float(&one)[4] = all[j], (&two)[4] = all[j + 1];
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      if constexpr (kMixesColumns) {
        put(g + e * 4, j * 8 + t * 4, one[e], two[e]);
        put(g + e * 4, j * 8 + t * 4 + 2, one[e + 1], two[e + 1]);
      } else {
        put(g + e * 4, j * 8 + t * 2, one[e], one[e + 1]);
        put(g + e * 4, j * 8 + t * 2 + 8, two[e], two[e + 1]);
      }
    }
  }
  __syncwarp();
  T* const to = static_cast<T*>(args.result) + static_cast<i64>(row) * columns;
  const int count = min(16, args.rows - row) * columns;
#pragma unroll 4
  for (int i = lane * 8; i < count; i += 256) {
    uint4 raw;
    ld_shared(staging + i * static_cast<u32>(sizeof(T)), raw);
    store_if(i + 8 <= count, to + i, raw);
  }
  for (int i = (count & ~7) + lane; i < count; i += 32) {
    to[i] = element_at<T>(staging + i * static_cast<u32>(sizeof(T)));
  }
}

// Rounds 16 rows of a warp to a free staging buffer and stores them by TMA: kStoredColumns of them from fragment
// `from` on, which are those of the result from `column` on.
__device__ __forceinline__ void store_rows(const PointwiseGemmArgs& args, u32 staging, int row,
                                           int column, int image, const float (&all)[kFragmentsN][4], int from) {
  if (kUnaligned && args.stored_pixels == 0) return store_whole_rows(args, staging, row, all);
  const int lane = threadIdx.x & 31;
  constexpr int kCount = kStoredColumns / 8;
#pragma unroll
  for (int j = 0; j + 1 < kCount; j += 2) {
    const float(&one)[4] = all[from + j], (&two)[4] = all[from + j + 1];
    if constexpr (kMixesColumns) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int in_row = kMixesRows ? lane / 4 * 2 + half : lane / 4 + half * 8;
        const u32 to = staging_address(staging, in_row, j + lane % 4 / 2) + lane % 2 * 8;
        st_shared_u32(to, narrow_x2<T>(one[half * 2], two[half * 2]));
        st_shared_u32(to + 4, narrow_x2<T>(one[half * 2 + 1], two[half * 2 + 1]));
      }
      continue;
    }
    store_fragments<T>(staging_address(staging, lane % 16, j + lane / 16), one, two);
  }
  if constexpr (kCount % 2) {
    constexpr int j = kCount - 1;
    const float(&one)[4] = all[from + j];
    const u32 at = lane % 4 * 4;
    st_shared_u32(staging_address(staging, lane / 4, j) + at, narrow_x2<T>(one[0], one[1]));
    st_shared_u32(staging_address(staging, lane / 4 + 8, j) + at, narrow_x2<T>(one[2], one[3]));
  }
  if constexpr (kUnaligned || (kShifted && kPlanes)) {
    __syncwarp();
    T* const to = static_cast<T*>(args.result) + image * args.image_stride + row * args.row_stride + column;
    if (args.stored_pixels == 8) {
      store_runs<uint4>(args, staging, row, column, to);
    } else if (args.stored_pixels == 4) {
      store_runs<uint2>(args, staging, row, column, to);
    } else if (args.stored_pixels == 2) {
      store_runs<unsigned int>(args, staging, row, column, to);
    } else {
      store_runs<unsigned short>(args, staging, row, column, to);
    }
    return;
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int block = 0; block < kStoredColumns / kBoxColumns; ++block) {
      const u32 from = staging + block * kBoxBytes;
      if constexpr (kPlanes) {
        tma_store<3>(args.d_map, from, {column + block * kBoxColumns, row, image});
      } else {
        tma_store<2>(args.d_map, from, {column + block * kBoxColumns, row});
      }
    }
    tma_store_commit();
  }
}

// Stores 16 rows of a warp in float32, to columns whose rows are contiguous: eight rows are a sector.
__device__ __forceinline__ void store_wide(const PointwiseGemmArgs& args, int row, int column,
                                           const float (&accum)[kFragmentsN][4]) {
  const int lane = threadIdx.x & 31;
  row += lane / 4;
  column += lane % 4 * 2;
  float* to = static_cast<float*>(args.result) + column * args.column_stride + row;
#pragma unroll
  for (int j = 0; j < kFragmentsN; ++j, to += 8 * args.column_stride) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + j * 8 + e % 2 < args.columns && row + e / 2 * 8 < args.rows) {
        to[e % 2 * args.column_stride + e / 2 * 8] = accum[j][e];
      }
    }
  }
}

// Rounds 64 rows of a warpgroup to a free staging buffer, by columns, and stores them by TMA: kStoredColumns of
// them from fragment `from` on.
__device__ __forceinline__ void store_columns(const PointwiseGemmArgs& args, u32 staging, int row, int column,
                                              int image, const float (&all)[kFragmentsN][4], int from) {
  stage_columns<T, kStoredColumns / 8>(staging, all, from);
  fence_proxy_async();
  named_barrier_sync(1 + threadIdx.x / 128, 128);
  if (threadIdx.x % 128 == 0) {
    if constexpr (kPlanes) {
      tma_store<3>(args.d_map, staging, {row, column, image});
    } else {
      tma_store<2>(args.d_map, staging, {row, column});
    }
    tma_store_commit();
  }
}

// Stores a warpgroup's part of a tile through its warps' staging buffers, of which `buffer` is the next one.
__device__ __forceinline__ void store_tile(const PointwiseGemmArgs& args, const BlockWork& work, int tile, u32 staging,
                                           int& buffer, const Accumulators& accum) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int image = kPlanes ? tile / args.image_tiles : 0, tile_in = kPlanes ? tile - image * args.image_tiles : tile;
  if constexpr (kStoresColumns) {
    const int row = (kPlanes ? tile_in * BM : work.column) + warp / 4 * kNextRows;
    const int first = kPlanes ? work.column : tile * BN;
#pragma unroll
    for (int i = 0; i < kMmasM * (BN / kStoredColumns); ++i) {
      const int part = i % kMmasM, column = i / kMmasM * kStoredColumns;
      if (threadIdx.x % 128 == 0) tma_store_wait_read<BUFFERS - 1>();
      named_barrier_sync(1 + warp / 4, 128);
      store_columns(args, staging + buffer * kStagingBytes, row + part * 64, first + column, image,
                    accum[part], column / 8);
      if (++buffer == BUFFERS) buffer = 0;
    }
    return;
  }
  if (args.wide_result) {
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) {
      store_wide(args, tile * BM + warp / 4 * kNextRows + part * 64 + warp % 4 * 16, work.column,
                 accum[part]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kMmasM * (BN / kStoredColumns); ++i) {
    const int part = i % kMmasM, column = i / kMmasM * kStoredColumns;
    if (lane == 0) tma_store_wait_read<BUFFERS - 1>();
    __syncwarp();
    store_rows(args, staging + buffer * kStagingBytes,
               (kTransposed ? work.column : tile * BM) + warp / 4 * kNextRows + part * 64 + warp % 4 * 16,
               (kTransposed ? tile_in * BN : work.column) + column, image, accum[part], column / 8);
    if (++buffer == BUFFERS) buffer = 0;
  }
}
#endif

}  // namespace
#endif

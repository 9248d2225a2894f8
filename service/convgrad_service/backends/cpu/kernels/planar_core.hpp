// Micro-kernels of the planar kernels: correlations of flattened planes.
//
// Source and result planes have the pitch of the padded box, so a tap is a constant offset for all
// positions of a tile, across rows and slices. Results in the gaps between rows are discarded.
#pragma once

#include "elements.hpp"

namespace convgrad {

// Terms of a sum in registers. Sums of more are added in memory, so that errors stay small.
inline constexpr i64 kTerms = 128;

// sums[k][t] = sum over j of weights[j][k] * src[offset[j] + t], for a register block of KT
// channels k and VT vectors of positions t. Weights are broadcast.
template <class T, int KT, int VT>
CONVGRAD_INLINE void correlate_tile(const T* src, const i64* offset, i64 terms, const T* weights,
                                    T* sums, i64 pitch) {
  constexpr int L = kLanes<T>;
  i64 j = 0;
  do {
    Vec<T> sum[KT][VT];
#pragma clang loop unroll(full)
    for (int k = 0; k < KT; ++k) {
#pragma clang loop unroll(full)
      for (int v = 0; v < VT; ++v) sum[k][v] = splat(T(0));
    }
    const bool adds = j > 0;
    for (const i64 end = least(terms, j + kTerms); j < end; ++j) {
      const T* x = src + offset[j];
      Vec<T> values[VT];
#pragma clang loop unroll(full)
      for (int v = 0; v < VT; ++v) values[v] = load_raw<Vec<T>>(x + v * L);
#pragma clang loop unroll(full)
      for (int k = 0; k < KT; ++k) {
        const Vec<T> w = splat(weights[j * KT + k]);
#pragma clang loop unroll(full)
        for (int v = 0; v < VT; ++v) {
          sum[k][v] += values[v] * w;
          pin(sum[k][v]);
        }
      }
    }
#pragma clang loop unroll(full)
    for (int k = 0; k < KT; ++k) {
#pragma clang loop unroll(full)
      for (int v = 0; v < VT; ++v) {
        T* to = sums + k * pitch + v * L;
        store_raw(to, adds ? load_raw<Vec<T>>(to) + sum[k][v] : sum[k][v]);
      }
    }
  } while (j < terms);
}

// VT such that KT * VT accumulators, VT source vectors and one broadcast fit the registers.
constexpr int vectors_for(int channels) {
  constexpr bool many = kVectorRegisters == 32;
  return channels == 8 ? 3 : channels == 4 ? (many ? 6 : 3) : channels == 2 ? (many ? 8 : 4) : 8;
}
inline constexpr int kMostChannels = kVectorRegisters == 32 ? 8 : 4;

// Channels of the next register block: 8 (if they fit), 4, 2 or 1.
CONVGRAD_INLINE int tile_channels(i64 left) {
  int channels = kMostChannels;
  while (channels > left) channels /= 2;
  return channels;
}

template <class T, int KT, int VT>
void correlate_rest(i64 vectors, const T* src, const i64* offset, i64 terms, const T* weights,
                    T* sums, i64 pitch) {
  if constexpr (VT > 0) {
    if (vectors == VT) {
      correlate_tile<T, KT, VT>(src, offset, terms, weights, sums, pitch);
    } else {
      correlate_rest<T, KT, VT - 1>(vectors, src, offset, terms, weights, sums, pitch);
    }
  }
}

template <class T, int KT>
void correlate_channels(const T* src, const i64* offset, i64 terms, const T* weights, T* sums,
                        i64 vectors, i64 pitch) {
  constexpr int VT = vectors_for(KT);
  constexpr int L = kLanes<T>;
  i64 v = 0;
  for (; v + VT <= vectors; v += VT) {
    correlate_tile<T, KT, VT>(src + v * L, offset, terms, weights, sums + v * L, pitch);
  }
  correlate_rest<T, KT, VT - 1>(vectors - v, src + v * L, offset, terms, weights, sums + v * L,
                                pitch);
}

// Vectors of positions, of all terms, that all channels read while they are in the L1 cache. A phase
// that no tap reaches has no terms.
template <class T>
CONVGRAD_INLINE i64 vectors_at_once(i64 terms) {
  constexpr i64 kWhole = 24;  // whole register blocks of any number of channels
  const i64 fitting = 20 * 1024 / static_cast<i64>(sizeof(Vec<T>)) / most(least(terms, kTerms), 1);
  return fitting < kWhole ? most(fitting / 6 * 6, 6) : fitting / kWhole * kWhole;
}

// Computes all channels of one group. `weights` are packed as [register block][term][channel].
template <class T>
void correlate(const T* src, const i64* offset, i64 terms, const T* weights, i64 channels, T* sums,
               i64 vectors, i64 pitch) {
  const i64 at_once = channels > kMostChannels ? vectors_at_once<T>(terms) : vectors;
  for (i64 v = 0; v < vectors; v += at_once) {
    const i64 some = least(vectors - v, at_once);
    const T* x = src + v * kLanes<T>;
    for (i64 k = 0; k < channels;) {
      const int tile = tile_channels(channels - k);
      const T* w = weights + k * terms;
      T* out = sums + k * pitch + v * kLanes<T>;
      if constexpr (kMostChannels == 8) {
        if (tile == 8) correlate_channels<T, 8>(x, offset, terms, w, out, some, pitch);
      }
      if (tile == 4) correlate_channels<T, 4>(x, offset, terms, w, out, some, pitch);
      if (tile == 2) correlate_channels<T, 2>(x, offset, terms, w, out, some, pitch);
      if (tile == 1) correlate_channels<T, 1>(x, offset, terms, w, out, some, pitch);
      k += tile;
    }
  }
}

// products[k * stride + j] += sum over t of y[k][t] * x[offset[j] + t], for a register block of KT
// planes of y and JT offsets. Lanes are summed at the end.
template <class T, int KT, int JT>
CONVGRAD_INLINE void contract_tile(const T* y, i64 pitch, const T* x, const i64* offset, i64 vectors,
                                   T* products, i64 stride) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[KT][JT];
  const T* source[JT];
#pragma clang loop unroll(full)
  for (int j = 0; j < JT; ++j) {
    source[j] = x + offset[j];
#pragma clang loop unroll(full)
    for (int k = 0; k < KT; ++k) sum[k][j] = splat(T(0));
  }
  for (i64 v = 0; v < vectors; ++v) {
    Vec<T> value[JT];
#pragma clang loop unroll(full)
    for (int j = 0; j < JT; ++j) value[j] = load_raw<Vec<T>>(source[j] + v * L);
#pragma clang loop unroll(full)
    for (int k = 0; k < KT; ++k) {
      const Vec<T> gradient = load_raw<Vec<T>>(y + k * pitch + v * L);
#pragma clang loop unroll(full)
      for (int j = 0; j < JT; ++j) {
        sum[k][j] += gradient * value[j];
        pin(sum[k][j]);
      }
    }
  }
#pragma clang loop unroll(full)
  for (int k = 0; k < KT; ++k) {
#pragma clang loop unroll(full)
    for (int j = 0; j < JT; ++j) products[k * stride + j] += sum_lanes<T>(sum[k][j]);
  }
}

// JT such that KT * JT accumulators, JT vectors of x and one of y fit the registers.
constexpr int offsets_for(int channels) {
  constexpr bool many = kVectorRegisters == 32;
  return channels == 4 ? (many ? 6 : 3) : channels == 2 ? (many ? 9 : 4) : (many ? 9 : 7);
}

template <class T, int KT, int JT>
void contract_rest(i64 left, const T* y, i64 pitch, const T* x, const i64* offset, i64 vectors,
                   T* products, i64 stride) {
  if constexpr (JT > 0) {
    if (left == JT) {
      contract_tile<T, KT, JT>(y, pitch, x, offset, vectors, products, stride);
    } else {
      contract_rest<T, KT, JT - 1>(left, y, pitch, x, offset, vectors, products, stride);
    }
  }
}

template <class T, int KT>
void contract_channels(const T* y, i64 pitch, const T* x, const i64* offset, i64 terms, i64 vectors,
                       T* products, i64 stride) {
  constexpr int JT = offsets_for(KT);
  i64 j = 0;
  for (; j + JT <= terms; j += JT) {
    contract_tile<T, KT, JT>(y, pitch, x, offset + j, vectors, products + j, stride);
  }
  contract_rest<T, KT, JT - 1>(terms - j, y, pitch, x, offset + j, vectors, products + j, stride);
}

// The same for all planes of y of one group and all offsets: a few at a time, whose planes share
// few sets of the caches, and as many vectors of positions as stay in the L2 cache for them.
template <class T>
void contract(const T* y, i64 channels, i64 pitch, const T* x, const i64* offset, i64 terms,
              i64 vectors, T* products) {
  constexpr i64 kOffsets = 30, kBytes = 96 * 1024;
  const i64 fitting = kBytes / static_cast<i64>(sizeof(Vec<T>)) / least(terms, kOffsets);
  const i64 at_once = least(fitting, 2 * kTerms);
  for (i64 j = 0; j < terms; j += kOffsets) {
    const i64 count = least(terms - j, kOffsets);
    for (i64 v = 0; v < vectors; v += at_once) {
      const i64 some = least(vectors - v, at_once);
      const T* from = x + v * kLanes<T>;
      for (i64 k = 0; k < channels;) {
        const int tile = channels - k >= 4 ? 4 : tile_channels(channels - k);
        const T* planes = y + k * pitch + v * kLanes<T>;
        const i64* at = offset + j;
        T* out = products + k * terms + j;
        if (tile == 4) contract_channels<T, 4>(planes, pitch, from, at, count, some, out, terms);
        if (tile == 2) contract_channels<T, 2>(planes, pitch, from, at, count, some, out, terms);
        if (tile == 1) contract_channels<T, 1>(planes, pitch, from, at, count, some, out, terms);
        k += tile;
      }
    }
  }
}

}  // namespace convgrad

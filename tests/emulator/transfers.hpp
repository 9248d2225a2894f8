// Barriers in shared memory that count bytes, the copies of the copy engine that they count, and the
// shared memory of a cluster's blocks, see emulator.hpp. A copy to shared memory is done at once, or
// when somebody waits for it, by turns of a coin: a missing wait for what it brings shows, and so
// does one for what it overwrites. A copy from shared memory is done when it is waited for.
#pragma once

#include "emulator.hpp"

namespace emulator {

// ---- Shared memory of the blocks that are not at their turn.

constexpr unsigned kMostFixed = 48 * 1024;
// So much more than was asked for must stay as it is.
constexpr unsigned kMarginBytes = 4096;
struct Aside {
  char dynamic[kMostShared], fixed[kMostFixed];
};
static Aside aside[kMostBlocks];
static unsigned resident;

// What a launch asked for, and what must stay as it is behind it.
static unsigned kept_bytes() { return dynamic_bytes + kMarginBytes; }
static void put_aside(unsigned block) {
  memcpy(aside[block].dynamic, dynamic_shared, kept_bytes());
  memcpy(aside[block].fixed, __start_convgrad_shared, __stop_convgrad_shared - __start_convgrad_shared);
}
static void bring_back(unsigned block) {
  memcpy(dynamic_shared, aside[block].dynamic, kept_bytes());
  memcpy(__start_convgrad_shared, aside[block].fixed, __stop_convgrad_shared - __start_convgrad_shared);
  resident = block;
}
static char* shared_of(unsigned block, unsigned address, unsigned bytes, unsigned alignment) {
  char* const at = in_shared(address, bytes, alignment);
  if (block >= cluster_blocks) fail("a block that is not in the cluster");
  if (block == resident) return at;
  return at >= dynamic_shared && at < dynamic_shared + kMostShared
             ? aside[block].dynamic + (at - dynamic_shared)
             : aside[block].fixed + (at - __start_convgrad_shared);
}

// ---- Barriers.

struct Arrivals {
  unsigned short expected;
  short pending;
  int bytes_and_phase;  // bytes announced and not here, times 2, and the phase's parity
};
static unsigned pollers[kMostThreads], polling;
static void wake_pollers() {
  for (unsigned i = 0; i < polling; ++i) {
    if (pollers[i] != current) wake(pollers[i]);
  }
  polling = 0;
}
static Arrivals* barrier_of(unsigned block, unsigned address) {
  auto* const barrier = reinterpret_cast<Arrivals*>(shared_of(block, address, 8, 8));
  // As shared memory is spoiled before a block starts.
  if (barrier->expected == 0xffff) fail("a barrier in shared memory that nobody made");
  return barrier;
}
static void make_barrier_of(unsigned address, int arrivals) {
  auto* const barrier = reinterpret_cast<Arrivals*>(in_shared(address, 8, 8));
  *barrier = {static_cast<unsigned short>(arrivals), static_cast<short>(arrivals), 0};
}
// So many arrivals, so many bytes announced (less those that have come).
static void count_at(unsigned block, unsigned address, int arrivals, int bytes) {
  Arrivals* const barrier = barrier_of(block, address);
  barrier->pending -= arrivals;
  barrier->bytes_and_phase += 2 * bytes;
  if (barrier->pending < 0) fail("more arrivals than a barrier expects");
  if (barrier->pending > 0 || barrier->bytes_and_phase >> 1 != 0) return;
  barrier->pending = barrier->expected;
  barrier->bytes_and_phase ^= 1;
  wake_pollers();
}

// ---- Tensor maps, as tests/emulator/maps.py writes them.

struct EncodedMap {
  unsigned magic;
  unsigned char dims, item_bytes, swizzle, pixel_map;
  const char* address;
  unsigned long long strides[4];
  unsigned sizes[5];
  unsigned char steps[5], rounds;
  unsigned short box[5];  // of a pixel map: channels, pixels
  short lower[3], upper[3];
};
static_assert(sizeof(EncodedMap) <= 128);

static const EncodedMap* map_at(const void* map) {
  const auto* const encoded = static_cast<const EncodedMap*>(map);
  if (encoded->magic != 0x70616d74) fail("a tensor map that is none");
  return encoded;
}

static void round_to_tf32(char* at) {
  unsigned word;
  memcpy(&word, at, 4);
  const bool number = (word & 0x7fffffffu) <= 0x7f800000u;
  word = number ? (word + 0xfff + (word >> 13 & 1)) & ~0x1fffu : 0x7fffe000u;
  memcpy(at, &word, 4);
}

// One row of a box: `elements` from these coordinates on, to or from `shared`, swizzled.
static void copy_row(const EncodedMap& map, const int* at, unsigned elements, unsigned block,
                     unsigned shared, bool stored) {
  bool inside = true;
  const char* row = map.address;
  for (int d = 1; d < map.dims; ++d) {
    inside = inside && at[d] >= 0 && static_cast<unsigned>(at[d]) < map.sizes[d];
    row += static_cast<long long>(at[d]) * static_cast<long long>(map.strides[d - 1]);
  }
  const unsigned mask = map.swizzle == 128 ? 7 : map.swizzle == 64 ? 3 : map.swizzle == 32 ? 1 : 0;
  // By chunks of 16 bytes: what lies in one stays together.
  const unsigned per_chunk = 16 / map.item_bytes;
  for (unsigned i = 0; i < elements; i += per_chunk) {
    const unsigned count = elements - i < per_chunk ? elements - i : per_chunk;
    const unsigned address = shared + i * map.item_bytes, bytes = count * map.item_bytes;
    char* const here = shared_of(block, address ^ (address >> 7 & mask) << 4, bytes, 16);
    const long long column = static_cast<long long>(at[0]) + i, size = map.sizes[0];
    const long long first = column < 0 ? -column : 0;
    const long long end = column + count > size ? size - column : count;
    const bool there = inside && first < end;
    if (!stored && !(there && first == 0 && end == count)) memset(here, 0, bytes);
    if (!there) continue;
    const char* const from = row + (column + first) * map.item_bytes;
    const unsigned moved = static_cast<unsigned>(end - first) * map.item_bytes;
    char* const to = here + first * map.item_bytes;
    check_global(from, moved, map.item_bytes);
    if (stored) {
      memcpy(const_cast<char*>(from), to, moved);
      continue;
    }
    memcpy(to, from, moved);
    for (unsigned word_at = 0; map.rounds && word_at < moved; word_at += 4) round_to_tf32(to + word_at);
  }
}

static unsigned copy_tile(const EncodedMap& map, const int* at, unsigned block, unsigned shared,
                          bool stored) {
  int extent[5] = {1, 1, 1, 1, 1}, index[5] = {};
  for (int d = 0; d < map.dims; ++d) extent[d] = (map.box[d] + map.steps[d] - 1) / map.steps[d];
  unsigned bytes = 0;
  for (index[4] = 0; index[4] < extent[4]; ++index[4]) {
    for (index[3] = 0; index[3] < extent[3]; ++index[3]) {
      for (index[2] = 0; index[2] < extent[2]; ++index[2]) {
        for (index[1] = 0; index[1] < extent[1]; ++index[1]) {
          int from[5];
          for (int d = 0; d < map.dims; ++d) from[d] = at[d] + index[d] * map.steps[d];
          copy_row(map, from, extent[0], block, shared + bytes, stored);
          bytes += extent[0] * map.item_bytes;
        }
      }
    }
  }
  return bytes;
}

static unsigned copy_pixels(const EncodedMap& map, const int* at, const int* by, unsigned block,
                            unsigned shared) {
  const int spatial = map.dims - 2;
  const unsigned channels = map.box[0], pixels = map.box[1];
  int base[5];
  memcpy(base, at, sizeof base);
  for (unsigned pixel = 0; pixel < pixels; ++pixel) {
    int from[5] = {base[0]};
    for (int d = 1; d <= spatial; ++d) from[d] = base[d] + by[d - 1];
    from[spatial + 1] = base[spatial + 1];
    copy_row(map, from, channels, block, shared + pixel * channels * map.item_bytes, false);
    int d = 1;
    for (; d <= spatial; ++d) {
      base[d] += map.steps[d];
      if (base[d] <= static_cast<int>(map.sizes[d]) - 1 + map.upper[d - 1]) break;
      base[d] = map.lower[d - 1];
    }
    if (d > spatial) ++base[spatial + 1];
  }
  return pixels * channels * map.item_bytes;
}

// ---- Copies under way.

enum class Kind { kTile, kPixels, kBytes, kSent };
struct Transfer {
  Kind kind;
  const EncodedMap* map;
  const char* from;  // kBytes
  unsigned bytes;    // kBytes, kSent
  int at[5], by[3];
  unsigned block, shared, barrier;  // the block whose shared memory and barrier are meant
  unsigned thread, group;           // of stores
  unsigned sender, sent;            // kSent: the block whose shared memory is read, and where
};
constexpr unsigned kMostTransfers = 4096;
static Transfer loads[kMostTransfers], stores[kMostTransfers];
static unsigned load_count, store_count, coin, store_groups[kMostThreads];

static void forget_transfers() {
  load_count = store_count = polling = 0;
  memset(store_groups, 0, sizeof store_groups);
}
static const char* transfers_left() {
  if (load_count > 0) return "a copy to shared memory that nobody waited for";
  if (store_count > 0) return "a copy from shared memory that nobody waited for";
  return nullptr;
}

static void bring(const Transfer& load) {
  unsigned bytes = load.bytes;
  if (load.kind == Kind::kTile) {
    bytes = copy_tile(*load.map, load.at, load.block, load.shared, false);
  } else if (load.kind == Kind::kPixels) {
    bytes = copy_pixels(*load.map, load.at, load.by, load.block, load.shared);
  } else if (load.kind == Kind::kSent) {
    memcpy(shared_of(load.block, load.shared, bytes, 16), shared_of(load.sender, load.sent, bytes, 16),
           bytes);
  } else {
    check_global(load.from, bytes, 16);
    memcpy(shared_of(load.block, load.shared, bytes, 16), load.from, bytes);
  }
  count_at(load.block, load.barrier, 0, -static_cast<int>(bytes));
}
static void check_box(const Transfer& one) {
  if (one.map->pixel_map != (one.kind == Kind::kPixels)) fail("a map of the other kind");
  if (one.at[0] * one.map->item_bytes % 16 != 0) {
    fail("an innermost coordinate that is no multiple of 16 bytes");
  }
  const unsigned repeat = one.map->swizzle == 0 ? 128 : one.map->swizzle * 8;
  if (one.shared % repeat != 0) fail("a box that does not start where its swizzle's pattern does");
}
static void start_load(const Transfer& load) {
  if (load.kind < Kind::kBytes) check_box(load);
  coin = coin * 1664525 + 1013904223;
  if (coin >> 31 != 0) return bring(load);
  if (load_count == kMostTransfers) fail("more copies under way than the emulator has room for");
  loads[load_count++] = load;
  wake_pollers();
}
// What was to come to this barrier comes.
static void bring_all(unsigned block, unsigned barrier) {
  for (unsigned i = 0; i < load_count;) {
    if (loads[i].block != block || loads[i].barrier != barrier) {
      ++i;
      continue;
    }
    const Transfer load = loads[i];
    memmove(loads + i, loads + i + 1, (--load_count - i) * sizeof *loads);
    bring(load);
  }
}
static bool phase_is_over(unsigned barrier, unsigned parity) {
  bring_all(current_block(), barrier);
  return (barrier_of(current_block(), barrier)->bytes_and_phase & 1) != static_cast<int>(parity);
}
static void wait_for_change() {
  pollers[polling++] = current;
  wait_for_some();
}

static void start_store(const Transfer& store) {
  check_box(store);
  for (int d = 0; d < store.map->dims && store.kind == Kind::kTile; ++d) {
    if (store.at[d] < 0) fail("a store to coordinates before the tensor");
  }
  if (store_count == kMostTransfers) fail("more copies under way than the emulator has room for");
  stores[store_count] = store;
  stores[store_count].thread = current;
  stores[store_count++].group = store_groups[current];
}
static void finish_stores(unsigned pending) {
  for (unsigned i = 0; i < store_count;) {
    const Transfer store = stores[i];
    if (store.thread != current || store.group + pending >= store_groups[current]) {
      ++i;
      continue;
    }
    memmove(stores + i, stores + i + 1, (--store_count - i) * sizeof *stores);
    copy_tile(*store.map, store.at, store.block, store.shared, true);
  }
}

}  // namespace emulator

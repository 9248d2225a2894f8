// The boxes of pixels of a block that computes the gradient of a grouped convolution's weight.
#pragma once

#include "core/divider.cuh"
#include "core/elements.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16;

// The first positions of a phase in x and y.
struct Phase {
  int x, y;
};

// What the first copies need, adjacent. Tiles are those of the largest phase.
struct BoxWalk {
  int boxes, more;       // boxes of a split, and one more for the first `more` ones
  Divider by_tiles[3];   // D, H, W
  int tiles[4];          // images, D, H, W
  int tile_images;
  int x_next[3], y_next[3];  // distance of tiles
  int tap_next[2];           // distance of taps along D and H
  Divider by_tap_rows;
  int tap_rows;              // positions of taps along H if a block has one of them, else 1
  int phases[3];
  Phase first[3];
  Phase phase[3][kMaxPhases];
};

// A block's position of taps along D and H, and its boxes.
struct BlockPart {
  int t, r, begin, end;

  __device__ __forceinline__ BlockPart(const BoxWalk& args, int plane, int split)
      : t(divide(plane, args.by_tap_rows)), r(plane - t * args.tap_rows) {
    begin = split * args.boxes + min(split, args.more);
    end = begin + args.boxes + (split < args.more);
  }
};

// Boxes in turn: the first image, and the first positions in x and y.
struct Boxes {
  const BoxWalk& args;
  int phase = 0, n, d, h, w, of_taps[3];
  int image, x[3], y[3];

  __device__ __forceinline__ Boxes(const BoxWalk& args, const BlockPart& part)
      : args(args), of_taps{part.t * args.tap_next[0], part.r * args.tap_next[1], 0} {
    int index = part.begin;
    if (args.phases[0] * args.phases[1] * args.phases[2] > 1) {
      const int in_phase = args.tiles[0] * args.tiles[1] * args.tiles[2] * args.tiles[3];
      phase = index / in_phase;
      index -= phase * in_phase;
    }
    const int rows = divide(index, args.by_tiles[2]), planes = divide(rows, args.by_tiles[1]);
    w = index - rows * args.tiles[3];
    h = rows - planes * args.tiles[2];
    n = divide(planes, args.by_tiles[0]);
    d = planes - n * args.tiles[1];
    place();
  }
  __device__ __forceinline__ void place() {
    image = n * args.tile_images;
    const int at[3] = {d, h, w};
    int left = phase;
#pragma unroll
    for (int dim = 2; dim >= 0; --dim) {
      Phase of = args.first[dim];
      if (phase > 0) {
        const int above = left / args.phases[dim];
        of = args.phase[dim][left - above * args.phases[dim]];
        left = above;
      }
      x[dim] = of.x + of_taps[dim] + at[dim] * args.x_next[dim];
      y[dim] = of.y + at[dim] * args.y_next[dim];
    }
  }
  __device__ __forceinline__ void next() {
    if (++w == args.tiles[3]) {
      w = 0;
      if (++h == args.tiles[2]) {
        h = 0;
        if (++d == args.tiles[1]) {
          d = 0;
          if (++n == args.tiles[0]) n = 0, ++phase;
        }
      }
    }
    place();
  }
};

}  // namespace convgrad

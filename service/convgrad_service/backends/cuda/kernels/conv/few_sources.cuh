// Kernel parameters of few_sources.cu.
#pragma once

#include "core/divider.cuh"

namespace convgrad {

// Strides count elements.
struct FewSourcesArgs {
  const void* source;
  const void* weight;
  void* result;
  const void* accumulate;  // like the result, or null
  const void* bias;        // one per channel of the result, or null
  i64 source_stride[3];    // images, channels, pixels
  i64 result_stride[3];
  i64 weight_stride[2];  // channels of the source, of the result
  int source_channels, result_channels;
  int pixels;       // of an image
  int images;
  int items;        // vectors of pixels, or of channels, of all images
  int channels;     // of the result, that a block has; planes alone
  Divider by_image;  // items of an image, or of a pixel
  int activation;
  float alpha, beta;
};

}  // namespace convgrad

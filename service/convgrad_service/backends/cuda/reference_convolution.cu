// Convolutions in float64 from their definition, with the sums of magnitudes beside them: what
// results are held against on a GPU. It shares nothing with the kernels that it judges.
//
// Tensors are dense, with the groups apart: x (N, G, C, D, H, W), y (N, G, K, Z, P, Q),
// w (G, K, C, T, R, S). One thread computes one element, in a loop over its terms; grid.x covers
// the elements, and in backward_weight grid.y the parts into which the samples are cut. Input i and
// output o meet at tap r where i = o * stride + r * dilation - before; only what meets is
// multiplied. Deterministic. Indices are 64 bits.

struct Geometry {
    long long n, g, c, k;
    long long in[3], out[3], tap[3], stride[3], before[3], dilation[3];
};

__device__ long long source(const Geometry& s, int axis, long long o, long long r) {
    long long i = o * s.stride[axis] + r * s.dilation[axis] - s.before[axis];
    return i >= 0 && i < s.in[axis] ? i : -1;
}

__device__ long long sink(const Geometry& s, int axis, long long i, long long r) {
    long long at = i + s.before[axis] - r * s.dilation[axis];
    if (at < 0 || at % s.stride[axis] != 0) return -1;
    long long o = at / s.stride[axis];
    return o < s.out[axis] ? o : -1;
}

__device__ long long volume(const long long* extent) { return extent[0] * extent[1] * extent[2]; }

extern "C" __global__ void forward(const Geometry* shape, const double* x, const double* w,
                                   double* value, double* magnitude) {
    const Geometry s = *shape;
    const long long outputs = volume(s.out), inputs = volume(s.in), taps = volume(s.tap);
    long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= s.n * s.g * s.k * outputs) return;
    long long rest = e;
    const long long q = rest % s.out[2]; rest /= s.out[2];
    const long long p = rest % s.out[1]; rest /= s.out[1];
    const long long z = rest % s.out[0]; rest /= s.out[0];
    const long long k = rest % s.k; rest /= s.k;
    const long long g = rest % s.g, n = rest / s.g;
    const double* from = x + (n * s.g + g) * s.c * inputs;
    const double* weights = w + (g * s.k + k) * s.c * taps;
    double sum = 0.0, size = 0.0;
    long long tap = 0;
    for (long long t = 0; t < s.tap[0]; ++t)
        for (long long r = 0; r < s.tap[1]; ++r)
            for (long long u = 0; u < s.tap[2]; ++u, ++tap) {
                const long long d = source(s, 0, z, t), h = source(s, 1, p, r), v = source(s, 2, q, u);
                if (d < 0 || h < 0 || v < 0) continue;
                const long long at = (d * s.in[1] + h) * s.in[2] + v;
                for (long long c = 0; c < s.c; ++c) {
                    const double one = from[c * inputs + at] * weights[c * taps + tap];
                    sum += one;
                    size += fabs(one);
                }
            }
    value[e] = sum;
    magnitude[e] = size;
}

extern "C" __global__ void backward_data(const Geometry* shape, const double* y, const double* w,
                                         double* value, double* magnitude) {
    const Geometry s = *shape;
    const long long outputs = volume(s.out), inputs = volume(s.in), taps = volume(s.tap);
    long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= s.n * s.g * s.c * inputs) return;
    long long rest = e;
    const long long v = rest % s.in[2]; rest /= s.in[2];
    const long long h = rest % s.in[1]; rest /= s.in[1];
    const long long d = rest % s.in[0]; rest /= s.in[0];
    const long long c = rest % s.c; rest /= s.c;
    const long long g = rest % s.g, n = rest / s.g;
    const double* from = y + (n * s.g + g) * s.k * outputs;
    const double* weights = w + (g * s.k * s.c + c) * taps;
    double sum = 0.0, size = 0.0;
    long long tap = 0;
    for (long long t = 0; t < s.tap[0]; ++t)
        for (long long r = 0; r < s.tap[1]; ++r)
            for (long long u = 0; u < s.tap[2]; ++u, ++tap) {
                const long long z = sink(s, 0, d, t), p = sink(s, 1, h, r), q = sink(s, 2, v, u);
                if (z < 0 || p < 0 || q < 0) continue;
                const long long at = (z * s.out[1] + p) * s.out[2] + q;
                for (long long k = 0; k < s.k; ++k) {
                    const double one = from[k * outputs + at] * weights[k * s.c * taps + tap];
                    sum += one;
                    size += fabs(one);
                }
            }
    value[e] = sum;
    magnitude[e] = size;
}

// value and magnitude hold gridDim.y parts, one after another.
extern "C" __global__ void backward_weight(const Geometry* shape, const double* x, const double* y,
                                           double* value, double* magnitude) {
    const Geometry s = *shape;
    const long long outputs = volume(s.out), inputs = volume(s.in), taps = volume(s.tap);
    const long long elements = s.g * s.k * s.c * taps;
    long long e = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (e >= elements) return;
    long long rest = e;
    const long long u = rest % s.tap[2]; rest /= s.tap[2];
    const long long r = rest % s.tap[1]; rest /= s.tap[1];
    const long long t = rest % s.tap[0]; rest /= s.tap[0];
    const long long c = rest % s.c; rest /= s.c;
    const long long k = rest % s.k, g = rest / s.k;
    const long long first = s.n * blockIdx.y / gridDim.y, last = s.n * (blockIdx.y + 1) / gridDim.y;
    double sum = 0.0, size = 0.0;
    for (long long n = first; n < last; ++n) {
        const double* a = x + ((n * s.g + g) * s.c + c) * inputs;
        const double* b = y + ((n * s.g + g) * s.k + k) * outputs;
        for (long long z = 0; z < s.out[0]; ++z) {
            const long long d = source(s, 0, z, t);
            if (d < 0) continue;
            for (long long p = 0; p < s.out[1]; ++p) {
                const long long h = source(s, 1, p, r);
                if (h < 0) continue;
                for (long long q = 0; q < s.out[2]; ++q) {
                    const long long v = source(s, 2, q, u);
                    if (v < 0) continue;
                    const double one =
                        a[(d * s.in[1] + h) * s.in[2] + v] * b[(z * s.out[1] + p) * s.out[2] + q];
                    sum += one;
                    size += fabs(one);
                }
            }
        }
    }
    value[blockIdx.y * elements + e] = sum;
    magnitude[blockIdx.y * elements + e] = size;
}

// Root mean square norms of rows of WIDTH, LANES threads a row, PER packs a thread; sums in float32.
#define EACH (PER * WIDE)

static __device__ __forceinline__ float total(float sum) {
#pragma unroll
  for (int distance = LANES / 2; distance; distance >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  return sum;
}

// out = weight · x / sqrt(mean(x²) + eps)
extern "C" __global__ void rms_norm(const T* x, const T* weight, T* out, int rows, float eps) {
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, together = blockDim.x / LANES;
  for (int first = blockIdx.x * together; first < rows; first += gridDim.x * together) {
    const int row = first + own;
    Pack packs[PER];
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll
      for (int k = 0; k < PER; k++) {
        packs[k] = load(x, (long long)row * WIDTH + (k * LANES + lane) * WIDE, WIDE, true);
#pragma unroll
        for (int i = 0; i < WIDE; i++) sum += number(packs[k].part[i]) * number(packs[k].part[i]);
      }
    }
    const float scale = rsqrtf(total(sum) / WIDTH + eps);
    if (row < rows) {
#pragma unroll
      for (int k = 0; k < PER; k++) {
        const int at = (k * LANES + lane) * WIDE;
        Pack w = load(weight, at, WIDE, true), result;
#pragma unroll
        for (int i = 0; i < WIDE; i++)
          result.part[i] = rounded(number(w.part[i]) * number(rounded(number(packs[k].part[i]) * scale)));
        store(out, (long long)row * WIDTH + at, WIDE, true, result);
      }
    }
  }
}

// With s the scale of a row: d_x = s · g·w − x · s³ · mean(g·w·x). If `weighs`, sums of g · x · s over the rows of each
// block go to d_weight [blocks, WIDTH].
extern "C" __global__ void rms_norm_gradient(
    const T* x, const T* weight, const T* above, T* d_x, float* d_weight, int rows, int weighs, float eps) {
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, together = blockDim.x / LANES;
  float sums[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) sums[i] = 0.0f;
  for (int first = blockIdx.x * together; first < rows; first += gridDim.x * together) {
    const int row = first + own;
    Pack packs[PER], up[PER];
    float square = 0.0f, along = 0.0f;
    if (row < rows) {
#pragma unroll
      for (int k = 0; k < PER; k++) {
        const int at = (k * LANES + lane) * WIDE;
        packs[k] = load(x, (long long)row * WIDTH + at, WIDE, true);
        up[k] = load(above, (long long)row * WIDTH + at, WIDE, true);
        Pack w = load(weight, at, WIDE, true);
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          const float value = number(packs[k].part[i]);
          square += value * value;
          along += number(up[k].part[i]) * number(w.part[i]) * value;
        }
      }
    }
    const float scale = rsqrtf(total(square) / WIDTH + eps);
    const float back = total(along) / WIDTH * scale * scale * scale;
    if (row < rows) {
#pragma unroll
      for (int k = 0; k < PER; k++) {
        const int at = (k * LANES + lane) * WIDE;
        Pack w = load(weight, at, WIDE, true), result;
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          const float value = number(packs[k].part[i]), g = number(up[k].part[i]);
          result.part[i] = rounded(scale * g * number(w.part[i]) - value * back);
          sums[k * WIDE + i] += g * value * scale;
        }
        store(d_x, (long long)row * WIDTH + at, WIDE, true, result);
      }
    }
  }
  if (!weighs) return;
  __shared__ float whole[WIDTH];
  for (int turn = 0; turn < together; turn++) {
    if (own == turn) {
#pragma unroll
      for (int k = 0; k < PER; k++)
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
          const int at = (k * LANES + lane) * WIDE + i;
          whole[at] = sums[k * WIDE + i] + (turn ? whole[at] : 0.0f);
        }
    }
    __syncthreads();
  }
  for (int at = threadIdx.x; at < WIDTH; at += blockDim.x) d_weight[(long long)blockIdx.x * WIDTH + at] = whole[at];
}

// The largest number of a set and its first place, Σ e^(x - largest), and Σ x.
struct Seen {
  float top, total, sum;
  int place;
};

static __device__ __forceinline__ Seen together(const Seen& a, const Seen& b) {
  Seen both;
  bool first = a.top > b.top || (a.top == b.top && a.place < b.place);
  both.top = first ? a.top : b.top;
  both.place = first ? a.place : b.place;
  both.total = a.total * expf(a.top - both.top) + b.total * expf(b.top - both.top);
  both.sum = a.sum + b.sum;
  return both;
}

static __device__ __forceinline__ Seen of_warp(Seen seen) {
#pragma unroll
  for (int distance = 16; distance; distance >>= 1) {
    Seen other;
    other.top = __shfl_xor_sync(0xffffffff, seen.top, distance);
    other.total = __shfl_xor_sync(0xffffffff, seen.total, distance);
    other.sum = __shfl_xor_sync(0xffffffff, seen.sum, distance);
    other.place = __shfl_xor_sync(0xffffffff, seen.place, distance);
    seen = together(seen, other);
  }
  return seen;
}

// One block for each row of logits [rows, words]: its weighted loss, whether its largest logit is the target's, and
// the gradient weight · (softmax - (1 - smoothing) · onehot - smoothing / words). Not a number stays not a number.
extern "C" __global__ void cross_entropy(
    const T* logits, const int* targets, const float* weights, T* gradient, float* losses, float* correct, int words,
    float smoothing) {
  const T* row = logits + (long long)blockIdx.x * words;
  T* slope = gradient + (long long)blockIdx.x * words;
  const float weight = weights[blockIdx.x];
  const int target = targets[blockIdx.x];
  const bool whole = words % WIDE == 0 && aligned(logits) && aligned(gradient);
  if (weight == 0.0f) {
    for (int at = threadIdx.x * WIDE; at < words; at += blockDim.x * WIDE) {
      Pack nothing;
#pragma unroll
      for (int i = 0; i < WIDE; i++) nothing.part[i] = rounded(0.0f);
      store(slope, at, words - at, whole, nothing);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = correct[blockIdx.x] = 0.0f;
    return;
  }
  Seen seen = {-3.0e38f, 0.0f, 0.0f, 2147483647};
  for (int at = threadIdx.x * WIDE; at < words; at += blockDim.x * WIDE) {
    Pack pack = load(row, at, words - at, whole);
    float value[WIDE], top = seen.top;
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      value[i] = at + i < words ? number(pack.part[i]) : -3.0e38f;
      if (value[i] > top) {
        top = value[i];
        seen.place = at + i;
      }
    }
    seen.total *= expf(seen.top - top);
    seen.top = top;
#pragma unroll
    for (int i = 0; i < WIDE; i++)
      if (at + i < words) {
        seen.total += expf(value[i] - top);
        seen.sum += value[i];
      }
  }
  __shared__ Seen of_warps[32];
  seen = of_warp(seen);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = seen;
  __syncthreads();
  if (threadIdx.x < 32) {
    Seen none = {-3.0e38f, 0.0f, 0.0f, 2147483647};
    seen = of_warp(threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : none);
    if (threadIdx.x == 0) of_warps[0] = seen;
  }
  __syncthreads();
  seen = of_warps[0];
  if (threadIdx.x == 0) {
    float loss = logf(seen.total) + seen.top - (1.0f - smoothing) * number(row[target]);
    if (smoothing != 0.0f) loss -= smoothing * (seen.sum / words);
    losses[blockIdx.x] = weight * loss;
    correct[blockIdx.x] = seen.place == target ? weight : 0.0f;
  }
  const float scale = weight / seen.total, spread = smoothing / words * weight, hit = (1.0f - smoothing) * weight;
  for (int at = threadIdx.x * WIDE; at < words; at += blockDim.x * WIDE) {
    Pack pack = load(row, at, words - at, whole), result;
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      float share = expf(number(pack.part[i]) - seen.top) * scale - spread;
      result.part[i] = rounded(at + i == target ? share - hit : share);
    }
    store(slope, at, words - at, whole, result);
  }
}

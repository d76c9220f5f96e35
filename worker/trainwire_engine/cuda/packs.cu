// Kernels over T, which `compiler.prelude` defines with `number` (T to float) and `rounded` (float to T).
// No header is included: reading MLX's takes NVRTC a second and a half for each module, these compile in 0.1 s.

#define WIDE (16 / (int)sizeof(T))

struct __align__(16) Pack {
  T part[WIDE];
};

static __device__ __forceinline__ bool aligned(const void* pointer) {
  return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

// One pack from `at` on, of which the first `count` parts exist.
static __device__ __forceinline__ Pack load(const T* from, long long at, int count, bool whole) {
  if (whole) return *reinterpret_cast<const Pack*>(from + at);
  Pack pack;
#pragma unroll
  for (int i = 0; i < WIDE; i++) pack.part[i] = i < count ? from[at + i] : rounded(0.0f);
  return pack;
}

static __device__ __forceinline__ void store(T* to, long long at, int count, bool whole, const Pack& pack) {
  if (whole) {
    *reinterpret_cast<Pack*>(to + at) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < WIDE; i++)
    if (i < count) to[at + i] = pack.part[i];
}

// Where (slot, head) begins: slots behind each other, or with a length [slots / length, heads, length].
static __device__ __forceinline__ long long place(int slot, int head, int heads, int width, int length) {
  if (length == 0) return ((long long)slot * heads + head) * width;
  return ((long long)(slot / length * heads + head) * length + slot % length) * width;
}

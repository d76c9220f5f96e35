// out[slot] = row index[slot] of up to four sources behind each other, zeros where the index is negative. `first`,
// `second` and `third` are the rows before the end of those sources.
extern "C" __global__ void join(
    const T* a, const T* b, const T* c, const T* d, const int* index, T* out, int slots, int width, int first, int second,
    int third) {
  const int packs = (width + WIDE - 1) / WIDE;
  const bool whole = width % WIDE == 0 && aligned(a) && aligned(b) && aligned(c) && aligned(d) && aligned(out);
  const int size = slots * packs;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    const int at = i % packs * WIDE, slot = i / packs;
    const int count = width - at < WIDE ? width - at : WIDE, row = index[slot];
    Pack value;
#pragma unroll
    for (int k = 0; k < WIDE; k++) value.part[k] = rounded(0.0f);
    if (row >= 0) {
      const T* source = row < first ? a : row < second ? b : row < third ? c : d;
      const int before = row < first ? 0 : row < second ? first : row < third ? second : third;
      value = load(source, (long long)(row - before) * width + at, count, whole);
    }
    store(out, (long long)slot * width + at, count, whole, value);
  }
}

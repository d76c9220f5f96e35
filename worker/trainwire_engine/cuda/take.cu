// out[slot] = x[index[slot]], zeros where that is negative; slots of [heads, width], either way laid out.
extern "C" __global__ void take(
    const T* x, const int* index, T* out, int slots, int heads, int width, int length_from, int length_to) {
  const int packs = (width + WIDE - 1) / WIDE;
  const bool whole = width % WIDE == 0 && aligned(x) && aligned(out);
  const int size = slots * heads * packs;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    const int pack = i % packs, slot = i / packs / heads, head = i / packs % heads;
    const int at = pack * WIDE, count = width - at < WIDE ? width - at : WIDE;
    const int source = index[slot];
    Pack value;
#pragma unroll
    for (int k = 0; k < WIDE; k++) value.part[k] = rounded(0.0f);
    if (source >= 0) value = load(x, place(source, head, heads, width, length_from) + at, count, whole);
    store(out, place(slot, head, heads, width, length_to) + at, count, whole, value);
  }
}

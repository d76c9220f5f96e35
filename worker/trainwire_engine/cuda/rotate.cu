// out[slot] = x[index[slot]] turned by the angles of its place, zeros where the index is negative; backwards with
// `sign` -1. Slots are laid out as for `take`. A slot's place is the one in its row, of whichever side has rows.
// `indexed`: 0 out[slot] = x[slot]; 1 as said; 2 slots stay where they are and the index holds their places.
// The angle of pair i is place · scale · base^(−i / half), its halves of the width turned together (not interleaved);
// with frequencies given, place · scale / frequency[i]. As mlx/backend/cuda/rope.cu computes it.
#define HEADS 4

extern "C" __global__ void rotate(
    const T* x, const int* index, const float* frequencies, T* out, int slots, int heads, int width, int length_from,
    int length_to, int indexed, float base, float scale, float sign) {
  const int half = width / 2, packs = half / WIDE, groups = (heads + HEADS - 1) / HEADS;
  const int size = slots * groups * packs;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    const int pack = i % packs, group = i / packs % groups, slot = i / packs / groups;
    const int source = indexed == 1 ? index[slot] : slot;
    const int at = pack * WIDE;
    float cosine[WIDE], sine[WIDE];
    const int place_in_row = indexed == 2 ? index[slot] : length_to ? slot % length_to : source % length_from;
    const float angle = scale * (float)place_in_row;
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
      float per_place = base != 0.0f ? exp2f(-((float)(at + k) / (float)half) * base) : (float)(1.0 / frequencies[at + k]);
      sincosf(angle * per_place, &sine[k], &cosine[k]);
      sine[k] *= sign;
    }
    for (int head = group * HEADS; head < heads && head < (group + 1) * HEADS; head++) {
      Pack first, second;
      if (source >= 0) {
        const long long from = place(source, head, heads, width, length_from) + at;
        Pack a = load(x, from, WIDE, true), b = load(x, from + half, WIDE, true);
#pragma unroll
        for (int k = 0; k < WIDE; k++) {
          float p = number(a.part[k]), q = number(b.part[k]);
          first.part[k] = rounded(p * cosine[k] - q * sine[k]);
          second.part[k] = rounded(p * sine[k] + q * cosine[k]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < WIDE; k++) first.part[k] = second.part[k] = rounded(0.0f);
      }
      const long long to = place(slot, head, heads, width, length_to) + at;
      store(out, to, WIDE, true, first);
      store(out, to + half, WIDE, true, second);
    }
  }
}

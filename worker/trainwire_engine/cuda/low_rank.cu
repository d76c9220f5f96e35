// Products of a wide matrix with RANK-wide ones, for COUNT adapted layers with one input, by tensor cores.
// T is a 16-bit type. A sum's order is free: wherever columns can be dealt to threads so that each holds 16 bytes
// side by side, they are. Lane 4 · g + c of a warp holds row g of a tile, and the pairs c of its columns.
#define TILES (RANK / 8)
#if COUNT == 1
#define LIST(M) M(0)
#define EVERY(M) M(0)
#elif COUNT == 2
#define LIST(M) M(0), M(1)
#define EVERY(M) M(0) M(1)
#elif COUNT == 3
#define LIST(M) M(0), M(1), M(2)
#define EVERY(M) M(0) M(1) M(2)
#else
#define LIST(M) M(0), M(1), M(2), M(3)
#define EVERY(M) M(0) M(1) M(2) M(3)
#endif
#if BFLOAT
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif
#define WARPS 4

typedef unsigned int Pair;

struct __align__(16) Four {
  Pair pair[4];
};

// 16 bytes, zeros if they are not there. Volatile, so that the compiler leaves loads before the products that were
// written before them: of what it moves behind, each costs a wait for the memory.
static __device__ __forceinline__ Four four(const T* from, bool there) {
  Four m;
  asm volatile(
      "{.reg .pred there;\n setp.ne.u32 there, %5, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n mov.u32 %2, 0;\n "
      "mov.u32 %3, 0;\n @there ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "=&r"(m.pair[0]), "=&r"(m.pair[1]), "=&r"(m.pair[2]), "=&r"(m.pair[3])
      : "l"(__cvta_generic_to_global(from)), "r"((unsigned)there));
  return m;
}

// sum[16, 8] += a[16, 16] · b[16, 8]
static __device__ __forceinline__ void multiply(float* sum, Pair a0, Pair a1, Pair a2, Pair a3, Pair b0, Pair b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// sum[16, 8] += a[16, 8] · b[8, 8]
static __device__ __forceinline__ void multiply(float* sum, Pair a0, Pair a1, Pair b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

static __device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

static __device__ __forceinline__ Four transposed_matrices(const void* row) {
  Four m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.pair[0]), "=r"(m.pair[1]), "=r"(m.pair[2]), "=r"(m.pair[3])
               : "r"(shared_address(row)));
  return m;
}

static __device__ __forceinline__ void two_transposed_matrices(const void* row, Pair& first, Pair& second) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(first), "=r"(second)
               : "r"(shared_address(row)));
}

// 32-column pieces that a warp has under way at a time, and its rows of weights in shared memory, two left out after
// every eight: no two of a matrix in one bank.
#define PIECES (RANK <= 16 ? 4 : RANK <= 32 ? 2 : 1)
#define PLACES 38
#define NARROW_WARPS (RANK <= 16 ? 8 : 4)

// What a lane multiplies next: of two rows and of the weights.
struct Operands {
  Four upper[PIECES], lower[PIECES], factor[PIECES][TILES];
};

template <bool down>
static __device__ __forceinline__ void fetch(
    Operands& to, const T* x, const T* weights, int begin, int first, int second, int rows, int width) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const int at = begin + p * 32, column = at + c * 8;
    to.upper[p] = four(x + (long long)first * width + column, first < rows && column < width);
    to.lower[p] = four(x + (long long)second * width + column, second < rows && column < width);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      if (down) to.factor[p][n] = four(weights + (long long)(at + lane) * RANK + n * 8, at + lane < width);
      else to.factor[p][n] = four(weights + (long long)(n * 8 + g) * width + column, column < width);
    }
  }
}

// z [rows, RANK] = x [rows, width] · weights, which lie as [width, RANK] if `down`, else as [RANK, width].
// A block makes 16 rows; its warps share the columns out and add up.
template <bool down>
static __device__ __forceinline__ void narrow(const T* x, const T* weights, T* z, int rows, int width) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int first = blockIdx.x * 16 + g, second = first + 8, step = NARROW_WARPS * 32 * PIECES;
  __shared__ Four staged[down ? NARROW_WARPS * PIECES * TILES * PLACES : 1];
  float sum[TILES][4] = {};
  Operands now, next;
  int begin = warp * 32 * PIECES;
  fetch<down>(now, x, weights, begin, first, second, rows, width);
  for (; begin < width; begin += step, now = next) {
    fetch<down>(next, x, weights, begin + step, first, second, rows, width);
    if (down) {
      Four* own = staged + warp * PIECES * TILES * PLACES;
#pragma unroll
      for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int n = 0; n < TILES; n++) own[(p * TILES + n) * PLACES + lane + lane / 8 * 2] = now.factor[p][n];
      __syncwarp();
      const int row = lane % 8, from = row / 2 * 8 + lane / 8 * 2 + row % 2;
#pragma unroll
      for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
          now.factor[p][n] = transposed_matrices(own + (p * TILES + n) * PLACES + from + from / 8 * 2);
      __syncwarp();
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const Pair *a = now.upper[p].pair, *b = now.lower[p].pair, *f = now.factor[p][n].pair;
        multiply(sum[n], a[0], b[0], a[1], b[1], f[0], f[1]);
        multiply(sum[n], a[2], b[2], a[3], b[3], f[2], f[3]);
      }
  }
  __shared__ float parts[NARROW_WARPS][16][RANK];
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) parts[warp][g + i / 2 * 8][n * 8 + c * 2 + i % 2] = sum[n][i];
  __syncthreads();
  for (int at = threadIdx.x; at < 16 * RANK; at += NARROW_WARPS * 32) {
    const int row = blockIdx.x * 16 + at / RANK;
    float whole = 0.0f;
#pragma unroll
    for (int w = 0; w < NARROW_WARPS; w++) whole += parts[w][at / RANK][at % RANK];
    if (row < rows) z[(long long)row * RANK + at % RANK] = rounded(whole);
  }
}

#define X(i) const T* x##i
#define WEIGHTS(i) const T* weights##i
#define Z(i) T* z##i
#define WIDTH(i) int width##i

// One input for all, weights [width, RANK].
extern "C" __global__ void __launch_bounds__(NARROW_WARPS * 32)
    narrow_one(const T* x, LIST(WEIGHTS), LIST(Z), int rows, int width) {
  const T* weights = weights0;
  T* z = z0;
#define OWN(i) \
  if (blockIdx.y == i) weights = weights##i, z = z##i;
  EVERY(OWN)
#undef OWN
  narrow<true>(x, weights, z, rows, width);
}

// An input for each, weights [RANK, width].
extern "C" __global__ void __launch_bounds__(NARROW_WARPS * 32)
    narrow_each(LIST(X), LIST(WEIGHTS), LIST(Z), int rows, LIST(WIDTH)) {
  const T *x = x0, *weights = weights0;
  T* z = z0;
  int width = width0;
#define OWN(i) \
  if (blockIdx.y == i) x = x##i, weights = weights##i, z = z##i, width = width##i;
  EVERY(OWN)
#undef OWN
  narrow<false>(x, weights, z, rows, width);
}

// A warp's 32 columns of RANK-wide weights, [RANK, width] or if `down` [width, RANK]: of tile j those that lane c holds
// are 8 · c + 2 · j and the one after.
template <bool down>
static __device__ __forceinline__ void columns_of(Pair (*held)[4], const T* weights, int begin, int width) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < TILES; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int column = begin + g / 2 * 8 + j * 2 + g % 2, rank = k * 8 + c * 2;
      held[k][j] = 0;
      if (column >= width) continue;
      if (down) held[k][j] = *reinterpret_cast<const Pair*>(weights + (long long)column * RANK + rank);
      else held[k][j] = weights[(long long)rank * width + column] |
                        (Pair)weights[(long long)(rank + 1) * width + column] << 16;
    }
}

// sum += z · weights for 16 rows, of which this lane has two.
static __device__ __forceinline__ void widen(
    float (*sum)[4], Pair (*held)[4], const T* z, int first, int second) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int k = 0; k < TILES; k++) {
    const Pair a = *reinterpret_cast<const Pair*>(z + (long long)first * RANK + k * 8 + c * 2);
    const Pair b = *reinterpret_cast<const Pair*>(z + (long long)second * RANK + k * 8 + c * 2);
#pragma unroll
    for (int j = 0; j < 4; j++) multiply(sum[j], a, b, held[k][j]);
  }
}

#define ROWS 64

static __device__ __forceinline__ void add_base(float* to, const T* base, long long at) {
  const Pack pack = load(base, at, WIDE, true);
#pragma unroll
  for (int i = 0; i < WIDE; i++) to[i] += number(pack.part[i]);
}

// What a lane holds of row `second` (0 or 1 of its two) as 8 numbers side by side.
static __device__ __forceinline__ void gather(float* to, float (*sum)[4], int second, float scale) {
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) to[j * 2 + e] = scale * sum[j][second * 2 + e];
}

static __device__ __forceinline__ void put(T* out, long long at, const float* values) {
  Pack pack;
#pragma unroll
  for (int i = 0; i < WIDE; i++) pack.part[i] = rounded(values[i]);
  store(out, at, WIDE, true, pack);
}

#define BASE(i) const T* base##i
#define NARROW(i) const T* z##i
#define OUT(i) T* out##i

// out = base + scale · z · weights [RANK, width], for each layer apart.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    widen_each(LIST(BASE), LIST(NARROW), LIST(WEIGHTS), LIST(OUT), int rows, float scale, LIST(WIDTH)) {
  const T *base = base0, *z = z0, *weights = weights0;
  T* out = out0;
  int width = width0;
#define OWN(i) \
  if (blockIdx.z == i) base = base##i, z = z##i, weights = weights##i, out = out##i, width = width##i;
  EVERY(OWN)
#undef OWN
  const int begin = (blockIdx.x * WARPS + threadIdx.x / 32) * 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  if (begin >= width) return;
  const int column = begin + c * 8;
  Pair held[TILES][4];
  columns_of<false>(held, weights, begin, width);
#pragma unroll
  for (int turn = 0; turn < ROWS / 16; turn++) {
    const int top = blockIdx.y * ROWS + turn * 16;
    if (top >= rows) return;
    float sum[4][4] = {};
    widen(sum, held, z, min(top + g, rows - 1), min(top + g + 8, rows - 1));
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const int row = top + g + second * 8;
      if (row >= rows || column >= width) continue;
      float values[WIDE];
      gather(values, sum, second, scale);
      add_base(values, base, (long long)row * width + column);
      put(out, (long long)row * width + column, values);
    }
  }
}

// out = the sum over the layers of base + scale · z · weights [width, RANK] turned over.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    widen_all(LIST(BASE), LIST(NARROW), LIST(WEIGHTS), T* out, int rows, float scale, int width) {
  const int begin = (blockIdx.x * WARPS + threadIdx.x / 32) * 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  if (begin >= width) return;
  const int column = begin + c * 8;
  Pair held[COUNT][TILES][4];
#define OWN(i) columns_of<true>(held[i], weights##i, begin, width);
  EVERY(OWN)
#undef OWN
#pragma unroll
  for (int turn = 0; turn < ROWS / 16; turn++) {
    const int top = blockIdx.y * ROWS + turn * 16;
    if (top >= rows) return;
    const int upper = min(top + g, rows - 1), lower = min(top + g + 8, rows - 1);
    float sum[4][4] = {};
#define OWN(i) widen(sum, held[i], z##i, upper, lower);
    EVERY(OWN)
#undef OWN
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const int row = top + g + second * 8;
      if (row >= rows || column >= width) continue;
      float values[WIDE];
      gather(values, sum, second, scale);
#define OWN(i) add_base(values, base##i, (long long)row * width + column);
      EVERY(OWN)
#undef OWN
      put(out, (long long)row * width + column, values);
    }
  }
}

// Tokens and columns of a piece, and pieces under way: all together at most 48 KB.
#define TOKENS 64
#define COLUMNS 32
#define PITCH (COLUMNS + 8)
#define THIN_PITCH (RANK == 8 ? 8 : RANK + 8)
#define STAGES (RANK <= 8 ? 6 : RANK <= 16 ? 5 : RANK <= 32 ? 4 : 2)

static __device__ __forceinline__ void copy_later(const T* to, const T* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0));
}

// to += scale · wideᵀ thin, of wide [rows, width] and thin [rows, RANK]: as [width, RANK] if `down`, else turned over.
// A block makes COLUMNS columns of wide and goes over all rows, two of its warps over every other 32 of them, always in
// one order, so that a sum is the same in every pass.
static __device__ __forceinline__ void add_gradient(
    const T* wide, const T* thin, float* to, int rows, int width, float scale, bool down) {
  __shared__ __align__(16) T columns[STAGES][TOKENS * PITCH];
  __shared__ __align__(16) T ranks[STAGES][TOKENS * THIN_PITCH];
  __shared__ float others[2][TILES * 4][32];
  const int side = threadIdx.x / 32 % 2, half = threadIdx.x / 64, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int begin = blockIdx.x * COLUMNS, pieces = (rows + TOKENS - 1) / TOKENS;
  if (begin >= width) return;
  auto fetch = [&](int piece) {
    if (piece < pieces) {
      const int stage = piece % STAGES, top = piece * TOKENS;
      for (int at = threadIdx.x; at < TOKENS * COLUMNS / 8; at += WARPS * 32) {
        const int row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
        const bool there = top + row < rows && begin + column < width;
        copy_later(&columns[stage][row * PITCH + column],
                   there ? wide + (long long)(top + row) * width + begin + column : wide, there);
      }
      for (int at = threadIdx.x; at < TOKENS * TILES; at += WARPS * 32) {
        const int row = at / TILES, column = at % TILES * 8;
        const bool there = top + row < rows;
        copy_later(&ranks[stage][row * THIN_PITCH + column],
                   there ? thin + (long long)(top + row) * RANK + column : thin, there);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  for (int piece = 0; piece < STAGES - 1; piece++) fetch(piece);
  float sum[TILES][4] = {};
  for (int piece = 0; piece < pieces; piece++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    fetch(piece + STAGES - 1);
    const int stage = piece % STAGES;
#pragma unroll
    for (int turn = 0; turn < TOKENS / 2; turn += 16) {
      const int k = half * (TOKENS / 2) + turn;
      const int token = k + lane / 16 * 8 + lane % 8, column = side * 16 + lane / 8 % 2 * 8;
      const Four a = transposed_matrices(&columns[stage][token * PITCH + column]);
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        Pair b0, b1;
        two_transposed_matrices(&ranks[stage][(k + lane % 16) * THIN_PITCH + n * 8], b0, b1);
        multiply(sum[n], a.pair[0], a.pair[1], a.pair[2], a.pair[3], b0, b1);
      }
    }
  }
  if (half) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) others[side][n * 4 + i][lane] = sum[n][i];
  }
  __syncthreads();
  if (half) return;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[n][i] += others[side][n * 4 + i][lane];
      const int column = begin + side * 16 + g + i / 2 * 8, rank = n * 8 + c * 2 + i % 2;
      const long long at = down ? (long long)column * RANK + rank : (long long)rank * width + column;
      if (column < width) to[at] += scale * sum[n][i];
    }
}

// d_a [width, RANK] += scale · xᵀ d_z and d_b [RANK, width of above] += scale · zᵀ above, for each layer.
#define ABOVE(i) const T* above##i
#define D_Z(i) const T* d_z##i
#define D_A(i) float* d_a##i
#define D_B(i) float* d_b##i
extern "C" __global__ void __launch_bounds__(WARPS * 32) add_gradients(
    const T* x, LIST(ABOVE), LIST(NARROW), LIST(D_Z), LIST(D_A), LIST(D_B), unsigned char* mark, int rows,
    float scale, int width, LIST(WIDTH)) {
  const bool of_a = blockIdx.y % 2 == 0;
  const T *above = above0, *z = z0, *d_z = d_z0;
  float *d_a = d_a0, *d_b = d_b0;
  int out = width0;
#define OWN(i) \
  if (blockIdx.y / 2 == i) above = above##i, z = z##i, d_z = d_z##i, d_a = d_a##i, d_b = d_b##i, out = width##i;
  EVERY(OWN)
#undef OWN
  add_gradient(of_a ? x : above, of_a ? d_z : z, of_a ? d_a : d_b, rows, of_a ? width : out, scale, of_a);
}

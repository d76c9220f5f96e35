// out = silu(gate) · up
extern "C" __global__ void swiglu(const T* gate, const T* up, T* out, int size) {
  long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * WIDE;
  if (at >= size) return;
  int count = size - at < WIDE ? (int)(size - at) : WIDE;
  bool whole = count == WIDE && aligned(gate) && aligned(up) && aligned(out);
  Pack g = load(gate, at, count, whole), u = load(up, at, count, whole), result;
#pragma unroll
  for (int i = 0; i < WIDE; i++) {
    float x = number(g.part[i]);
    result.part[i] = rounded(x / (1.0f + expf(-x)) * number(u.part[i]));
  }
  store(out, at, count, whole, result);
}

extern "C" __global__ void swiglu_gradient(
    const T* gate, const T* up, const T* upstream, T* d_gate, T* d_up, int size) {
  long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * WIDE;
  if (at >= size) return;
  int count = size - at < WIDE ? (int)(size - at) : WIDE;
  bool whole = count == WIDE && aligned(gate) && aligned(up) && aligned(upstream) && aligned(d_gate) && aligned(d_up);
  Pack g = load(gate, at, count, whole), u = load(up, at, count, whole), d = load(upstream, at, count, whole);
  Pack to_gate, to_up;
#pragma unroll
  for (int i = 0; i < WIDE; i++) {
    float x = number(g.part[i]), above = number(d.part[i]);
    float share = 1.0f / (1.0f + expf(-x));
    float silu = x * share;
    to_gate.part[i] = rounded(above * number(u.part[i]) * (share + silu * (1.0f - share)));
    to_up.part[i] = rounded(above * silu);
  }
  store(d_gate, at, count, whole, to_gate);
  store(d_up, at, count, whole, to_up);
}

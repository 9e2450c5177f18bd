// A decode step as a list of operators: T requests of one token, each with a row of the workspace.
//
// An operator is a *stage* of small tasks: some rows of a weight, a head of a request, or a request. Threads claim
// tasks one by one; the thread that ends the last task of a stage opens the next. So a stage waits for tasks and
// never for threads: one whose processor a neighbour has taken costs what it would have done, not the step.

#include <bits/stdc++.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int64_t Int;

// Numbers in a register, which the compiler says: AVX-512, AVX2, or what every processor has.
#if defined(__AVX512F__)
const int WIDTH = 16;
#elif defined(__AVX2__)
const int WIDTH = 8;
#else
const int WIDTH = 4;
#endif
template <class T> struct Register {
  typedef T Type __attribute__((vector_size(WIDTH * sizeof(T))));
};
typedef Register<float>::Type V;
typedef Register<int32_t>::Type Integers;

// Rows and requests of a tile; rows that are unpacked together, and of one with four bits in PyTorch's order; inputs of
// a file's group; bytes that are fetched early; turns before a sleep.
const int SIDE = 4, ROWS = 16, BLOCK = 64, GROUP = 32, AHEAD = 8192, SPINS = 400;

// First the products, by their weights: with a scale for a row, with PyTorch's groups, and with those of a GGUF file.
enum Code { FLOAT32, BFLOAT16, INT8, INT4, Q8_0, Q4_1, ADD, NORM, SILU, GELU, TURN, ATTEND };

// Inputs that a tile multiplies at a time: those of its rows and requests stay in the nearest cache.
const Int INPUTS = 768;

struct Operator {
  // x, y and added are columns of the workspace; inputs of a group have one scale; tasks are of a request or a product.
  Int code, x, y, added, outputs, inputs, group, tasks, heads, kv_heads, window, block_size, rope;
  // scale: [N] of float32; INT4: [K / group, N] pairs of bfloat16, the scale and what 8 stands for; of a file's
  // groups [N, K / GROUP] float16, as is minimum.
  const void *weight, *scale, *minimum;
  const float *bias, *q_norm, *k_norm;
  void *keys, *values;  // [N, P, KH, D], in bfloat16 if results are
  double factor;  // eps, or what scores are multiplied by
};

template <class T> static typename Register<T>::Type get(const T *at) {
  typename Register<T>::Type found;
  memcpy(&found, at, sizeof found);
  return found;
}
// Bytes as integers of 32 bits: one instruction, which GCC does not find by itself.
#if defined(__AVX512F__)
static Integers widen(const int8_t *at) { return (Integers)_mm512_cvtepi8_epi32(*(const __m128i_u *)at); }
static Integers widen(const uint8_t *at) { return (Integers)_mm512_cvtepu8_epi32(*(const __m128i_u *)at); }
#elif defined(__AVX2__)
static Integers widen(const int8_t *at) { return (Integers)_mm256_cvtepi8_epi32(_mm_loadu_si64(at)); }
static Integers widen(const uint8_t *at) { return (Integers)_mm256_cvtepu8_epi32(_mm_loadu_si64(at)); }
#else
template <class T> static Integers widen(const T *at) { return __builtin_convertvector(get(at), Integers); }
#endif
static V load(const float *at) { return get(at); }
static V load(const uint16_t *at) { return (V)(__builtin_convertvector(get(at), Integers) << 16); }
static V load(const int8_t *at) { return __builtin_convertvector(widen(at), V); }
static void put(float *at, V x) { memcpy(at, &x, sizeof x); }

static float summed(V x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float sum = 0;
  for (int i = 0; i < WIDTH; i++) sum += x[i];
  return sum;
#endif
}

// Store a number, or its upper half, which is all of it when it is rounded.
template <class A> static void store(A *to, float x) { memcpy(to, (char *)(&x + 1) - sizeof(A), sizeof(A)); }

// Inputs that are unpacked at a time.
template <int CODE> const int SPAN = CODE < INT4 ? 16 : GROUP;

// SPAN weights of row n from input k on, in float32.
template <int CODE> static inline void unpack(const Operator &o, Int n, Int k, V *w) {
  Int at = n * o.inputs + k;
  if (CODE < INT4) {
    for (int j = 0; j < SPAN<CODE> / WIDTH; j++) {
      if (CODE == FLOAT32) w[j] = load((const float *)o.weight + at + j * WIDTH);
      if (CODE == BFLOAT16) w[j] = load((const uint16_t *)o.weight + at + j * WIDTH);
      if (CODE == INT8) w[j] = load((const int8_t *)o.weight + at + j * WIDTH);
    }
    __builtin_prefetch((const char *)o.weight + at * (CODE == FLOAT32 ? 4 : CODE == BFLOAT16 ? 2 : 1) + AHEAD);
    return;
  }
  float scale = ((const _Float16 *)o.scale)[at / GROUP];
  if (CODE == Q8_0) {
    for (int j = 0; j < GROUP / WIDTH; j++) w[j] = load((const int8_t *)o.weight + at + j * WIDTH) * scale;
    __builtin_prefetch((const char *)o.weight + at + AHEAD);
    return;
  }
  // Byte i holds inputs i and i + 16. A number times its scale is exact, so one rounding is left, as in NumPy.
  float minimum = float(((const _Float16 *)o.minimum)[at / GROUP]);
  const uint8_t *bytes = (const uint8_t *)o.weight + at / 2;
  __builtin_prefetch(bytes + AHEAD);
#if defined(__AVX512F__)
  const V numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  V table = numbers * scale + minimum;
  __m512i wide = (__m512i)widen(bytes);
  w[0] = _mm512_permutexvar_ps(wide, table);  // by the lowest four bits
  w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
#else
  const int HALF = GROUP / WIDTH / 2;
  for (int j = 0; j < HALF; j++) {
    Integers wide = widen(bytes + j * WIDTH);
    w[j] = __builtin_convertvector(wide & 15, V) * scale + minimum;
    w[j + HALF] = __builtin_convertvector(wide >> 4, V) * scale + minimum;
  }
#endif
}

// Rows from n to end times the inputs of one request.
template <int CODE> static void one(const Operator &o, Int n, Int end, float *row) {
  const float *x = row + o.x;
  for (; n < end; n += SIDE) {
    V acc[SIDE] = {}, w[SPAN<CODE> / WIDTH];
    for (Int k = 0; k < o.inputs; k += SPAN<CODE>)
      for (int r = 0; r < SIDE; r++) {
        unpack<CODE>(o, n + r, k, w);
        for (int j = 0; j < SPAN<CODE> / WIDTH; j++) acc[r] += w[j] * load(x + k + j * WIDTH);
      }
    for (int r = 0; r < SIDE; r++) row[o.y + n + r] = summed(acc[r]);
  }
}

// SIDE rows of float32 times some inputs of SIDE requests, with all sums in registers; added to what y has.
static void tile(const float *weight, Int inputs, Int some, const float *x, float *y, Int width) {
  V acc[SIDE][SIDE] = {};
  for (Int k = 0; k < some; k += WIDTH) {
    V each[SIDE];
    for (int c = 0; c < SIDE; c++) each[c] = load(x + c * width + k);
    for (int r = 0; r < SIDE; r++) {
      V w = load(weight + r * inputs + k);
      for (int c = 0; c < SIDE; c++) acc[r][c] += w * each[c];
    }
  }
  for (int c = 0; c < SIDE; c++)
    for (int r = 0; r < SIDE; r++) y[c * width + r] += summed(acc[r][c]);
}

// Rows from n to end times the inputs of T requests: ROWS at a time are unpacked once for all of them.
template <int CODE> static void some(const Operator &o, Int n, Int end, float *row, Int width, Int T) {
  struct alignas(64) Line {
    float numbers[16];
  };
  thread_local std::vector<Line> lines;  // no load of a register may cross two of them
  lines.resize(ROWS * o.inputs / 16);
  float *room = (float *)lines.data();
  for (; n < end; n += ROWS) {
    Int rows = std::min<Int>(ROWS, end - n);
    const float *weight = (const float *)o.weight + n * o.inputs;
    if (CODE != FLOAT32) {
      V w[SPAN<CODE> / WIDTH];
      for (Int r = 0; r < rows; r++)
        for (Int k = 0; k < o.inputs; k += SPAN<CODE>) {
          unpack<CODE>(o, n + r, k, w);
          memcpy(room + r * o.inputs + k, w, sizeof w);
        }
      weight = room;
    }
    for (Int t = 0; t < T; t += SIDE)
      for (Int c = t; c < t + SIDE; c++) std::fill_n(row + c * width + o.y + n, rows, 0);
    for (Int k = 0; k < o.inputs; k += INPUTS)
      for (Int t = 0; t < T; t += SIDE)
        for (Int r = 0; r < rows; r += SIDE)
          tile(weight + r * o.inputs + k, o.inputs, std::min(INPUTS, o.inputs - k), row + t * width + o.x + k,
               row + t * width + o.y + n + r, width);
  }
}

#if defined(__AVX512F__)
// BLOCK rows of four bits in PyTorch's order: [K, 32] bytes, of which byte i holds rows i and i + 32.
template <int C>
static void nibbles(const Operator &o, Int n, float *row, Int width) {
  const V numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  V scale[SIDE], zero[SIDE], acc[SIDE][C] = {};
  for (Int k = 0; k < o.inputs; k++)
    for (int r = 0; r < SIDE; r++) {
      if ((k & (o.group - 1)) == 0) {
        __m512i pair = _mm512_loadu_si512((int32_t *)o.scale + k / o.group * o.outputs + n + r * WIDTH);
        scale[r] = (V)_mm512_slli_epi32(pair, 16), zero[r] = (V)(pair & _mm512_set1_epi32(0xffff0000));
      }
      const char *at = (const char *)o.weight + n * o.inputs / 2 + k * BLOCK / 2 + r % 2 * WIDTH;
      __m512i bytes = _mm512_srli_epi32(_mm512_cvtepu8_epi32(*(const __m128i_u *)at), r / 2 * 4);
      V w = _mm512_permutexvar_ps(bytes, numbers) * scale[r] + zero[r];  // by the lowest four bits
      __builtin_prefetch(at + AHEAD);
      for (int c = 0; c < C; c++) acc[r][c] += w * row[c * width + o.x + k];
    }
  for (int r = 0; r < SIDE; r++)
    for (int c = 0; c < C; c++) put(row + c * width + o.y + n + r * WIDTH, acc[r][c]);
}

#endif

static void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct Step {
  const Operator *operators;
  float *workspace;  // [T, width]
  const Int *positions;
  const int32_t *tables;  // [T, columns]
  Int count, T, width, columns, half;  // half: results are rounded to bfloat16
  std::atomic<uint32_t> ticket{0}, done{0};  // stage << 16 | next task; tasks that are done

  float rounded(float x) const {  // to the nearest, ties to even
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return half && x == x ? std::bit_cast<float>(bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000) : x;
  }

  void norm(const float *x, const float *weight, Int n, double eps, float *y) const {
    V sum = {};
    for (Int i = 0; i < n; i += WIDTH) sum += load(x + i) * load(x + i);
    float factor = 1 / std::sqrt(summed(sum) / n + float(eps));
    for (Int i = 0; i < n; i++) y[i] = rounded(x[i] * factor * weight[i]);
  }

  Int place(const Operator &o, Int t, Int token, Int head) const {  // of a head in the cache
    Int block = tables[t * columns + token / o.block_size];
    return ((block * o.block_size + token % o.block_size) * o.kv_heads + head) * o.inputs;
  }

  template <class A>
  void turn(const Operator &o, Int t, Int head) {  // normalize and rotate a query or a key; store key and value
    Int n = o.inputs, kv = head - o.heads, at = place(o, t, positions[t], std::max<Int>(kv, 0));
    float *row = workspace + t * width, *x = row + o.x + head * n, *rope = row + o.rope;
    if (const float *weight = kv < 0 ? o.q_norm : o.k_norm) norm(x, weight, n, o.factor, x);
    std::vector<float> in(x, x + n);
    for (Int i = 0; i < n; i++) {
      x[i] = rounded(in[i] * rope[i] + in[(i + n / 2) % n] * rope[n + i]);
      if (kv < 0) continue;
      store((A *)o.keys + at + i, x[i]);
      store((A *)o.values + at + i, x[o.kv_heads * n + i]);
    }
  }

  template <class A>
  void attend(const Operator &o, Int t, Int head) {
    Int n = o.inputs, kv = head * o.kv_heads / o.heads, end = positions[t] + 1, begin = std::max<Int>(0, end - o.window);
    float *q = workspace + t * width + o.x + head * n, *out = workspace + t * width + o.y + head * n;
    float most = -INFINITY, total = 0;
    std::fill(out, out + n, 0);
    for (Int i = begin; i < end; i++) {
      Int at = place(o, t, i, kv);
      V sum = {};
      for (Int j = 0; j < n; j += WIDTH) sum += load((A *)o.keys + at + j) * load(q + j);
      float score = summed(sum) * float(o.factor), top = std::max(most, score);
      float keep = std::exp(most - top), weight = std::exp(score - top);
      total = total * keep + weight, most = top;
      for (Int j = 0; j < n; j += WIDTH)
        put(out + j, load(out + j) * keep + load((A *)o.values + at + j) * weight);
    }
    for (Int i = 0; i < n; i++) out[i] = rounded(out[i] / total);
  }

  template <int CODE> void rows(const Operator &o, Int n, Int end) {
    T == 1 ? one<CODE>(o, n, end, workspace) : some<CODE>(o, n, end, workspace, width, T);
  }

  void product(const Operator &o, Int first, Int end) {
    if (o.code == FLOAT32) rows<FLOAT32>(o, first, end);
    if (o.code == BFLOAT16) rows<BFLOAT16>(o, first, end);
    if (o.code == INT8) rows<INT8>(o, first, end);
    if (o.code == Q8_0) rows<Q8_0>(o, first, end);
    if (o.code == Q4_1) rows<Q4_1>(o, first, end);
#if defined(__AVX512F__)
    for (Int n = first; o.code == INT4 && n < end; n += BLOCK)
      for (Int t = 0; t < T; t += SIDE) (T == 1 ? nibbles<1> : nibbles<SIDE>)(o, n, workspace + t * width, width);
#endif
    if (!half && !o.bias && o.code != INT8) return;
    for (Int t = 0; t < T; t++)
      for (Int n = first; n < end; n++) {
        float &y = workspace[t * width + o.y + n];
        y = rounded(y * (o.code == INT8 ? ((float *)o.scale)[n] : 1) + (o.bias ? o.bias[n] : 0));
      }
  }

  void task(const Operator &o, Int i) {
    Int blocks = (o.outputs + BLOCK - 1) / BLOCK;  // none where it is no product
    Int first = blocks * i / o.tasks * BLOCK, end = std::min(blocks * (i + 1) / o.tasks * BLOCK, o.outputs);
    if (o.code < ADD) product(o, first, end);
    Int t = i / o.tasks, head = i % o.tasks;
    float *x = workspace + t * width + o.x, *y = workspace + t * width + o.y;
    for (Int j = 0; o.code == ADD && j < o.inputs; j++) x[j] = rounded(x[j] + workspace[t * width + o.added + j]);
    if (o.code == ADD || o.code == NORM) norm(x, (const float *)o.weight, o.inputs, o.factor, y);
    if (o.code == TURN) half ? turn<uint16_t>(o, t, head) : turn<float>(o, t, head);
    if (o.code == ATTEND) half ? attend<uint16_t>(o, t, head) : attend<float>(o, t, head);
    for (Int j = 0; (o.code == SILU || o.code == GELU) && j < o.inputs; j++) {
      float z = x[j], slope = o.code == SILU ? z : 1.5957691216f * (z + 0.044715f * z * z * z);
      y[j] = rounded(rounded(z / (1 + std::exp(-slope))) * x[o.inputs + j]);  // 1 + tanh(s / 2) = 2 / (1 + e^-s)
    }
  }

  void work() {  // each thread, until there is no stage left
    for (;;) {
      uint32_t mine = ticket.fetch_add(1), stage = mine >> 16, seen;
      if (stage == count) return;
      Int all = operators[stage].tasks * (operators[stage].code < ADD ? 1 : T);
      if ((mine & 0xffff) < all) {
        task(operators[stage], mine & 0xffff);
        if (done.fetch_add(1) + 1 < all) continue;
        done = 0, ticket = (stage + 1) << 16;
        ticket.notify_all();
      } else {
        for (int i = 0; (seen = ticket) >> 16 == stage && i < SPINS; i++) relax();
        if (seen >> 16 == stage) ticket.wait(seen);
      }
    }
  }
};

extern "C" void run(const Operator *operators, float *workspace, const Int *positions, const int32_t *tables, Int count,
                    Int T, Int width, Int columns, Int half, Int threads) {
  Step step{operators, workspace, positions, tables, count, T, width, columns, half};
#pragma omp parallel num_threads(int(threads))
  step.work();
}
